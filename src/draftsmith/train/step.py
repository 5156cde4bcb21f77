"""One optimizer step: a batch's loss, its gradients, and what changes in the draft."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from draftsmith import recipe
from draftsmith.draft.fast_loss import (
    counted_positions,
    fast_unrolled_loss,
    find_targets,
    head_of_draft_vocabulary,
)
from draftsmith.draft.loss import StepResult, spans_of, teacher_of, total_loss, unrolled_loss
from draftsmith.draft.model import Draft
from draftsmith.errors import CheckFailed
from draftsmith.records import Batch
from draftsmith.target import TargetHead
from draftsmith.train.optim import make_optimizer


@dataclass
class Learner:
    """A draft that learns from a target's head, by the fast kernels or by the plain computation that judges them."""

    draft: Draft
    head: TargetHead
    settings: recipe.Train
    device: torch.device

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.draft, self.settings)
        self.bf16 = self.settings.autocast == "bfloat16" or (
            self.settings.autocast == "auto" and self.device.type == "cuda"
        )
        self.fast = self.settings.kernels == "auto" and (self.bf16 or self.device.type == "cpu")
        self.draft_head = head_of_draft_vocabulary(self.head, self.draft)
        self.draft.embed_tokens.weight.data = self.head.embedding.data  # frozen in both: kept once

    def loss(self, batch: Batch, *, exact: bool = True) -> tuple[torch.Tensor, list[StepResult]]:
        """Loss and acceptance of every unroll step on one batch, which may still be on the host.

        Without `exact`, and where nothing else needs the target's whole vocabulary, a slot counts as right if the
        draft agrees with the target on the draft's own vocabulary: a little more than serving accepts.
        """
        dtype = torch.bfloat16 if self.bf16 else self.draft.fc.weight.dtype
        on_device = batch.to(self.device, dtype)
        last = on_device.last.to(self.head.lm_head.dtype)
        settings = self.settings
        if not self.fast:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                teacher = teacher_of(self.draft, self.head, last)
                results = unrolled_loss(
                    self.draft, on_device, teacher, settings.unroll_steps, settings.mask_out_of_vocab, settings.loss
                )
            return total_loss(results, [result.loss_count for result in results], settings.step_decay), results
        targets = find_targets(
            self.draft,
            self.head,
            last,
            counted_positions(batch.loss_mask.cpu(), batch.document.cpu(), settings.unroll_steps),
            top1=exact or settings.mask_out_of_vocab,
            mass=settings.loss in ("lk", "lk_hybrid"),
            mask=settings.mask_out_of_vocab,
        )
        decay = settings.step_decay ** torch.arange(settings.unroll_steps, device=self.device)
        step_weights = decay / targets.counts.clamp_min(1)
        spans = spans_of(batch.document.cpu())
        return fast_unrolled_loss(self.draft, self.draft_head, on_device, spans, targets, step_weights, settings.loss)

    def step(self, batch: Batch, rate: float, *, exact: bool = True) -> dict[str, float]:
        """One optimizer step at learning rate `rate`. A batch without a slot that counts changes nothing.

        Raises:
            CheckFailed: the loss or a gradient is not finite; names the samples.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss, results = self.loss(batch, exact=exact)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.settings.max_grad_norm)
        figures, trained = _to_host(loss, norm, results)  # the only wait for the device
        if not trained:
            return figures
        if not math.isfinite(figures["gradient_norm"]) or not math.isfinite(figures["loss"]):
            raise CheckFailed(
                f"loss {figures['loss']} and gradient norm {figures['gradient_norm']}, on samples "
                + ", ".join(batch.sample_ids),
                where="train",
                hint="look at these samples with `draftsmith prepare --show`; a lower learning rate may be needed",
            )
        self.optimizer.step()
        return figures


def _to_host(loss: torch.Tensor, norm: torch.Tensor, results: list[StepResult]) -> tuple[dict[str, float], bool]:
    """Figures of a step in one transfer, and whether any slot was trained on."""
    numbers = [loss, norm]
    for result in results:
        numbers += [torch.as_tensor(x) for x in (result.loss_count, result.correct, result.accepted, result.counted)]
    loss_value, norm_value, *counts = torch.stack([x.detach().to(loss.device, torch.float64) for x in numbers]).tolist()
    steps = list(zip(*[iter(counts)] * 4, strict=True))
    figures = acceptance_figures([step[1:] for step in steps]) | {"loss": loss_value, "gradient_norm": norm_value}
    return figures, any(step[0] for step in steps)


def acceptance_figures(steps: list[tuple[float, float, float]]) -> dict[str, float]:
    """Accuracy and joint acceptance of each step, and the acceptance length that they promise (1 + Σ of the joint).

    Args:
        steps: of each, slots that are right, slots where all before are right too, and slots that count.
    """
    figures, length = {}, 1.0
    for k, (correct, accepted, counted) in enumerate(steps):
        figures[f"accuracy_{k}"] = correct / max(1, counted)
        figures[f"accepted_{k}"] = accepted / max(1, counted)
        length += figures[f"accepted_{k}"]
    return figures | {"acceptance_length": length}
