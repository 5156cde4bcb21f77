from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from draftsmith.draft.files import EMBEDDING
from draftsmith.draft.model import Draft
from draftsmith.draft.unroll import unroll
from draftsmith.errors import CheckpointError
from draftsmith.export.formats import tensors_to_ship
from draftsmith.export.parity import check_identical, read_sglang, read_vllm
from tests.draft.builders import DRAFT_IDS, HIDDEN, make_batch
from tests.export.builders import (
    PLAIN,
    change_config,
    change_tensors,
    export_sglang,
    export_vllm,
    make_draft,
    make_facts,
)
from tests.export.test_formats import FORMS, LLAMA3

BOTH = [(export_vllm, read_vllm), (export_sglang, read_sglang)]
SHAPES = [{**PLAIN, **form, "norm_before_residual": False} for form in FORMS[6:]]
SHAPES += [
    {**PLAIN, "draft_vocab_size": 23},
    {**PLAIN, "aux_layer_ids": (1, 2, 4, 5)},
    {**PLAIN, "target_hidden_size": 2 * HIDDEN},
    {**PLAIN, "rope_theta": 5e5, "rope_scaling": LLAMA3},
]


@pytest.fixture(params=BOTH, ids=["vllm", "sglang"])
def exported(request, tmp_path, tiny_target):
    """A folder in each format and its reader."""
    export, read = request.param
    return export(tmp_path / "draft", make_draft(**PLAIN), make_facts(tiny_target)), read


@pytest.mark.parametrize(("export", "read"), BOTH)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_read_back_is_bit_for_bit_what_was_trained(tmp_path, tiny_target, export, read, shape):
    draft = make_draft(**shape)
    folder = export(tmp_path, draft, make_facts(tiny_target))
    back = read(folder)
    check_identical(back, draft.config, tensors_to_ship(draft, torch.bfloat16), folder)
    assert back.config == draft.config
    for name, tensor in draft.to(torch.bfloat16).state_dict().items():
        if name in back.tensors:
            assert torch.equal(back.tensors[name], tensor)


@pytest.mark.parametrize("form", FORMS)
def test_a_draft_read_back_drafts_what_the_trained_one_does(tmp_path, tiny_target, form):
    draft, batch = make_draft(**form), make_batch([7])
    folder = export_vllm(tmp_path, draft, make_facts(tiny_target), torch.float32)
    back = assembled(read_vllm(folder), draft)
    for ours, theirs in zip(*(drafted(d, batch) for d in (draft, back)), strict=True):
        assert torch.equal(ours, theirs)


def test_the_rope_that_a_folder_says_is_the_one_that_its_draft_computes_with(tmp_path, tiny_target):
    batch, outputs = make_batch([7]), []
    for theta in (1e4, 1e6):
        draft = make_draft(rope_theta=theta)
        folder = export_vllm(tmp_path / str(theta), draft, make_facts(tiny_target), torch.float32)
        outputs.append(next(drafted(assembled(read_vllm(folder), draft), batch)))
    assert not torch.allclose(*outputs)


def drafted(draft, batch):
    return unroll(draft, batch.input_ids, batch.aux.float(), batch.position, [(0, 7)], 3)


def assembled(back, trained):
    """The draft of a folder, with the embedding of another."""
    draft = Draft(back.config)
    draft.load_state_dict({**back.tensors, EMBEDDING: trained.embed_tokens.weight}, assign=True)
    return draft.requires_grad_(False)


def test_any_bit_that_is_not_what_was_trained_is_found(tmp_path, tiny_target):
    draft = make_draft()
    shipped = tensors_to_ship(draft, torch.bfloat16)
    folder = export_vllm(tmp_path, draft, make_facts(tiny_target))
    for name in shipped:
        if name in ("d2t", "t2d"):
            continue
        read = read_vllm(folder)
        flat = read.tensors[name].view(torch.int16).view(-1)
        flat[-1] ^= 1
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            check_identical(read, draft.config, shipped, folder)


def test_a_tensor_that_was_not_shipped_is_found(tmp_path, tiny_target):
    draft = make_draft()
    shipped = tensors_to_ship(draft, torch.bfloat16)
    folder = export_vllm(tmp_path, draft, make_facts(tiny_target))
    change_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(23, HIDDEN)}))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: in the folder or"):
        check_identical(read_vllm(folder), draft.config, shipped, folder)


def test_any_field_that_is_not_what_was_trained_is_found(tmp_path, tiny_target):
    draft = make_draft()
    folder = export_vllm(tmp_path, draft, make_facts(tiny_target))
    shipped = tensors_to_ship(draft, torch.bfloat16)
    for change in ({"rope_theta": 1e6}, {"rope_scaling": LLAMA3}, {"rms_norm_eps": 1e-6}, {"aux_layer_ids": (1, 2, 3)}):
        trained = dataclasses.replace(draft.config, **change)
        with pytest.raises(CheckpointError, match=next(iter(change))):
            check_identical(read_vllm(folder), trained, shipped, folder)


