"""How far a stage is, at which rate, and the time left: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from draftsmith import launch

LINE_SECONDS = 60.0  # between two lines where there is no terminal


class Progress:
    """Counts what is done; `rate` is what was done per second in this process, since `restart`."""

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

    def restart(self) -> None:
        """Begin to count seconds and rate: so far, things were made ready."""
        self.started_at, self.start = self.done, time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time in the block out of seconds and rate."""
        start = time.monotonic()
        yield
        self.start += time.monotonic() - start

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
    if launch.rank():
        yield counter
        return
    if not sys.stderr.isatty():
        counter._redraw = _lines(what, counter, unit)
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


def _lines(what: str, counter: Progress, unit: str) -> Callable[[str], None]:
    said = time.monotonic()

    def say(note: str) -> None:
        nonlocal said
        if time.monotonic() - said < LINE_SECONDS:
            return
        said = time.monotonic()
        parts = [f"{what}: {counter.done:,.0f} of {counter.total:,.0f} {unit}"]
        if counter.rate:
            left = timedelta(seconds=round((counter.total - counter.done) / counter.rate))
            parts += [f"{counter.rate:,.1f} {unit}/s", f"{left} left"]
        print(", ".join(filter(None, [*parts, note])), file=sys.stderr, flush=True)

    return say
