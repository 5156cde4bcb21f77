"""A step as a CUDA graph, launched at once: for drafts whose kernels run faster than the host launches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class StepGraph:
    """What `run` does with `inputs`, recorded without doing it. Everything that it needs must have run before."""

    def __init__(self, inputs: tuple[torch.Tensor, ...], run: Callable[[], Any]) -> None:
        self.inputs, self.graph = inputs, torch.cuda.CUDAGraph()
        # Only this thread is forbidden to allocate meanwhile: another one reads the next batch.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.output = run()

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Do it with other inputs of the same shapes. The output is overwritten by the next replay."""
        for mine, given in zip(self.inputs, inputs, strict=True):
            if mine is not given:
                mine.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.output
