"""Checkpoints that are complete or absent, written while training goes on.

checkpoints/initial/            the draft before training
checkpoints/step-00000500/      draft, optimizer.safetensors, state.json: what resuming needs, on any number of ranks
checkpoints/final/              the trained draft
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from draftsmith.draft.config import DraftConfig
from draftsmith.draft.files import load_draft, write_draft, write_tensors
from draftsmith.errors import CheckpointError
from draftsmith.rundir import atomic_folder, hash_file, write_json
from draftsmith.target import TargetHead
from draftsmith.train.step import Learner

Tensors = dict[str, torch.Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointWriter:
    """Copies a learner to host memory, and writes the copy in a thread; one at a time.

    All ranks take part in the copying, since each may hold a part of the weights; the first one writes.
    """

    def __init__(self, folder: Path, keep: int, *, writes: bool) -> None:
        self.folder, self.keep, self.writes = folder, keep, writes
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.in_flight: Future[None] | None = None
        self.memory: Tensors = {}  # of the copy, kept from one checkpoint to the next: pinning it takes a while

    def save(self, step: int, learner: Learner) -> None:
        """Begin to write the checkpoint after optimizer step `step`, once the one before is written."""
        self.wait()
        draft, optimizer = self._copy("draft", draft_tensors(learner)), self._copy("", optimizer_tensors(learner))
        if self.writes:
            if learner.device.type == "cuda":
                torch.cuda.synchronize(learner.device)
            state = {"step": step, "updates": updates_of(learner)}
            config = learner.draft.config
            self.in_flight = self.thread.submit(
                write_checkpoint, self.folder, state, config, draft, optimizer, self.keep
            )

    def wait(self) -> None:
        """Return once nothing is in flight. Raises what went wrong with it."""
        if self.in_flight is not None:
            done, self.in_flight = self.in_flight, None
            done.result()

    def check(self) -> None:
        """Raise what went wrong with a write that is over; does not wait for one that is not."""
        if self.in_flight is not None and self.in_flight.done():
            self.wait()

    def _copy(self, prefix: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
        copies = {}
        for name, tensor in tensors:
            if not self.writes:
                continue
            key = f"{prefix}/{name}"
            if key not in self.memory:
                self.memory[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[name] = self.memory[key].copy_(tensor, non_blocking=True)
        return copies

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thread.shutdown(wait=True)
        if error is None:
            self.wait()


def updates_of(learner: Learner) -> int:
    """Optimizer steps that changed the weights, by which AdamW corrects its moments; what taught nothing is none."""
    return int(next(iter(learner.optimizer.state.values()))["step"])


def write_checkpoint(
    folder: Path, state: dict[str, int], config: DraftConfig, draft: Tensors, optimizer: Tensors, keep: int
) -> None:
    """Write a checkpoint, then delete all but the newest `keep`.

    Args:
        state: `step`, the optimizer steps done, and `updates` among them.

    Raises:
        CheckpointError: the disk does not take it.
    """
    step = state["step"]
    try:
        with atomic_folder(folder / f"step-{step:08d}") as aside:
            write_draft(aside, config, draft)
            write_tensors(aside / "optimizer.safetensors", optimizer)
            digest = hash_file(aside / "optimizer.safetensors")
            write_json(aside / "state.json", {**state, "optimizer_sha256": digest})
        for old in checkpoints_in(folder)[:-keep]:
            shutil.rmtree(old)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written: {error}",
            where=str(folder),
            hint="make room; the same command, without --redo, then goes on from the checkpoint before",
        ) from error


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("step-????????"))


def load_checkpoint(folder: Path, learner: Learner, head: TargetHead) -> int:
    """Put a checkpoint's weights, moments and moving average in place and return the number of steps done.

    Raises:
        CheckpointError: a file is missing or damaged, or does not fit the draft.
    """
    weights, there = learner.weights, load_draft(folder, head).state_dict()
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if hash_file(folder / "optimizer.safetensors") != state["optimizer_sha256"]:
            raise ValueError("the checksum of optimizer.safetensors differs")
        tensors = load_file(folder / "optimizer.safetensors")
        step = int(state["step"])
        updates = float(state.get("updates", step))  # an earlier version did not count them
        for name, held in weights.held.items():
            held.data.copy_(weights.part(name, there[name]))
            moments = {m: weights.part(name, tensors[f"{name}.{m}"].to(held.device)) for m in MOMENTS}
            learner.optimizer.state[held] = {"step": torch.tensor(updates, device=held.device), **moments}
        for name, average in learner.averages.items():
            average.copy_(weights.part(name, tensors[f"{name}.average"].to(average.device)))
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"is damaged: {error!r}", where=str(folder), hint="delete this folder to resume from the one before"
        ) from error
    return step


def draft_tensors(learner: Learner, *, averaged: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a draft's file by name, made whole one by one; every rank must go through them.

    With `averaged`, and where there is one, the moving average of the weights.
    """
    yield from learner.draft.named_buffers()
    parts = learner.averages if averaged and learner.averages else learner.weights.held
    for name, part in parts.items():
        yield name, learner.weights.whole(name, part.detach())


def optimizer_tensors(learner: Learner) -> Iterator[tuple[str, torch.Tensor]]:
    """Moments, and the moving average of the weights where there is one, in the same way."""
    weights = learner.weights
    for name, held in weights.held.items():
        for moment in MOMENTS:
            yield f"{name}.{moment}", weights.whole(name, learner.optimizer.state[held][moment])
    for name, average in learner.averages.items():
        yield f"{name}.average", weights.whole(name, average)
