from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_ids_as_specforge_writes_them_are_those_it_trained_with_and_its_norm_is_not_taken_for_another(
    tmp_path: Path, tiny_target: Path, earlier: Path
) -> None:
    facts, folder = read_facts(str(tiny_target)), tmp_path / "flat"
    head = load_head(facts, torch.device("cpu"), torch.float32)
    write_flat(folder, load_draft(earlier, head))
    config = json.loads((folder / "config.json").read_text())
    assert config["norm_output"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [id - 1 for id in AUX_LAYER_IDS]
    del config["eagle_aux_hidden_state_layer_ids"]
    write_json(folder / "config.json", config)
    with pytest.raises(CheckpointError, match="norm_output=true, which in SpecForge is the norm before the head"):
        first_draft(tmp_path, tiny_target, initial=str(folder))
    ids = [id + 1 for id in AUX_LAYER_IDS]  # which are not vLLM's default
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(AUX_LAYER_IDS)
    write_json(folder / "config.json", {**config, "norm_output": False})
    draft, notes = load_engine_draft(folder, facts, head, to_train=True)
    assert (draft.config.aux_layer_ids, draft.config.norm_output) == (tuple(ids), False)
    assert any(
        f"aux_layer_ids {list(AUX_LAYER_IDS)} in eagle_config alone" in n and f"it is {ids} here" in n for n in notes
    )
    served, notes = load_engine_draft(folder, facts, head)
    assert served.config.aux_layer_ids == default_aux_layer_ids(facts.num_hidden_layers or 0)
    assert any("which vLLM passes over: it takes" in n for n in notes)
    assert not any("does not say aux_layer_ids" in n for n in notes)


def write_flat(folder: Path, draft: Draft, **tensors: torch.Tensor) -> None:
    """A draft as SGLang and the published ones have it, whose weights hold `tensors` too."""
    shipped = {**tensors_to_ship(draft, torch.bfloat16), **tensors}
    del shipped["t2d"]  # which no engine reads
    write_folder(folder, sglang_config(draft.config, torch.bfloat16), rename_all(shipped, to_sglang))


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
    write_json(tmp_path / "flat/draftsmith.json", {})  # whose norm_output is vLLM's
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
