from __future__ import annotations

import torch

from draftsmith.evaluate.lossless import deviations


def test_the_likeliest_tokens_deviate_nowhere() -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    assert deviations(logits, logits.argmax(-1).tolist()) == []


def test_another_token_is_found_with_its_gap() -> None:
    logits = torch.tensor([[0.0, 1.0], [3.0, 1.5]])
    (found,) = deviations(logits, [1, 1])
    assert (found.index, found.token, found.likeliest, found.gap, found.tie) == (1, 1, 0, 1.5, False)


def test_a_gap_within_rounding_is_a_tie_in_the_dtype_of_the_logits() -> None:
    logits = torch.tensor([[30.0, 30.25]])
    assert not deviations(logits, [0])[0].tie
    assert deviations(logits.bfloat16(), [0])[0].tie
    assert deviations(torch.tensor([[30.0, 30.00001]]), [0])[0].tie


def test_equal_logits_are_no_deviation() -> None:
    assert deviations(torch.tensor([[2.0, 2.0]]), [1]) == []
