from __future__ import annotations

import pytest
import torch
from torch import nn

from draftsmith.recipe import Train
from draftsmith.train.optim import clipped_step, learning_rate, make_optimizer


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


@pytest.mark.parametrize(("size", "applied"), [(7.0, 0.5), (0.2, 0.2)])
def test_gradients_are_scaled_to_the_largest_norm_and_no_others(size, applied):
    settings = Train(max_grad_norm=0.5, betas=(0.9, 0.95))
    held = {"a": nn.Parameter(torch.randn(3, 4)), "b": nn.Parameter(torch.randn(5))}
    optimizer = make_optimizer(held, settings)
    gradient = torch.randn(17)
    gradient *= size / gradient.norm()
    held["a"].grad, held["b"].grad = gradient[:12].view(3, 4).clone(), gradient[12:].clone()
    clipped_step(optimizer, torch.tensor(size), settings.max_grad_norm, torch.tensor(True))
    taken = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in held.values()]) / 0.1
    torch.testing.assert_close(taken, gradient * applied / size)


def test_weights_of_one_dimension_do_not_decay():
    held = {"matrix": nn.Parameter(torch.ones(3, 4)), "norm": nn.Parameter(torch.ones(5))}
    optimizer = make_optimizer(held, Train(weight_decay=0.5, learning_rate=0.1))
    for weight in held.values():
        weight.grad = torch.zeros_like(weight)
    clipped_step(optimizer, torch.tensor(0.0), 0.5, torch.tensor(True))
    torch.testing.assert_close(held["matrix"].data, torch.full((3, 4), 0.95))
    assert torch.equal(held["norm"].data, torch.ones(5))
