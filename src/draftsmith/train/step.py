"""One optimizer step: a batch's loss, its gradients, and what changes in the draft.

    passes of this rank ── targets ── counts ─(sum over ranks)→ weight of each slot in the loss
                        └─ loss, backward ── gradients ─(sum over ranks)→ clip, AdamW

A batch may take several passes on several ranks: each slot has the weight that it would have if all were one flat
batch, so sums over passes and ranks are the loss and the gradient of that batch.

Nothing here waits for the device until figures are read, so that the host can be a step ahead of it. What the host
knows of a batch is worked out beforehand, by whoever reads it (`Learner.prepare`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from draftsmith import recipe
from draftsmith.draft.fast_attention import Documents
from draftsmith.draft.fast_loss import Slots, Targets, fast_unrolled_loss, find_targets
from draftsmith.draft.loss import StepResult, Teacher, spans_of, teacher_of, unrolled_loss
from draftsmith.draft.model import Draft
from draftsmith.errors import CheckFailed
from draftsmith.records import Batch
from draftsmith.target import TargetHead
from draftsmith.train.batches import pad_states, padded, with_noise
from draftsmith.train.graph import StepGraph
from draftsmith.train.optim import clipped_step, make_optimizer, set_rate
from draftsmith.train.ranks import Ranks
from draftsmith.train.weights import TrainedWeights

T = TypeVar("T")

# Matrix work of a step below which a graph pays: launching a step's kernels takes the host some 30 ms.
GRAPH_FLOPS = 2e13
GRAPH_TOKENS_PER_BLOCK = 16  # a batch of shorter documents has no graph


@dataclass(frozen=True)
class PreparedBatch:
    """A pass's batch on its way to the device, with what the fast path needs to know of it."""

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

    numbers: torch.Tensor  # on the host once `finished`: loss, gradient norm, ranks' broken losses, then sums by step
    finished: torch.cuda.Event | None
    sample_ids: tuple[tuple[str, ...], ...]  # by rank
    asked_all: bool  # the target's whole vocabulary

    def figures(self) -> dict[str, float]:
        """Wait for the step; its loss, gradient norm, accuracy and acceptance, and the slots of its first unroll step.

        Raises:
            CheckFailed: loss or gradient were not finite, so that the draft was left as it was; names the samples.
        """
        if self.finished is not None:
            self.finished.synchronize()
        loss, norm, *rest = self.numbers.tolist()
        broken, sums = rest[: len(self.sample_ids)], rest[len(self.sample_ids) :]
        if not math.isfinite(loss) or not math.isfinite(norm):
            suspects = [ids for ids, is_broken in zip(self.sample_ids, broken, strict=True) if is_broken]
            names = [id for ids in suspects or self.sample_ids for id in ids]
            raise CheckFailed(
                f"loss {loss} and gradient norm {norm}, on samples " + ", ".join(names),
                where="train",
                hint="look at these samples with `draftsmith prepare --show`; a lower learning rate may be needed",
            )
        steps = list(zip(sums[0::3], sums[1::3], sums[2::3], strict=True))
        return acceptance_figures(steps) | {"loss": loss, "gradient_norm": norm, "slots": steps[0][2]}


@dataclass
class Learner:
    """A draft that learns from a target's head, by the fast kernels or by the plain computation that judges them.

    Attributes:
        weights: what is trained, as this rank holds it.
        averages: the moving average of each, by name; empty without `train.ema_decay`.
    """

    draft: Draft
    head: TargetHead
    settings: recipe.Train
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    pass_tokens: int | None = None  # most tokens of a pass; those of a batch if None
    averages: dict[str, torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.draft.embed_tokens.weight.data = self.head.embedding.data  # frozen in both: kept once
        self.draft.inv_freq = self.draft.inv_freq.to(self.device)
        self.weights = TrainedWeights(self.draft, self.ranks, shard=self.settings.shard)
        self.optimizer = make_optimizer(self.weights.held, self.settings)
        if self.settings.ema_decay is not None:
            self.averages = {name: held.detach().clone() for name, held in self.weights.held.items()}
        self.bf16 = in_bfloat16(self.settings, self.device)
        self.dtype = torch.bfloat16 if self.bf16 else self.draft.fc.weight.dtype
        self.fast = self.settings.kernels == "auto" and not lacks_kernels(self.settings, self.device)
        self.copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.graph_tokens = self.pass_tokens or self.settings.batch_tokens
        weights = sum(p.numel() for p in self.draft.parameters() if p.requires_grad)
        flops = 6 * weights * self.graph_tokens * self.settings.unroll_steps
        self.use_graphs = self.fast and self.copies is not None and self.weights.mesh is None and flops < GRAPH_FLOPS
        self.graphs: dict[bool, StepGraph | None] = {}  # by `exact`; None once such a step ran without

    def prepare(self, batch: Batch, noise_seed: str | None = None) -> PreparedBatch:
        """Send a pass's batch to the device, beside what it computes. May run in another thread than `step`.

        With a `noise_seed`, its auxiliary states get the noise of `train.feature_noise`.
        """
        tokens = self.graph_tokens
        graphed = self.use_graphs and len(batch.input_ids) <= tokens
        if graphed:
            batch = padded(batch, tokens)
        document = batch.document.cpu()
        documents = Documents.of(spans_of(document))
        slots = Slots.of(batch.loss_mask.cpu(), document, self.settings.unroll_steps)
        graphed = graphed and len(documents.blocks) <= tokens // GRAPH_TOKENS_PER_BLOCK
        if graphed:
            documents, slots = documents.of_one_shape(tokens // GRAPH_TOKENS_PER_BLOCK), slots.of_one_shape()
        if self.copies is None:
            here = self._noised(pad_states(batch.to(self.device, self.dtype)), documents, noise_seed)
            return PreparedBatch(here, slots, documents, None, graphed)
        with torch.cuda.stream(self.copies):
            here = pad_states(batch.moved(self._copy).to(self.device, self.dtype))
            here = self._noised(here, documents, noise_seed)
            slots, documents = slots.moved(self._copy), documents.moved(self._copy)
            return PreparedBatch(here, slots, documents, self.copies.record_event(), graphed)

    def _noised(self, batch: Batch, documents: Documents, seed: str | None) -> Batch:
        if seed is None or not self.settings.feature_noise:
            return batch
        return with_noise(batch, documents.spans, self.settings.feature_noise, seed)

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.is_cuda else x.pin_memory().to(self.device, non_blocking=True)

    def loss(self, prepared: PreparedBatch, *, exact: bool = True) -> tuple[torch.Tensor, list[StepResult]]:
        """Loss and acceptance of every unroll step on one batch by itself.

        Without `exact`, and where nothing else needs the target's whole vocabulary, a slot counts as right if the
        draft agrees with the target on the draft's own vocabulary: a little more than serving accepts.
        """
        self._wait_for(prepared)
        target, counts = self._ask_target(prepared, exact)
        return self._loss(prepared, target, self._step_weights(counts))

    def asks_all(self, exact: bool) -> bool:
        """Whether the target is asked about more than the draft's vocabulary. Args: exact: see `loss`."""
        needed = exact or self.settings.mask_out_of_vocab or self.settings.loss in ("lk", "lk_hybrid")
        return needed and self.draft.draft_ids is not None

    def _ask_target(self, prepared: PreparedBatch, exact: bool) -> tuple[Targets | Teacher, torch.Tensor]:
        """What the target says of a pass, and how many slots each unroll step trains on: [K] int64."""
        settings, last = self.settings, prepared.batch.last
        if self.fast:
            targets = find_targets(
                self.draft,
                self.head,
                last,
                prepared.slots,
                top1=self.asks_all(exact),
                mass=settings.loss in ("lk", "lk_hybrid"),
                mask=settings.mask_out_of_vocab,
            )
            return targets, targets.counts
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            teacher = teacher_of(self.draft, self.head, last.to(self.head.lm_head.dtype))
        counted = prepared.slots.counted
        return teacher, (counted & teacher.top1_in_vocab if settings.mask_out_of_vocab else counted).sum(1)

    def _step_weights(self, counts: torch.Tensor) -> torch.Tensor:
        """Weight of a slot of each step in the loss: [K], decay^k over the slots of that step."""
        return self.settings.step_decay ** torch.arange(len(counts), device=counts.device) / counts.clamp_min(1)

    def _loss(
        self, prepared: PreparedBatch, target: Targets | Teacher, step_weights: torch.Tensor
    ) -> tuple[torch.Tensor, list[StepResult]]:
        settings, batch = self.settings, prepared.batch

        def compute() -> tuple[torch.Tensor, list[StepResult]]:
            if isinstance(target, Targets):
                return fast_unrolled_loss(
                    self.draft, self.head, batch, prepared.documents, target, step_weights, settings.loss
                )
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                results = unrolled_loss(
                    self.draft, batch, target, settings.unroll_steps, settings.mask_out_of_vocab, settings.loss
                )
            sums = torch.stack([result.loss_sum for result in results])
            return (sums * step_weights).sum(), results

        return self.weights.compute(compute)

    def step(
        self,
        passes: Sequence[PreparedBatch],
        rate: float,
        *,
        exact: bool = True,
        sample_ids: tuple[tuple[str, ...], ...] | None = None,
    ) -> Launched:
        """Launch one optimizer step at learning rate `rate`.

        A batch without a slot that counts changes nothing, nor does one whose loss or gradient is not finite.

        Args:
            passes: of this rank; each rank has as many.
            exact: see `loss`.
            sample_ids: those of the whole batch by rank, for errors; not needed where this rank has all of them.
        """
        for prepared in passes:
            self._wait_for(prepared)
        set_rate(self.optimizer, rate)
        exact = self.asks_all(exact)
        if self.ranks.count == 1 and len(passes) == 1:  # all of it in one graph
            numbers = self._graphed(passes[0], exact, lambda: self._learn(passes, exact), passes[0].tensors())
        else:
            numbers = self._learn(passes, exact)
        ids = sample_ids or (tuple(id for prepared in passes for id in prepared.batch.sample_ids),)
        if self.copies is None:
            return Launched(numbers, None, ids, exact)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        return Launched(host, torch.cuda.current_stream().record_event(), ids, exact)

    def average(self, done_steps: int) -> None:
        """Move the averages towards the weights that step number `done_steps` left, faster while they are few."""
        decay = self.settings.ema_decay
        if decay is not None:
            share = 1 - min(decay, (1 + done_steps) / (10 + done_steps))
            held = [weight.detach() for weight in self.weights.held.values()]
            torch._foreach_lerp_(list(self.averages.values()), held, share)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block, the draft has its averaged weights, if there are such."""
        self._swap_averages()
        try:
            yield
        finally:
            self._swap_averages()

    @torch.no_grad()
    def _swap_averages(self) -> None:
        for name, average in self.averages.items():
            held = self.weights.held[name]
            kept = held.clone()
            held.copy_(average)
            average.copy_(kept)

    def _learn(self, passes: Sequence[PreparedBatch], exact: bool) -> torch.Tensor:
        """All that the device does of a step, and its numbers for `Launched`."""
        self.weights.drop_gradients()
        targets, counts = zip(*(self._ask_target(prepared, exact) for prepared in passes), strict=True)
        total = self.ranks.sum(torch.stack(counts).sum(0))
        step_weights = self._step_weights(total)
        if self.ranks.count > 1 and len(passes) == 1 and isinstance(targets[0], Targets):
            numbers = self._backward_in_graph(passes[0], targets[0], step_weights, exact)
        else:
            numbers = torch.stack(
                [self._backward(p, t, step_weights) for p, t in zip(passes, targets, strict=True)]
            ).sum(0)
        broken = torch.zeros(self.ranks.count, dtype=numbers.dtype, device=numbers.device)
        broken[self.ranks.rank] = ~numbers[0].isfinite()
        numbers = self.ranks.sum(torch.cat([broken, numbers]))
        loss, sums = numbers[len(broken)], numbers[len(broken) + 1 :]
        self.weights.sum_gradients()
        apply = loss.isfinite() & (total > 0).any()
        norm = clipped_step(self.optimizer, self.weights.gradient_norm(), self.settings.max_grad_norm, apply)
        return torch.cat([torch.stack([loss, norm.to(loss)]), numbers[: len(broken)], sums])

    def _backward(self, prepared: PreparedBatch, target: Targets | Teacher, step_weights: torch.Tensor) -> torch.Tensor:
        """Leave a pass's gradients; returns its share of the loss, then three sums of each unroll step."""
        loss, results = self._loss(prepared, target, step_weights)
        loss.backward()
        numbers = [loss]
        for result in results:
            numbers += [torch.as_tensor(x) for x in (result.correct, result.accepted, result.counted)]
        return torch.stack([x.detach().to(loss.device, torch.float64) for x in numbers])

    def _backward_in_graph(
        self, prepared: PreparedBatch, targets: Targets, step_weights: torch.Tensor, exact: bool
    ) -> torch.Tensor:
        """`_backward`, with what other ranks must be heard of before and after it outside the graph."""

        def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
            return self._backward(prepared, targets, step_weights), self.weights.gradients()

        asked = [x for x in (targets.trained, targets.sayable, targets.mass, step_weights) if x is not None]
        numbers, gradients = self._graphed(prepared, exact, run, (*prepared.tensors(), *asked))
        self.weights.put_gradients(gradients)
        return numbers

    def _graphed(
        self, prepared: PreparedBatch, exact: bool, run: Callable[[], T], inputs: tuple[torch.Tensor, ...]
    ) -> T:
        """Do `run`, the second time as a graph and then ever again with the inputs of that time overwritten."""
        if not prepared.graphed:
            return run()
        if exact not in self.graphs:
            self.graphs[exact] = None
            return run()
        graph = self.graphs[exact] or StepGraph(inputs, run)
        self.graphs[exact] = graph
        return graph.replay(inputs)

    def _wait_for(self, prepared: PreparedBatch) -> None:
        """Let the device compute no sooner than the batch is there, and keep the batch until it has."""
        if prepared.arrived is None or torch.cuda.is_current_stream_capturing():
            return
        computing = torch.cuda.current_stream()
        computing.wait_event(prepared.arrived)
        for tensor in prepared.tensors():
            tensor.record_stream(computing)


def in_bfloat16(settings: recipe.Train, device: torch.device) -> bool:
    return settings.autocast == "bfloat16" or (settings.autocast == "auto" and device.type == "cuda")


def lacks_kernels(settings: recipe.Train, device: torch.device) -> bool:
    """The attention kernels of CUDA are for bfloat16: matrix units would round float32."""
    return device.type != "cpu" and not in_bfloat16(settings, device)


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
