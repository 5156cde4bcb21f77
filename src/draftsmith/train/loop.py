"""EAGLE-3 with training-time test: read a batch, ask the teacher, unroll the draft, step.

Everything that a step depends on (its samples, its learning rate) follows from its number, so a run that was killed
goes on to the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith import recipe
from draftsmith.draft.loss import StepResult, total_loss
from draftsmith.draft.model import Draft
from draftsmith.errors import DataError
from draftsmith.progress import progress
from draftsmith.signals import check_stop, stop_requested
from draftsmith.store.shards import Store
from draftsmith.target import TargetHead
from draftsmith.train.batches import plan_epoch, read_batches
from draftsmith.train.checkpoint import checkpoints_in, load_checkpoint, save_checkpoint
from draftsmith.train.metrics import MetricsLog
from draftsmith.train.optim import learning_rate
from draftsmith.train.step import Launched, Learner, PreparedBatch, acceptance_figures


@dataclass
class Trainer:
    """What training works on. `train_indexes` and `validation_indexes` point into the store."""

    settings: recipe.Train
    seed: int
    draft: Draft
    head: TargetHead
    store: Store
    train_indexes: list[int]
    validation_indexes: list[int]
    folder: Path  # of the stage
    device: torch.device

    def __post_init__(self) -> None:
        self.learner = Learner(self.draft, self.head, self.settings, self.device)
        self.optimizer = self.learner.optimizer
        self.lengths = [self.store.lengths[index] for index in self.train_indexes]
        if not self.train_indexes:
            raise DataError("no sample to train on", where="train", hint="lower prepare.validation_fraction")

    @property
    def total_steps(self) -> int:
        if self.settings.max_steps is not None:
            return self.settings.max_steps
        first = len(self._plan(0))  # later epochs shuffle into a batch more or less
        return max(1, math.ceil(first * self.settings.epochs))

    def train(self) -> dict[str, Any]:
        """Train to the end, from the newest checkpoint if there is one. Returns the last validation's figures."""
        checkpoints = self.folder / "checkpoints"
        done = checkpoints_in(checkpoints)
        first = load_checkpoint(done[-1], self.draft, self.head, self.optimizer) if done else 0
        log = MetricsLog(self.folder, first, tensorboard=self.settings.tensorboard)
        saved = first
        with log, progress("train", self.total_steps, "steps", done=first) as bar:
            before: Launched | None = None  # its figures are read while the device works on the next step
            for step, batch in zip(range(first, self.total_steps), self._batches(first), strict=False):
                launched = self.train_step(batch, step)
                bar.advance(1, _note(before.figures()) if before else "")
                before, done_steps = launched, step + 1
                if self._is_logged(done_steps):
                    more = {"learning_rate": self._rate(step), "tokens": len(batch.batch.input_ids)}
                    log.add("train", done_steps, launched.figures() | more | {"steps_per_second": bar.rate})
                if done_steps % self.settings.checkpoint_every_steps == 0 or stop_requested():
                    launched.figures()  # raises rather than save what a broken step left
                    self._save(checkpoints, done_steps)
                    saved = done_steps
                    check_stop("train")
                if done_steps % self.settings.validate_every_steps == 0 and done_steps < self.total_steps:
                    log.add("validation", done_steps, self.validate())
            if saved < self.total_steps:
                self._save(checkpoints, self.total_steps)
            figures = self.validate()
            log.add("validation", self.total_steps, figures)
        return figures

    def train_step(self, batch: PreparedBatch, step: int) -> Launched:
        """Optimizer step number `step`, from 0; see `Learner.step`."""
        return self.learner.step(batch, self._rate(step), exact=self._is_logged(step + 1))

    def _rate(self, step: int) -> float:
        return learning_rate(step, self.total_steps, self.settings)

    def validate(self) -> dict[str, float]:
        """Loss and acceptance on the held-out samples, as they are known to training: teacher-forced."""
        if not self.validation_indexes:
            return {}
        sums: list[list[StepResult]] = []
        lengths = [self.store.lengths[index] for index in self.validation_indexes]
        plan = plan_epoch(lengths, self.settings.batch_tokens, self.seed, 0)
        self.draft.eval()
        with torch.no_grad():
            indexes = [[self.validation_indexes[i] for i in rows] for rows in plan]
            for batch in read_batches(self.store, indexes, self.learner.prepare):
                sums.append(self.learner.loss(batch)[1])
        self.draft.train()
        results = [_add(step) for step in zip(*sums, strict=True)]
        loss = total_loss(results, [result.loss_count for result in results], self.settings.step_decay)
        shares = [(float(step.correct), float(step.accepted), float(step.counted)) for step in results]
        return acceptance_figures(shares) | {"loss": loss.item()}

    def _is_logged(self, done_steps: int) -> bool:
        return done_steps % self.settings.log_every_steps == 0 or done_steps == self.total_steps

    def _plan(self, epoch: int) -> list[list[int]]:
        plan = plan_epoch(self.lengths, self.settings.batch_tokens, self.seed, epoch)
        return [[self.train_indexes[i] for i in rows] for rows in plan]

    def _batches(self, first: int) -> Iterator[PreparedBatch]:
        """Batches from step `first` on, epoch after epoch."""
        skipped = 0
        for epoch in itertools.count():
            plan = self._plan(epoch)
            if skipped + len(plan) > first:
                yield from read_batches(self.store, plan[max(0, first - skipped) :], self.learner.prepare)
            skipped += len(plan)

    def _save(self, folder: Path, step: int) -> None:
        save_checkpoint(folder, step, self.draft, self.optimizer, self.settings.keep_checkpoints)


def _note(figures: dict[str, float]) -> str:
    return f"loss {figures['loss']:.3f}  expected acceptance {figures['acceptance_length']:.2f}"


def _add(steps: tuple[StepResult, ...]) -> StepResult:
    """The same unroll step of several batches together."""
    return StepResult(
        loss_sum=torch.stack([step.loss_sum for step in steps]).sum(),
        loss_count=sum(step.loss_count for step in steps),
        correct=torch.stack([step.correct for step in steps]).sum(),
        accepted=torch.stack([step.accepted for step in steps]).sum(),
        counted=sum(step.counted for step in steps),
    )
