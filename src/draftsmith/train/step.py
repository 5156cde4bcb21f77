"""One optimizer step: a batch's loss, its gradients, and what changes in the draft.

Nothing here waits for the device until figures are read, so that the host can be a step ahead of it. What the host
knows of a batch is worked out beforehand, by whoever reads it (`Learner.prepare`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from draftsmith import recipe
from draftsmith.draft.fast_attention import Documents
from draftsmith.draft.fast_loss import Slots, fast_unrolled_loss, find_targets
from draftsmith.draft.loss import StepResult, spans_of, teacher_of, total_loss, unrolled_loss
from draftsmith.draft.model import Draft
from draftsmith.errors import CheckFailed
from draftsmith.records import Batch
from draftsmith.target import TargetHead
from draftsmith.train.batches import padded
from draftsmith.train.graph import StepGraph
from draftsmith.train.optim import clipped_step, make_optimizer, set_rate

# Matrix work of a step below which a graph pays: launching a step's kernels takes the host some 30 ms.
GRAPH_FLOPS = 2e13
GRAPH_TOKENS_PER_BLOCK = 16  # a batch of shorter documents has no graph


@dataclass(frozen=True)
class PreparedBatch:
    """A batch on its way to the device, with what the fast path needs to know of it."""

    batch: Batch
    slots: Slots
    documents: Documents
    arrived: torch.cuda.Event | None  # of the stream that copies; None where nothing is copied
    graphed: bool  # of the one shape that graphs are captured for

    def tensors(self) -> tuple[torch.Tensor, ...]:
        slots = self.slots
        return *self.batch.tensors(), slots.counted, slots.positions, slots.others, self.documents.blocks


@dataclass(frozen=True)
class Launched:
    """An optimizer step that the device may still be working on."""

    numbers: torch.Tensor  # on the host once `finished`: loss, gradient norm, then three sums of each unroll step
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
        # The attention kernels of CUDA are for bfloat16: matrix units would round float32.
        self.fast = self.settings.kernels == "auto" and (self.bf16 or self.device.type == "cpu")
        self.draft.embed_tokens.weight.data = self.head.embedding.data  # frozen in both: kept once
        self.draft.inv_freq = self.draft.inv_freq.to(self.device)
        self.copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        weights = sum(p.numel() for p in self.draft.parameters() if p.requires_grad)
        flops = 6 * weights * self.settings.batch_tokens * self.settings.unroll_steps
        self.use_graphs = self.fast and self.copies is not None and flops < GRAPH_FLOPS
        self.graphs: dict[bool, StepGraph | None] = {}  # by `exact`; None once such a step ran without

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Send a batch to the device, beside what it computes. May run in another thread than `step`."""
        tokens = self.settings.batch_tokens
        graphed = self.use_graphs and len(batch.input_ids) <= tokens
        if graphed:
            batch = padded(batch, tokens)
        document = batch.document.cpu()
        documents = Documents.of(spans_of(document))
        slots = Slots.of(batch.loss_mask.cpu(), document, self.settings.unroll_steps)
        graphed = graphed and len(documents.blocks) <= tokens // GRAPH_TOKENS_PER_BLOCK
        if graphed:
            documents, slots = documents.of_one_shape(tokens // GRAPH_TOKENS_PER_BLOCK), slots.of_one_shape()
        dtype = torch.bfloat16 if self.bf16 else self.draft.fc.weight.dtype
        if self.copies is None:
            return PreparedBatch(batch.to(self.device, dtype), slots, documents, None, graphed)
        with torch.cuda.stream(self.copies):
            here = batch.moved(self._copy).to(self.device, dtype)
            slots, documents = slots.moved(self._copy), documents.moved(self._copy)
            return PreparedBatch(here, slots, documents, self.copies.record_event(), graphed)

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.is_cuda else x.pin_memory().to(self.device, non_blocking=True)

    def loss(self, prepared: PreparedBatch, *, exact: bool = True) -> tuple[torch.Tensor, list[StepResult]]:
        """Loss and acceptance of every unroll step on one batch.

        Without `exact`, and where nothing else needs the target's whole vocabulary, a slot counts as right if the
        draft agrees with the target on the draft's own vocabulary: a little more than serving accepts.
        """
        self._wait_for(prepared)
        settings, batch = self.settings, prepared.batch
        if not self.fast:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                teacher = teacher_of(self.draft, self.head, batch.last.to(self.head.lm_head.dtype))
                results = unrolled_loss(
                    self.draft, batch, teacher, settings.unroll_steps, settings.mask_out_of_vocab, settings.loss
                )
            return total_loss(results, [result.loss_count for result in results], settings.step_decay), results
        targets = find_targets(
            self.draft,
            self.head,
            batch.last,
            prepared.slots,
            top1=exact or settings.mask_out_of_vocab,
            mass=settings.loss in ("lk", "lk_hybrid"),
            mask=settings.mask_out_of_vocab,
        )
        decay = settings.step_decay ** torch.arange(settings.unroll_steps, device=self.device)
        step_weights = decay / targets.counts.clamp_min(1)
        return fast_unrolled_loss(
            self.draft, self.head, batch, prepared.documents, targets, step_weights, settings.loss
        )

    def step(self, prepared: PreparedBatch, rate: float, *, exact: bool = True) -> Launched:
        """Launch one optimizer step at learning rate `rate`.

        A batch without a slot that counts changes nothing, nor does one whose loss or gradient is not finite.
        """
        self._wait_for(prepared)
        set_rate(self.optimizer, rate)
        exact = exact or self.settings.mask_out_of_vocab
        if not prepared.graphed:
            numbers = self._learn(prepared, exact)
        elif exact not in self.graphs:
            self.graphs[exact] = None
            numbers = self._learn(prepared, exact)
        else:
            graph = self.graphs[exact] or StepGraph(prepared.tensors(), lambda: self._learn(prepared, exact))
            self.graphs[exact] = graph
            numbers = graph.replay(prepared.tensors())
        ids = prepared.batch.sample_ids
        if self.copies is None:
            return Launched(numbers, None, ids)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        return Launched(host, torch.cuda.current_stream().record_event(), ids)

    def _learn(self, prepared: PreparedBatch, exact: bool) -> torch.Tensor:
        """All that the device does of a step, and its numbers for `Launched`."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, results = self.loss(prepared, exact=exact)
        loss.backward()
        trained = sum(torch.as_tensor(result.loss_count, device=loss.device) for result in results)
        norm = clipped_step(self.optimizer, self.settings.max_grad_norm, apply=loss.detach().isfinite() & (trained > 0))
        numbers = [loss, norm]
        for result in results:
            numbers += [torch.as_tensor(x) for x in (result.correct, result.accepted, result.counted)]
        return torch.stack([x.detach().to(loss.device, torch.float64) for x in numbers])

    def _wait_for(self, prepared: PreparedBatch) -> None:
        """Let the device compute no sooner than the batch is there, and keep the batch until it has."""
        if prepared.arrived is None or torch.cuda.is_current_stream_capturing():
            return
        computing = torch.cuda.current_stream()
        computing.wait_event(prepared.arrived)
        for tensor in prepared.tensors():
            tensor.record_stream(computing)


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
