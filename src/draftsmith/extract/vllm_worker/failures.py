"""What went wrong inside the engine, written to a file: vLLM itself hands neither type nor traceback to its client."""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ENGINE = "engine"  # the part of a failure outside the workers


@dataclass(frozen=True)
class Failure:
    """One exception, where it was raised."""

    part: str  # "worker 3", or ENGINE
    during: str  # the method of the worker, "load_model" or "execute_model"
    type: str
    message: str  # may be empty
    module: str | None  # innermost module of the model that was running, "model.layers.12.mlp"
    numbers: tuple[int, ...]  # of the samples in the batch
    traceback: str
    time: float


def describe(error: BaseException, part: str, during: str, module: str | None, numbers: list[int]) -> Failure:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = "".join(traceback.format_exception(error))
    return Failure(part, during, name, str(error), module, tuple(numbers), text, time.time())


def running_module(model: Any, frames: TracebackType | None) -> str | None:
    """Name of the innermost module of the model whose forward was running when an exception was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    innermost = None
    while frames is not None:
        name = names.get(id(frames.tb_frame.f_locals.get("self")))
        innermost, frames = name or innermost, frames.tb_next
    return innermost


def write_failure(folder: Path, failure: Failure) -> None:
    path = folder / f"{time.time_ns()}-{os.getpid()}.json"
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    os.rename(aside, path)


def read_failures(folder: Path) -> list[Failure]:
    """All that were written, the first one first: with several workers, the others mostly fail because one did."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [Failure(**{**values, "numbers": tuple(values["numbers"])}) for values in found]
