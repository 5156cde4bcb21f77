"""EAGLE-3 with training-time test: read a batch, ask the teacher, unroll the draft, step.

Everything that a step depends on (its samples, its learning rate) follows from its number, so a run that was killed
goes on to the same bits, and on another number of ranks with the same batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import NoReturn

import torch

from draftsmith import recipe
from draftsmith.draft.loss import StepResult, total_loss
from draftsmith.draft.model import Draft
from draftsmith.errors import DataError, DraftsmithError
from draftsmith.progress import progress
from draftsmith.records import Batch
from draftsmith.signals import interrupted, stop_requested
from draftsmith.store.shards import Store
from draftsmith.target import TargetHead
from draftsmith.train.batches import (
    BatchMemory,
    fetched_ahead,
    plan_epoch,
    read_ahead,
    read_batch,
    share_out,
    silent_batch,
)
from draftsmith.train.checkpoint import CheckpointWriter, checkpoints_in, load_checkpoint
from draftsmith.train.metrics import MetricsLog
from draftsmith.train.optim import learning_rate
from draftsmith.train.ranks import FAILED, GO, STOP, Ranks
from draftsmith.train.speed import Speed, matrix_flops, peak_of
from draftsmith.train.step import Launched, Learner, PreparedBatch, acceptance_figures

FETCH_STEPS = 4  # so far ahead, samples are brought in from the disk
Shares = list[list[list[int]]]  # samples of the store by rank and pass: one optimizer step


@dataclass(frozen=True)
class Work:
    """An optimizer step's batch, of which `passes` are this rank's."""

    passes: list[PreparedBatch]
    sample_ids: tuple[tuple[str, ...], ...]  # of the whole batch, by rank
    lengths: list[int]  # tokens of its samples

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass
class Unread:
    """A step that was launched; its figures have perhaps not been read."""

    launched: Launched
    work: Work
    was_read: bool = False


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
    ranks: Ranks = field(default_factory=Ranks.joined)
    name: str = "train"  # of the run, for trackers
    record: Callable[..., None] = lambda event, **details: None  # puts an event on record

    def __post_init__(self) -> None:
        if not self.train_indexes:
            raise DataError("no sample to train on", where="train", hint="lower prepare.validation_fraction")
        if not any(_teaches(self.store[index].loss_mask) for index in self.train_indexes):  # mostly the first does
            raise DataError(
                f"none of {len(self.train_indexes)} samples has two tokens in a row that the target wrote",
                where="train",
                hint="look at the loss masks with `draftsmith prepare --show`",
            )
        # The order in which they were captured differs from run to run.
        self.train_indexes.sort(key=self.store.sample_ids.__getitem__)
        self.validation_indexes.sort(key=self.store.sample_ids.__getitem__)
        self.lengths = [self.store.lengths[index] for index in self.train_indexes]
        self.shards = [self.store.shards[index] for index in self.train_indexes]
        pass_tokens = None
        if self.ranks.count > 1:
            longest = max(tokens for batch in self._loads() for passes in batch for tokens in passes)
            pass_tokens = min(self.settings.batch_tokens, longest)
        self.learner = Learner(self.draft, self.head, self.settings, self.device, self.ranks, pass_tokens)
        self.speed = Speed(peak_of(self.device), self.ranks.count)

    @cached_property
    def total_steps(self) -> int:
        if self.settings.max_steps is not None:
            return self.settings.max_steps
        first = len(self._batches(0))  # later epochs shuffle into a batch more or less
        return max(1, math.ceil(first * self.settings.epochs))

    def train(self) -> dict[str, float]:
        """Train to the end, from the newest checkpoint if there is one. Returns the last validation's figures.

        Raises:
            CheckFailed: a loss or gradient was not finite; names the samples. All ranks stop.
            Interrupted: a rank was asked to stop. All have stopped after the same step, whose checkpoint is on disk.
            RankFailed: another rank could not go on.
        """
        settings, first_rank = self.settings, self.ranks.is_first
        checkpoints = self.folder / "checkpoints"
        done = self.ranks.heard_from_first(checkpoints_in(checkpoints))
        with self.ranks.all_or_none():
            first = saved = load_checkpoint(done[-1], self.learner, self.head) if done else 0
        log = MetricsLog(
            self.folder, first, settings.trackers, name=self.name, settings=settings.identity(), writes=first_rank
        )
        saver = CheckpointWriter(checkpoints, settings.keep_checkpoints, writes=first_rank)
        with log, saver, progress("train", self.total_steps, "steps", done=first) as bar:
            if self._is_validated(first):
                log.add("validation", first, self.validate())
            before, shown, work = None, dict[str, float | None](), self._work(first)
            self.speed.take()  # nothing so far was training
            bar.restart()
            for step in range(first, self.total_steps):
                batch = self._next(work, saver)
                if batch is None:
                    self._stop(saver, before, step, saved)
                after = Unread(self.train_step(batch, step), batch)
                if before is not None:  # read while the device works on the next step
                    shown |= self._read(before)
                before, done_steps = after, step + 1
                bar.advance(1, _note(shown))
                if self._is_logged(done_steps):
                    shown |= self._read(before) | self._speed() | {"learning_rate": self._rate(step)}
                    log.add("train", done_steps, shown | {"tokens": batch.tokens, "steps_per_second": bar.rate})
                if self._is_saved(done_steps):
                    shown |= self._read(before)  # raises rather than save what a broken step left
                    with self.speed.paused(), bar.paused():
                        saver.save(done_steps, self.learner)
                    saved = done_steps
                    self.record("checkpoint", step=done_steps, **shown)
                if self._is_validated(done_steps):
                    self._read(before)
                    with self.speed.paused(), bar.paused():
                        saver.wait()  # what ends the process in here loses no step that was saved
                        log.add("validation", done_steps, self.validate())
            if saved < self.total_steps:
                saver.save(self.total_steps, self.learner)
            saver.wait()
            figures = self.validate()
            log.add("validation", self.total_steps, figures)
        return figures

    def train_step(self, work: Work, step: int) -> Launched:
        """Optimizer step number `step`, from 0; see `Learner.step`."""
        exact = self._is_logged(step + 1) or self._is_saved(step + 1)  # its figures go on record
        launched = self.learner.step(work.passes, self._rate(step), exact=exact, sample_ids=work.sample_ids)
        self.learner.average(step + 1)
        return launched

    def _rate(self, step: int) -> float:
        return learning_rate(step, self.total_steps, self.settings)

    def _next(self, work: Iterator[Work], saver: CheckpointWriter) -> Work | None:
        """The next step's work, once all ranks have theirs; None if one of them was asked to stop."""
        try:
            saver.check()
            with self.speed.waiting():
                batch = next(work)
        except DraftsmithError:
            self.ranks.agree(FAILED + self.ranks.rank)
            raise
        return None if self.ranks.agree(STOP if stop_requested() else GO) == STOP else batch

    def _stop(self, saver: CheckpointWriter, last: Unread | None, done_steps: int, saved: int) -> NoReturn:
        """Leave together, with everything on disk: who left early would have torchrun end the others."""
        if saved < done_steps:
            if last is not None:
                self._read(last)
            saver.save(done_steps, self.learner)
        saver.wait()
        self.ranks.wait_for_all()
        when = f"after step {done_steps} of {self.total_steps}, whose checkpoint is on disk"
        raise interrupted("train", when if done_steps else "before the first step")

    def _read(self, step: Unread) -> dict[str, float | None]:
        """Wait for a step; its figures, which count towards the speed once."""
        figures = step.launched.figures()
        if not step.was_read:
            step.was_read = True
            squares = sum(length**2 for length in step.work.lengths)
            steps, tokens = self.settings.unroll_steps, step.work.tokens
            flops = matrix_flops(self.draft.config, steps, tokens, squares, figures["slots"], step.launched.asked_all)
            self.speed.add(tokens, flops)
        return {**figures}

    def _speed(self) -> dict[str, float | None]:
        """Figures since the last logged step: this rank's, and of the waiting the longest of all ranks."""
        figures = self.speed.take()
        return figures | {"data_wait_share": self.ranks.largest(figures["data_wait_share"] or 0.0)}

    def validate(self) -> dict[str, float]:
        """Loss and acceptance on the held-out samples, as they are known to training: teacher-forced.

        Of the averaged weights, where there are such: they are what training leaves.
        """
        if not self.validation_indexes:
            return {}
        lengths = [self.store.lengths[index] for index in self.validation_indexes]
        plan = plan_epoch(lengths, self.settings.batch_tokens, self.seed, 0)
        batches = [self._shares([self.validation_indexes[i] for i in rows]) for rows in plan]
        totals = torch.zeros(self.settings.unroll_steps, 5, dtype=torch.float64, device=self.device)
        self.draft.eval()
        with torch.no_grad(), self.learner.averaged():
            for work in self._read_ahead((None, shares) for shares in batches):
                for prepared in work.passes:
                    totals += _sums(self.learner.loss(prepared)[1]).to(totals)
            self.learner.weights.release()
        self.draft.train()
        results = [StepResult(*step) for step in self.ranks.sum(totals)]
        loss = total_loss(results, [result.loss_count for result in results], self.settings.step_decay)
        shares = [(float(step.correct), float(step.accepted), float(step.counted)) for step in results]
        return acceptance_figures(shares) | {"loss": loss.item()}

    def _is_logged(self, done_steps: int) -> bool:
        return done_steps % self.settings.log_every_steps == 0 or done_steps == self.total_steps

    def _is_saved(self, done_steps: int) -> bool:
        return done_steps % self.settings.checkpoint_every_steps == 0

    def _is_validated(self, done_steps: int) -> bool:
        """Whether there is a validation in the middle of training."""
        return done_steps % self.settings.validate_every_steps == 0 and 0 < done_steps < self.total_steps

    def _batches(self, epoch: int) -> list[list[int]]:
        """Samples of the store by optimizer step; they do not depend on how many ranks there are."""
        plan = plan_epoch(self.lengths, self.settings.batch_tokens, self.seed, epoch, self.shards)
        return [[self.train_indexes[i] for i in rows] for rows in plan]

    def _shares(self, batch: list[int]) -> Shares:
        return share_out(batch, self.store.lengths, self.ranks.count, self.settings.micro_batch_tokens)

    def _loads(self) -> list[list[list[int]]]:
        """Tokens of the first epoch's batches, by rank and pass."""
        lengths, shares = self.store.lengths, map(self._shares, self._batches(0))
        return [[[sum(lengths[i] for i in rows) for rows in passes] for passes in batch] for batch in shares]

    def balance(self) -> float:
        """Share of the ranks' time in which they have work, if the one with the most tokens of a batch always does."""
        if self.ranks.count == 1:
            return 1.0
        loads = [[sum(passes) for passes in batch] for batch in self._loads()]
        return sum(map(sum, loads)) / sum(max(of_ranks) * len(of_ranks) for of_ranks in loads)

    def _work(self, first: int) -> Iterator[Work]:
        """What to do from step `first` on, epoch after epoch."""
        batches = itertools.chain.from_iterable(map(self._batches, itertools.count()))
        steps = itertools.islice(enumerate(batches), first, self.total_steps)
        return self._read_ahead((step, self._shares(batch)) for step, batch in steps)

    def _read_ahead(self, steps: Iterable[tuple[int | None, Shares]]) -> Iterator[Work]:
        """Of each step in order, this rank's share, on the device."""
        memories = itertools.cycle([BatchMemory(self.learner.copies is not None) for _ in range(2)])
        coming = fetched_ahead(steps, self._fetch, FETCH_STEPS)
        return read_ahead(
            partial(self._prepare, shares, step, memory)
            for (step, shares), memory in zip(coming, memories, strict=False)
        )

    def _fetch(self, coming: tuple[int | None, Shares]) -> None:
        self.store.prefetch(index for rows in coming[1][self.ranks.rank] for index in rows)

    def _prepare(self, shares: Shares, step: int | None, memory: BatchMemory) -> Work:
        """Read this rank's share and send it to the device. Only what belongs to a `step` gets noise."""
        store = self.store
        noise_seed = None if step is None else f"{self.seed} {step}"
        mine = enumerate(shares[self.ranks.rank])
        passes = [self.learner.prepare(self._flat(rows, memory, number), noise_seed) for number, rows in mine]
        ids = tuple(tuple(store.sample_ids[i] for rows in passes for i in rows) for passes in shares)
        return Work(passes, ids, [store.lengths[i] for passes in shares for rows in passes for i in rows])

    def _flat(self, rows: list[int], memory: BatchMemory, number: int) -> Batch:
        manifest = self.store.manifest
        if not rows:
            return silent_batch(len(manifest.aux_layer_ids), manifest.hidden_size)
        dtype = self.store.dtype if memory.pinned else self.learner.dtype
        return read_batch(self.store, rows, memory, dtype, f"of pass {number}")


def _teaches(loss_mask: torch.Tensor) -> bool:
    """Whether any slot counts at the first unroll step (`draft/unroll.py`)."""
    return bool((loss_mask[1:-1] & loss_mask[2:]).any())


def _note(figures: dict[str, float | None]) -> str:
    """What a progress bar says beside the steps."""
    texts = {
        "loss": "loss {:.3f}",
        "acceptance_length": "expected acceptance {:.2f}",
        "gradient_norm": "gradient {:.2g}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "model_flop_utilisation": "MFU {:.0%}",
        "data_wait_share": "waiting {:.0%}",
    }
    return "  ".join(text.format(value) for name, text in texts.items() if (value := figures.get(name)) is not None)


def _sums(steps: list[StepResult]) -> torch.Tensor:
    """The fields of each unroll step's result: [K, 5]"""
    fields = ("loss_sum", "loss_count", "correct", "accepted", "counted")
    return torch.stack([torch.stack([torch.as_tensor(getattr(s, f)).double() for f in fields]) for s in steps])
