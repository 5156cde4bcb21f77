from __future__ import annotations

import pytest

from draftsmith.recipe import Train
from draftsmith.train.optim import learning_rate


@pytest.mark.parametrize("total", [1, 2, 10, 333])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 1.0])
def test_the_rate_rises_to_the_peak_never_above_it_and_ends_at_its_last_share(total, warmup):
    settings = Train(learning_rate=2e-4, warmup_fraction=warmup, min_learning_rate_ratio=0.1)
    rates = [learning_rate(step, total, settings) for step in range(total)]
    peak = rates.index(max(rates))
    assert max(rates) == pytest.approx(2e-4)
    assert all(rate > 0 for rate in rates)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if warmup < 1 and total > 2:
        assert rates[-1] == pytest.approx(2e-5)
