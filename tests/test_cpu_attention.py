from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith import recipe as recipes
from draftsmith.cpu_attention import use_grouped_heads
from draftsmith.probe.facts import read_facts
from draftsmith.target import load_target

PADDED = torch.tensor([[0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])


@pytest.mark.parametrize("mask", [(PADDED > 0).long(), None])
def test_grouped_heads_change_no_bit_of_the_logits(tiny_target: Path, mask: torch.Tensor | None) -> None:
    facts = read_facts(str(tiny_target))
    model = load_target(facts, recipes.Target(model=str(tiny_target)), torch.device("cpu"), torch.float32)
    before = model(PADDED, attention_mask=mask).logits
    use_grouped_heads(model)
    assert model.config._attn_implementation == "sdpa_grouped"
    assert torch.equal(model(PADDED, attention_mask=mask).logits, before)


def test_a_model_that_does_not_use_sdpa_is_left_alone(tiny_target: Path) -> None:
    facts = read_facts(str(tiny_target))
    model = load_target(facts, recipes.Target(model=str(tiny_target)), torch.device("cpu"), torch.float32)
    model.set_attn_implementation("eager")
    use_grouped_heads(model)
    assert model.config._attn_implementation == "eager"
