from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.draft.files import load_draft, save_draft
from draftsmith.draft.model import Draft
from draftsmith.errors import RequestError
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import parse
from draftsmith.rundir import RunPaths, write_json
from draftsmith.target import load_head
from draftsmith.train import _first_draft
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
    return _first_draft(recipe, paths, facts, head, AUX_LAYER_IDS)


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


def test_an_earlier_draft_of_another_shape_or_vocabulary_is_refused(
    tmp_path: Path, tiny_target: Path, earlier: Path
) -> None:
    with pytest.raises(RequestError, match="another shape or vocabulary"):
        first_draft(tmp_path, tiny_target, initial=str(earlier), norm_output=False)
    head = load_head(read_facts(str(tiny_target)), torch.device("cpu"), torch.float32)
    other = load_draft(earlier, head)
    other.d2t[-1] += 1
    save_draft(earlier, other)
    with pytest.raises(RequestError, match="another shape or vocabulary"):
        first_draft(tmp_path, tiny_target, initial=str(earlier))
