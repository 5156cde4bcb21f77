from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.draft.engine_draft import load_engine_draft
from draftsmith.draft.files import load_draft, save_draft
from draftsmith.draft.model import Draft
from draftsmith.draft.names import rename_all, to_sglang
from draftsmith.errors import CheckpointError, DataError, RequestError
from draftsmith.export.formats import sglang_config, tensors_to_ship, write_folder, write_vllm
from draftsmith.layers import default_aux_layer_ids
from draftsmith.pipeline import _files
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import parse
from draftsmith.rundir import RunPaths, write_json
from draftsmith.target import load_head
from draftsmith.train.initial import first_draft as first_draft_of
from tests.train.builders import AUX_LAYER_IDS, DRAFT_IDS


def first_draft(run: Path, target: Path, **settings: Any) -> Draft:
    """What training in a run begins with."""
    paths, facts = RunPaths(run), read_facts(str(target))
    paths.draft_vocab.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        paths.draft_vocab,
        {"token_ids": DRAFT_IDS, "draft_vocab_size": len(DRAFT_IDS), "target_vocab_size": facts.vocab_size},
    )
    recipe = parse({"name": "t", "target": {"model": str(target)}, "train": {"draft": settings}})
    head = load_head(facts, torch.device("cpu"), torch.float32)
    return first_draft_of(recipe, paths, facts, head, AUX_LAYER_IDS)[0]


@pytest.fixture
def earlier(tmp_path: Path, tiny_target: Path) -> Path:
    """A draft that was trained before, in half precision."""
    draft = first_draft(tmp_path / "earlier", tiny_target)
    with torch.no_grad():
        draft.fc.weight.add_(1.0)
    save_draft(tmp_path / "checkpoint", draft.bfloat16())
    return tmp_path / "checkpoint"


def test_training_goes_on_from_an_earlier_draft_in_float32(tmp_path: Path, tiny_target: Path, earlier: Path) -> None:
    head = load_head(read_facts(str(tiny_target)), torch.device("cpu"), torch.float32)
    draft, trained = first_draft(tmp_path, tiny_target, initial=str(earlier)), load_draft(earlier, head)
    for name, weight in draft.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, trained.get_parameter(name).float()), name
        assert weight.requires_grad == (name != "embed_tokens.weight")


def test_an_earlier_draft_of_another_shape_is_refused_with_the_settings_to_give(
    tmp_path: Path, tiny_target: Path, earlier: Path
) -> None:
    with pytest.raises(RequestError, match=r"another shape than this run's draft: train\.draft\.norm_output=true"):
        first_draft(tmp_path, tiny_target, initial=str(earlier), norm_output=False)


def test_an_earlier_draft_keeps_its_vocabulary(tmp_path: Path, tiny_target: Path, earlier: Path) -> None:
    head = load_head(read_facts(str(tiny_target)), torch.device("cpu"), torch.float32)
    other = load_draft(earlier, head)
    other.d2t[-1] += 1
    save_draft(earlier, other)
    draft = first_draft(tmp_path, tiny_target, initial=str(earlier))
    assert draft.d2t.equal(other.d2t)


