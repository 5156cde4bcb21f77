from __future__ import annotations

import itertools

import pytest

from draftsmith.draft.names import from_sglang, from_vllm, rename_all, to_sglang
from draftsmith.errors import CheckpointError
from tests.draft.builders import make_draft

FORMS = [{}, {"norm_before_fc": False, "fc_norm": True}]


@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_of_a_draft_has_a_name_in_each_format_and_finds_back(form):
    names = make_draft(**form).state_dict()
    renamed = rename_all(names, to_sglang)
    assert len(renamed) == len(names)
    assert rename_all(renamed, from_sglang).keys() == names.keys()


def test_vllm_names_are_ours_and_sglang_calls_the_layer_midlayer():
    names = make_draft().state_dict()
    assert rename_all(names, from_vllm).keys() == names.keys()
    changed = {ours: theirs for ours in names if (theirs := to_sglang(ours)) != ours}
    assert set(changed) == {name for name in names if name.startswith("layers.0.")}
    assert all(theirs == ours.replace("layers.0.", "midlayer.") for ours, theirs in changed.items())


@pytest.mark.parametrize(
    "name",
    [
        "fc.bias",
        "lm_head.bias",
        "layers.0.self_attn.q_proj.bias",
        "layers.1.mlp.up_proj.weight",
        "model.norm.weight",
        "layers.0.self_attn.q_norm.weight",
        "layers.0.mlp.up_proj.weight_scale",
        "lm_head.weight_scale",
        "xlayers.0.mlp.up_proj.weight",
        "fc_norm.weight",
        "layers.0.",
        "",
    ],
)
def test_a_name_that_no_draft_has_is_an_error_that_says_it(name):
    for rename in (from_vllm, to_sglang, from_sglang):
        with pytest.raises(CheckpointError) as error:
            rename_all({"fc.weight": 0, name: 0, "mask_hidden": 0}, rename)
        assert name in error.value.what
        assert "mask_hidden" in error.value.what
        assert "fc.weight" not in error.value.what


def test_the_layer_of_one_format_is_unknown_to_the_other():
    for rename, name in itertools.product((from_sglang, to_sglang), ["layers.0.", "midlayer."]):
        known = (rename is to_sglang) == (name == "layers.0.")
        tensors = {f"{name}mlp.up_proj.weight": 0}
        if known:
            assert rename_all(tensors, rename)
        else:
            with pytest.raises(CheckpointError, match="up_proj"):
                rename_all(tensors, rename)
