"""One optimizer step: a batch's loss, its gradients, and what changes in the draft.

Nothing here waits for the device until figures are read, so that the host can be a step ahead of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from draftsmith import recipe
from draftsmith.draft.attention import Spans
from draftsmith.draft.fast_loss import counted_positions, fast_unrolled_loss, find_targets, head_of_draft_vocabulary
from draftsmith.draft.loss import StepResult, spans_of, teacher_of, total_loss, unrolled_loss
from draftsmith.draft.model import Draft
from draftsmith.errors import CheckFailed
from draftsmith.records import Batch
from draftsmith.target import TargetHead
from draftsmith.train.optim import clipped_step, make_optimizer


@dataclass(frozen=True)
class PreparedBatch:
    """A batch on its way to the device, and what the host knows of it."""

    batch: Batch  # on the device
    counted: torch.Tensor  # [K, S] bool on the host, of `counted_positions`
    spans: Spans
    arrived: torch.cuda.Event | None  # of the stream that copies


@dataclass(frozen=True)
class Launched:
    """An optimizer step that the device may still be working on."""

    numbers: torch.Tensor  # on the host once `finished`: loss, gradient norm, then four sums of each unroll step
    finished: torch.cuda.Event | None
    sample_ids: tuple[str, ...]

    def figures(self) -> dict[str, float]:
        """Wait for the step; its loss, gradient norm, accuracy and acceptance.

        Raises:
            CheckFailed: loss or gradient were not finite, so that the draft was left as it was; names the samples.
        """
        if self.finished is not None:
            self.finished.synchronize()
        loss, norm, *sums = self.numbers.tolist()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise CheckFailed(
                f"loss {loss} and gradient norm {norm}, on samples " + ", ".join(self.sample_ids),
                where="train",
                hint="look at these samples with `draftsmith prepare --show`; a lower learning rate may be needed",
            )
        steps = list(zip(sums[0::3], sums[1::3], sums[2::3], strict=True))
        return acceptance_figures(steps) | {"loss": loss, "gradient_norm": norm}


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
        # The fused attention of CUDA knows no wider type than bfloat16.
        self.fast = self.settings.kernels == "auto" and (self.bf16 or self.device.type == "cpu")
        self.draft_head = head_of_draft_vocabulary(self.head, self.draft)
        self.draft.embed_tokens.weight.data = self.head.embedding.data  # frozen in both: kept once
        self.copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Send a batch to the device, beside what it computes. May run in another thread than `step`."""
        counted = counted_positions(batch.loss_mask.cpu(), batch.document.cpu(), self.settings.unroll_steps)
        spans = spans_of(batch.document.cpu())
        dtype = torch.bfloat16 if self.bf16 else self.draft.fc.weight.dtype
        if self.copies is None:
            return PreparedBatch(batch.to(self.device, dtype), counted, spans, None)
        with torch.cuda.stream(self.copies):
            on_device = batch.pinned().to(self.device, dtype)
            return PreparedBatch(on_device, counted, spans, self.copies.record_event())

    def loss(self, prepared: PreparedBatch, *, exact: bool = True) -> tuple[torch.Tensor, list[StepResult]]:
        """Loss and acceptance of every unroll step on one batch.

        Without `exact`, and where nothing else needs the target's whole vocabulary, a slot counts as right if the
        draft agrees with the target on the draft's own vocabulary: a little more than serving accepts.
        """
        settings, batch = self.settings, prepared.batch
        if prepared.arrived is not None:
            computing = torch.cuda.current_stream()
            computing.wait_event(prepared.arrived)
            for tensor in batch.tensors():
                tensor.record_stream(computing)
        last = batch.last.to(self.head.lm_head.dtype)
        if not self.fast:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                teacher = teacher_of(self.draft, self.head, last)
                results = unrolled_loss(
                    self.draft, batch, teacher, settings.unroll_steps, settings.mask_out_of_vocab, settings.loss
                )
            return total_loss(results, [result.loss_count for result in results], settings.step_decay), results
        targets = find_targets(
            self.draft,
            self.head,
            last,
            prepared.counted,
            top1=exact or settings.mask_out_of_vocab,
            mass=settings.loss in ("lk", "lk_hybrid"),
            mask=settings.mask_out_of_vocab,
        )
        decay = settings.step_decay ** torch.arange(settings.unroll_steps, device=self.device)
        step_weights = decay / targets.counts.clamp_min(1)
        return fast_unrolled_loss(
            self.draft, self.draft_head, batch, last, prepared.spans, targets, step_weights, settings.loss
        )

    def step(self, prepared: PreparedBatch, rate: float, *, exact: bool = True) -> Launched:
        """Launch one optimizer step at learning rate `rate`.

        A batch without a slot that counts changes nothing, nor does one whose loss or gradient is not finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss, results = self.loss(prepared, exact=exact)
        loss.backward()
        trained = sum(torch.as_tensor(result.loss_count, device=loss.device) for result in results)
        norm = clipped_step(self.optimizer, self.settings.max_grad_norm, apply=loss.detach().isfinite() & (trained > 0))
        numbers = [loss, norm]
        for result in results:
            numbers += [torch.as_tensor(x) for x in (result.correct, result.accepted, result.counted)]
        return self._send(torch.stack([x.detach().to(loss.device, torch.float64) for x in numbers]), prepared)

    def _send(self, numbers: torch.Tensor, prepared: PreparedBatch) -> Launched:
        """Start copying the step's numbers to the host."""
        ids = prepared.batch.sample_ids
        if self.copies is None:
            return Launched(numbers, None, ids)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        return Launched(host, torch.cuda.current_stream().record_event(), ids)


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
