from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.draft.files import load_draft, save_draft
from draftsmith.draft.model import Draft
from draftsmith.errors import CheckpointError
from tests.draft.builders import DRAFT_IDS, make_config, make_draft, make_head, sign
from tests.export.builders import PLAIN, export_sglang, export_vllm, make_facts
from tests.export.builders import make_draft as make_plain_draft


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_draft(tmp_path / "draft", make_draft())
    return tmp_path / "draft"


@pytest.mark.parametrize("overrides", [{}, {"norm_before_fc": False, "fc_norm": True}, {"draft_vocab_size": 23}])
def test_what_is_loaded_is_bit_for_bit_what_was_saved(tmp_path: Path, overrides: dict[str, object]) -> None:
    draft = make_draft(**overrides) if "draft_vocab_size" not in overrides else whole_vocabulary_draft()
    save_draft(tmp_path, draft)
    loaded = load_draft(tmp_path, make_head())
    assert loaded.config == draft.config
    for name, tensor in draft.state_dict().items():
        expected = make_head().embedding if name == "embed_tokens.weight" else tensor
        assert loaded.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(loaded.state_dict()[name], expected)


def whole_vocabulary_draft() -> Draft:
    draft = Draft(make_config(draft_vocab_size=23)).double()
    draft.initialise(make_head(), None, seed=0)
    return draft


def test_only_the_embedding_is_frozen_after_loading(saved: Path) -> None:
    frozen = [
        name for name, parameter in load_draft(saved, make_head()).named_parameters() if not parameter.requires_grad
    ]
    assert frozen == ["embed_tokens.weight"]


def test_casting_a_loaded_draft_leaves_the_head_as_it_was(saved: Path) -> None:
    head = make_head()
    load_draft(saved, head).to(torch.bfloat16)
    assert torch.equal(head.embedding, make_head().embedding)


def test_the_folder_holds_no_embedding(saved: Path) -> None:
    assert "embed_tokens.weight" not in load_file(saved / "model.safetensors")


def test_every_tensor_that_is_missing_is_named(saved: Path) -> None:
    for name in load_file(saved / "model.safetensors"):
        change(saved, lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            load_draft(saved, make_head())
        save_draft(saved, make_draft())


def test_a_tensor_of_another_shape_is_named(saved: Path) -> None:
    change(saved, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :-1].contiguous()}))
    with pytest.raises(CheckpointError, match=r"fc.weight has shape \[8, 23\], not \[8, 24\]"):
        load_draft(saved, make_head())


def test_a_vocabulary_map_in_another_dtype_is_named(saved: Path) -> None:
    change(saved, lambda tensors: tensors.update({"t2d": tensors["t2d"].to(torch.int64)}))
    with pytest.raises(CheckpointError, match=r"t2d is torch.int64"):
        load_draft(saved, make_head())


def test_a_tensor_that_this_draft_does_not_have_is_named(saved: Path) -> None:
    change(saved, lambda tensors: tensors.update({"fc.bias": torch.zeros(8)}))
    with pytest.raises(CheckpointError, match=r"fc.bias is not part"):
        load_draft(saved, make_head())


def test_a_draft_for_another_target_is_refused(saved: Path) -> None:
    head = make_head()
    head.embedding = torch.nn.Parameter(head.embedding[:-1], requires_grad=False)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has shape \[22, 8\]"):
        load_draft(saved, head)


def test_a_folder_whose_writing_was_cut_short_is_no_draft(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftsmith.draft.files.save_file", die)
    with pytest.raises(KeyboardInterrupt):
        save_draft(saved, make_draft())
    with pytest.raises(CheckpointError, match="no complete draft"):
        load_draft(saved, make_head())
    assert sorted(file.name for file in saved.iterdir()) == ["model.safetensors"]


def test_a_damaged_file_is_named(saved: Path) -> None:
    weights = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(weights[:-8])
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        load_draft(saved, make_head())


def test_one_flipped_bit_in_the_weights_is_noticed(saved: Path) -> None:
    weights = bytearray((saved / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (saved / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match=r"model.safetensors: is not what was written"):
        load_draft(saved, make_head())


def test_a_configuration_that_lacks_a_field_names_it(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    del config["norm_output"]
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="norm_output"):
        load_draft(saved, make_head())


@pytest.mark.parametrize("export", [export_vllm, export_sglang])
def test_an_exported_draft_is_said_to_be_no_checkpoint(
    tmp_path: Path, tiny_target: Path, export: Callable[..., Path]
) -> None:
    folder = export(tmp_path, make_plain_draft(**PLAIN), make_facts(tiny_target))
    with pytest.raises(CheckpointError, match=r"as an engine takes it, not a checkpoint\n.*train/checkpoints/final"):
        load_draft(folder, make_head())


def test_the_vocabulary_map_survives(saved: Path) -> None:
    ids = load_draft(saved, make_head()).draft_ids
    assert ids is not None
    assert ids.tolist() == DRAFT_IDS


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    sign(folder)
