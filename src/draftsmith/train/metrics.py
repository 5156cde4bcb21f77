"""Figures of training: a line of JSON each in metrics.jsonl, and TensorBoard where wanted."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from draftsmith.rundir import write_text


class MetricsLog:
    """Appends figures by step. Lines after the step that a resumed run starts from are dropped: they come again."""

    def __init__(self, folder: Path, first_step: int, *, tensorboard: bool) -> None:
        self.file = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(folder) if line["step"] <= first_step]
        write_text(self.file, "".join(json.dumps(line) + "\n" for line in kept))
        self.writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step or None)

    def add(self, split: str, step: int, figures: dict[str, float]) -> None:
        line = {"step": step, "split": split, "time": round(time.time(), 3), **figures}
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.writer is not None:
            for name, value in figures.items():
                self.writer.add_scalar(f"{split}/{name}", value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writer is not None:
            self.writer.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every whole line of metrics.jsonl; what a crash cut short is not one."""
    file = folder / "metrics.jsonl"
    lines = []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return lines