def specforge(folder: Path, draft: Draft, **settings: object) -> Path:
    """A draft as SpecForge leaves it: the ids that it reads less one, in `eagle_config` alone."""
    write_flat(folder, draft)
    (folder / "draftsmith.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [id - 1 for id in draft.config.aux_layer_ids]
    del config["eagle_aux_hidden_state_layer_ids"]
    write_json(folder / "config.json", {**config, **settings})
    return folder


def test_ids_as_specforge_writes_them_are_those_it_trained_with_and_passed_over_as_vllm_does(
    tmp_path: Path, tiny_target: Path
) -> None:
    facts = read_facts(str(tiny_target))
    head = load_head(facts, torch.device("cpu"), torch.float32)
    trained = first_draft(tmp_path, tiny_target, norm_output=False)
    trained.config = dataclasses.replace(trained.config, aux_layer_ids=(3, 4, 6))  # which are not vLLM's default
    folder = specforge(tmp_path / "flat", trained)
    draft, notes = load_engine_draft(folder, facts, head, to_train=True)
    assert draft.config.aux_layer_ids == (3, 4, 6)
    assert "[2, 3, 5] are canonical [3, 4, 6]" in " ".join(notes)
    served, notes = load_engine_draft(folder, facts, head)
    assert served.config.aux_layer_ids == default_aux_layer_ids(facts.num_hidden_layers or 0)
    assert "vLLM takes [2, 4, 5]" in " ".join(notes)
    assert "[2, 3, 5] are passed over by vLLM" in " ".join(notes)
    with pytest.raises(RequestError, match=r"extract\.aux_layer_ids=\[3, 4, 6\]"):
        first_draft(tmp_path, tiny_target, initial=str(folder), norm_output=False)


@pytest.mark.parametrize("ids", ["2", ["low"], {"low": 2}])
def test_nested_ids_that_are_none_are_named(tmp_path: Path, tiny_target: Path, earlier: Path, ids: object) -> None:
    head = load_head(read_facts(str(tiny_target)), torch.device("cpu"), torch.float32)
    folder = specforge(
        tmp_path / "flat",
        load_draft(earlier, head),
        norm_output=False,
        eagle_config={"eagle_aux_hidden_state_layer_ids": ids},
    )
    with pytest.raises(CheckpointError, match="aux_layer_ids"):
        first_draft(tmp_path, tiny_target, initial=str(folder))


def test_a_norm_that_may_be_specforges_is_not_taken_for_vllms(tmp_path: Path, tiny_target: Path, earlier: Path) -> None:
    head = load_head(read_facts(str(tiny_target)), torch.device("cpu"), torch.float32)
    folder = specforge(tmp_path / "flat", load_draft(earlier, head), norm_output=True)
    with pytest.raises(CheckpointError, match="norm_output=true, which in SpecForge is the norm before the head"):
        first_draft(tmp_path, tiny_target, initial=str(folder))
    specforge(folder, load_draft(earlier, head), norm_output=False)
    assert not first_draft(tmp_path, tiny_target, initial=str(folder), norm_output=False).config.norm_output


def test_a_draft_of_the_whole_vocabulary_without_a_head_has_a_copy_of_the_targets(
    tmp_path: Path, tiny_target: Path
) -> None:
    facts = read_facts(str(tiny_target))
    head = load_head(facts, torch.device("cpu"), torch.float32)
    whole = Draft(dataclasses.replace(first_draft(tmp_path, tiny_target).config, draft_vocab_size=facts.vocab_size))
    write_vllm(tmp_path / "vllm", whole, torch.float32, "target", facts, 3)
    without(tmp_path / "vllm", "lm_head.weight")
    draft = first_draft(tmp_path, tiny_target, initial=str(tmp_path / "vllm"))
    assert torch.equal(draft.lm_head.weight, head.lm_head)
    loaded, _ = load_engine_draft(tmp_path / "vllm", facts, head)
    loaded.lm_head.weight.data.zero_()
    assert head.lm_head.any()  # it learns from the target's, and must not change it


@pytest.mark.parametrize("name", ["d2t", "lm_head.weight"])
def test_a_draft_of_some_tokens_without_its_map_or_its_head_is_refused(
    tmp_path: Path, tiny_target: Path, earlier: Path, name: str
) -> None:
    facts = read_facts(str(tiny_target))
    trained = load_draft(earlier, load_head(facts, torch.device("cpu"), torch.float32))
    write_vllm(tmp_path / "vllm", trained, torch.float32, "target", facts, 3)
    without(tmp_path / "vllm", name)
    with pytest.raises(CheckpointError, match=f"{name}: not in the weights"):
        first_draft(tmp_path, tiny_target, initial=str(tmp_path / "vllm"))


def without(folder: Path, name: str) -> None:
    """Take a tensor out of a draft's weights."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


def write_flat(folder: Path, draft: Draft, **tensors: torch.Tensor) -> None:
    """A draft as we export it for SGLang, whose weights hold `tensors` too."""
    shipped = {**tensors_to_ship(draft, torch.bfloat16), **tensors}
    del shipped["t2d"]  # which no engine reads
    write_folder(folder, sglang_config(draft.config, torch.bfloat16), rename_all(shipped, to_sglang))
    write_json(folder / "draftsmith.json", {})  # our own, whose norm_output is vLLM's


def test_training_goes_on_from_a_draft_in_an_engines_format(tmp_path: Path, tiny_target: Path, earlier: Path) -> None:
    facts = read_facts(str(tiny_target))
    head = load_head(facts, torch.device("cpu"), torch.float32)
    trained = load_draft(earlier, head)
    write_vllm(tmp_path / "vllm", trained, torch.bfloat16, "target", facts, 3)
    write_flat(tmp_path / "flat", trained, **{"embed_tokens.weight": head.embedding.bfloat16()})
    (tmp_path / "flat/config.json").write_text(  # rotary frequencies of its own
        (tmp_path / "flat/config.json")
        .read_text()
        .replace(f'"rope_theta": {trained.config.rope_theta}', '"rope_theta": 500.0')
    )
    for name, theta in (("vllm", trained.config.rope_theta), ("flat", 500.0)):
        draft = first_draft(tmp_path, tiny_target, initial=str(tmp_path / name))
        assert draft.config == dataclasses.replace(trained.config, rope_theta=theta)
        for key, weight in draft.named_parameters():
            assert weight.requires_grad == (key != "embed_tokens.weight")
            assert torch.equal(weight, trained.get_parameter(key).float()), key
        assert (draft.d2t.equal(trained.d2t), draft.t2d.equal(trained.t2d)) == (True, True)


def test_training_that_began_with_another_draft_of_the_same_name_is_stale(tmp_path: Path, tiny_target: Path) -> None:
    recipe = parse({"name": "t", "target": {"model": "m"}, "train": {"draft": {"initial": str(tmp_path / "earlier")}}})
    prints = []
    for value in (0.0, 1.0):
        draft = first_draft(tmp_path, tiny_target)
        draft.fc.weight.data.fill_(value)
        save_draft(tmp_path / "earlier", draft)
        prints.append(_files("train", recipe))
    assert (
        prints[0].keys()
        == prints[1].keys()
        == {f"{tmp_path}/earlier/{of}" for of in ("config.json", "model.safetensors")}
    )
    assert prints[0] != prints[1]


def test_a_draft_whose_embedding_was_trained_is_refused(tmp_path: Path, tiny_target: Path, earlier: Path) -> None:
    head = load_head(read_facts(str(tiny_target)), torch.device("cpu"), torch.float32)
    other = head.embedding.bfloat16() + 1
    write_flat(tmp_path / "flat", load_draft(earlier, head), **{"embed_tokens.weight": other})
    with pytest.raises(CheckpointError, match="embedding that is not the target's"):
        first_draft(tmp_path, tiny_target, initial=str(tmp_path / "flat"))


def test_a_draft_whose_map_is_none_is_refused(tmp_path: Path, tiny_target: Path, earlier: Path) -> None:
    head = load_head(read_facts(str(tiny_target)), torch.device("cpu"), torch.float32)
    draft = load_draft(earlier, head)
    write_flat(tmp_path / "flat", draft, d2t=draft.d2t + torch.arange(len(draft.d2t)))
    with pytest.raises(DataError, match="d2t seems to hold target ids"):
        first_draft(tmp_path, tiny_target, initial=str(tmp_path / "flat"))
