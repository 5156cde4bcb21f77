"""Optimizer and learning rate. The rate is a function of the step, so that a resumed run cannot disagree."""

from __future__ import annotations

import math

import torch
from torch import nn

from draftsmith import recipe


def learning_rate(step: int, total_steps: int, settings: recipe.Train) -> float:
    """Rate of optimizer step `step`, from 0: linear warm-up to the peak, then a cosine down to its last share."""
    warmup_steps = math.ceil(settings.warmup_fraction * total_steps)
    if step < warmup_steps:
        return settings.learning_rate * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    least = settings.min_learning_rate_ratio
    return settings.learning_rate * (least + (1 - least) * cosine)


def make_optimizer(held: dict[str, nn.Parameter], settings: recipe.Train) -> torch.optim.AdamW:
    """AdamW over what this rank holds, in the order of the names; weights of one dimension do not decay."""
    parameters = list(held.values())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    on_gpu = parameters[0].is_cuda
    rate = torch.tensor(settings.learning_rate, device=parameters[0].device) if on_gpu else settings.learning_rate
    return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, fused=True, capturable=on_gpu)


def set_rate(optimizer: torch.optim.AdamW, rate: float) -> None:
    """Set the learning rate; on a GPU in the memory where a captured step reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clipped_step(
    optimizer: torch.optim.AdamW, norm: torch.Tensor, max_grad_norm: float, apply: torch.Tensor
) -> torch.Tensor:
    """Scale all gradients, whose norm together is `norm`, to one of at most `max_grad_norm`, and step. Returns `norm`.

    The step changes nothing where `apply` is false or the norm is not finite, which only the device needs to know:
    the fused optimizer takes the scale and the verdict as tensors (as `torch.amp.GradScaler` hands them to it).
    """
    optimizer.grad_scale = ((norm + 1e-6) / max_grad_norm).clamp_min(1).float()  # type: ignore[attr-defined]
    optimizer.found_inf = (~(apply & norm.isfinite())).float()  # type: ignore[attr-defined]
    optimizer.step()
    return norm