@pytest.mark.parametrize(
    ("flag", "weight", "form"),
    [
        ("norm_before_fc", "input_norm.weight", {"norm_before_fc": True}),
        ("fc_norm", "fc_norm.", {"fc_norm": True}),
    ],
)
@pytest.mark.parametrize(("export", "read"), BOTH)
def test_a_flag_without_its_weight_and_a_weight_without_its_flag_are_errors(
    tmp_path, tiny_target, export, read, flag, weight, form
):
    facts = make_facts(tiny_target)
    without_weight = export(tmp_path / "a", make_draft(**{**PLAIN, **form}), facts)
    change_tensors(without_weight, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith(weight)])
    with pytest.raises(CheckpointError, match=f"{flag} is true, but no"):
        read(without_weight)
    without_flag = export(tmp_path / "b", make_draft(**{**PLAIN, **form}), facts)
    change_config(without_flag, lambda config: unset(config, flag))
    with pytest.raises(CheckpointError, match=f"{weight}.*is there, but {flag} is false"):
        read(without_flag)


def unset(config, flag):
    for place in (config, config.get("transformer_layer_config", {}), config.get("eagle_config", {})):
        if flag in place:
            place[flag] = False


KEYS = ["norm_before_residual", "norm_output", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size"]


@pytest.mark.parametrize("key", [*KEYS, "norm_before_fc", "fc_norm", "target_hidden_size"])
def test_a_key_for_which_engines_assume_different_things_must_be_there(exported, key):
    folder, read = exported
    change_config(
        folder, lambda config: [place.pop(key, None) for place in (config, config.get("transformer_layer_config", {}))]
    )
    with pytest.raises(CheckpointError, match=key):
        read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(d2t=t["d2t"] + torch.arange(len(t["d2t"]))), "d2t: .*"),
        (lambda t: t["t2d"].logical_not_(), "d2t: "),
        (lambda t: t["t2d"].fill_(True), "t2d marks 23 tokens"),
        (lambda t: t.pop("d2t"), f"d2t is missing: an engine would say the first {len(DRAFT_IDS)} tokens only"),
        (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight is missing"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][1:]}), r"lm_head\.weight has shape \[8, 8\]"),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"][:, :-HIDDEN]}),
            r"fc\.weight has shape \[8, 16\], not \[8, 24",
        ),
        (lambda t: t.update({"fc.bias": torch.zeros(HIDDEN)}), r"called fc\.bias"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(22, HIDDEN)}), r"embed_tokens\.weight has shape \[22"),
        (lambda t: t.pop("norm.weight"), r"norm\.weight is missing"),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_errors_that_name_the_tensor(exported, change, message):
    folder, read = exported
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        read(folder)


def test_target_ids_in_place_of_offsets_are_called_that(exported):
    folder, read = exported
    change_tensors(folder, lambda t: t.update(d2t=t["d2t"] + torch.arange(len(t["d2t"]))))
    with pytest.raises(CheckpointError) as error:
        read(folder)
    assert "target ids" in (error.value.hint or "")


def test_a_map_where_the_vocabulary_is_whole_is_an_error(tmp_path, tiny_target):
    folder = export_vllm(tmp_path, make_draft(draft_vocab_size=23), make_facts(tiny_target))
    change_tensors(folder, lambda t: t.update(d2t=torch.zeros(23, dtype=torch.int64)))
    with pytest.raises(CheckpointError, match="d2t is not part of a draft of this configuration"):
        read_vllm(folder)


def test_a_draft_of_another_width_than_the_target_must_bring_its_embedding(tmp_path, tiny_target):
    folder = export_vllm(tmp_path, make_draft(target_hidden_size=2 * HIDDEN), make_facts(tiny_target))
    assert read_vllm(folder).tensors[EMBEDDING].shape == (23, HIDDEN)
    change_tensors(folder, lambda tensors: tensors.pop("embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is missing"):
        read_vllm(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(auto_map={"AutoConfig": "x.Y"}), "auto_map"),
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings"),
        (lambda c: c.update(speculators_model_type="eagle"), "speculators_model_type"),
        (lambda c: c.pop("speculators_config"), "speculators_config"),
        (lambda c: c["speculators_config"].update(proposal_methods=[]), "speculative_tokens"),
        (lambda c: c["transformer_layer_config"].update(norm_output=True), "norm_output is False at the root, True"),
        (lambda c: c["transformer_layer_config"].update(num_aux_hidden_states=4), "num_aux_hidden_states is 4"),
        (lambda c: c["transformer_layer_config"].update(rope_theta=1e6), "rope_theta is 1000000.0, but 10000.0"),
        (lambda c: c["transformer_layer_config"].update(rope_scaling=LLAMA3), "rope_scaling"),
        (lambda c: c["transformer_layer_config"].update(num_key_value_heads=3), "4 attention heads cannot share 3"),
    ],
)
def test_a_speculators_configuration_that_contradicts_itself_is_an_error(tmp_path, tiny_target, change, message):
    folder = export_vllm(tmp_path, make_draft(**PLAIN), make_facts(tiny_target))
    change_config(folder, change)
    with pytest.raises(CheckpointError, match=message):
        read_vllm(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 4, 5]), "layer ids"),
        (lambda c: c["eagle_config"].update(norm_before_fc=True), "norm_before_fc"),
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings"),
    ],
)
def test_a_flat_configuration_that_contradicts_itself_is_an_error(tmp_path, tiny_target, change, message):
    folder = export_sglang(tmp_path, make_draft(**PLAIN), make_facts(tiny_target))
    change_config(folder, change)
    with pytest.raises(CheckpointError, match=message):
        read_sglang(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_named(exported, name):
    folder, read = exported
    file: Path = folder / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=f"{name}:? cannot be read"):
        read(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{name}:? cannot be read"):
        read(folder)
