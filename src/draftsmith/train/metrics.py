"""Figures of a training run: one line of JSON each in metrics.jsonl, and the trackers that the recipe asks for."""

from __future__ import annotations

import importlib
import json
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from draftsmith.errors import MissingExtraError
from draftsmith.rundir import write_text

Figures = Mapping[str, float | None]


class Tracker(Protocol):
    """A place that shows figures by step."""

    def log(self, figures: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Online:
    """Weights & Biases, or trackio, which speaks its language. A resumed run goes on under the same name."""

    def __init__(self, package: str, folder: Path, name: str, settings: dict[str, Any]) -> None:
        try:
            module: Any = importlib.import_module(package)
        except ImportError as error:
            raise MissingExtraError(
                f"train.trackers names {package}, which is not installed",
                where="train",
                hint=f"pip install 'draftsmith[{package}]'",
            ) from error
        self.module = module
        unique = f"{name}-{_identity(folder)}"
        of_run = {"name": name, "id": unique, "dir": str(folder)} if package == "wandb" else {"name": unique}
        with redirect_stdout(sys.stderr):  # stdout is for data
            module.init(project="draftsmith", config=settings, resume="allow", **of_run)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self.module.log(dict(figures), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self.module.finish()


class MetricsLog:
    """Appends figures by step. Lines after the step that a resumed run starts from are dropped, and the validation of
    that step, in which the run may have been cut: they come again.

    With `writes` false, as on every rank but the first, nothing is written anywhere.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        trackers: Sequence[str],
        *,
        name: str = "train",
        settings: dict[str, Any] | None = None,
        writes: bool = True,
    ) -> None:
        self.file, self.writes, self.trackers = folder / "metrics.jsonl", writes, list[Tracker]()
        if not writes:
            return
        lines = read_metrics(folder)
        kept = [line for line in lines if line["step"] + (line["split"] == "validation") <= first_step]
        write_text(self.file, "".join(json.dumps(line) + "\n" for line in kept))
        for tracker in trackers:
            if tracker == "tensorboard":
                self.trackers.append(TensorBoard(folder, first_step))
            else:
                self.trackers.append(Online(tracker, folder, name, settings or {}))

    def add(self, split: str, step: int, figures: Figures) -> None:
        if not self.writes:
            return
        line = {"step": step, "split": split, "time": round(time.time(), 3), **figures}
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        known = {f"{split}/{key}": value for key, value in figures.items() if value is not None}
        for tracker in self.trackers:
            tracker.log(known, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tracker in self.trackers:
            tracker.close()


def _identity(folder: Path) -> str:
    """Eight letters that tell this run from others of its name; kept beside its figures."""
    file = folder / "tracker_id"
    if not file.exists():
        write_text(file, secrets.token_hex(4))
    return file.read_text(encoding="utf-8")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every whole line of metrics.jsonl; what a crash cut short is not one."""
    file = folder / "metrics.jsonl"
    lines = []
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines
