"""A progress bar with rate and time left on a terminal; silence elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from draftsmith import launch


class Progress:
    """Counts what is done; `rate` is what was done per second in this process."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.done, self.started_at = total, done, done
        self.start = time.monotonic()
        self._redraw = lambda note: None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def rate(self) -> float:
        return (self.done - self.started_at) / max(self.seconds, 1e-9)

    def advance(self, amount: int, note: str = "") -> None:
        self.done += amount
        self._redraw(note)


def quiet_libraries() -> None:
    """Let transformers and the hub show their own bars on a terminal alone, as ours do."""
    if not sys.stderr.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars
        from transformers.utils import logging

        disable_progress_bars()
        logging.disable_progress_bar()


@contextmanager
def progress(what: str, total: int, unit: str, done: int = 0) -> Iterator[Progress]:
    """Show how far `what` is, in `unit`s of `total`; `done` were done before this process began."""
    counter = Progress(total, done)
    if launch.rank() or not sys.stderr.isatty():
        yield counter
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, completed=done, unit=unit, rate="", note="")

        def redraw(note: str) -> None:
            bar.update(task, completed=counter.done, rate=f"{counter.rate:,.1f} {unit}/s", note=note)

        counter._redraw = redraw
        yield counter
