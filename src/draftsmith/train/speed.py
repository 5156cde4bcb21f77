"""How fast training goes, and how much of the devices it uses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftsmith.draft.config import DraftConfig
from draftsmith.gpus import peak_flops


def matrix_flops(
    config: DraftConfig, steps: int, tokens: int, squares: int, positions: float, asked_all: bool
) -> float:
    """Operations of the matrix products of one optimizer step, two for a multiplication and an addition.

        S tokens, Q = Σ T² over documents, P positions that teach, K unroll steps; q and v: widths of query and value
        each step     6·S·(H·(q + 2v) + q·H + 3·H·I)      layer without the embedding half of q, k, v; forward,
                                                          input's gradient and weight's gradient at 2 each
                      3.5 · 4·(Q/2)·q                     causal attention, whose backward pass is 2.5 forward ones
                      6·P·H·Vd                            lm_head
        once          4·S·(H·(q + 2v) + A·Ht·H)           embedding half and fc, whose inputs are frozen
                      2·P·Ht·(Vd + Vt if asked_all)           the target's head

    Args:
        squares: Q
        asked_all: the target's whole vocabulary was asked beside the draft's.
    """
    hidden, target = config.hidden_size, config.target_hidden_size
    query = config.num_attention_heads * config.head_dim
    qkv = hidden * (query + 2 * config.num_key_value_heads * config.head_dim)
    layer = qkv + query * hidden + 3 * hidden * config.intermediate_size
    head = positions * hidden * config.draft_vocab_size
    each = 6 * tokens * layer + 7 * squares * query + 6 * head
    rows = config.draft_vocab_size + (config.vocab_size if asked_all else 0)
    once = 4 * tokens * (qkv + len(config.aux_layer_ids) * target * hidden) + 2 * positions * target * rows
    return steps * each + once


def peak_of(device: torch.device) -> float | None:
    """Operations a second that a device has at its peak in bfloat16; None for a CPU or an unknown GPU."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


class Speed:
    """Tokens, operations and waiting since the last look, by a clock that stands still while the run is not training.

    Model FLOP utilisation is the operations of `matrix_flops`, over the seconds that passed and the peak of all devices
    together. None where the peak is not known.
    """

    def __init__(self, peak: float | None, devices: int) -> None:
        self.peak = None if peak is None else peak * devices
        self._restart()

    def _restart(self) -> None:
        self.start = time.monotonic()
        self.tokens = self.flops = self.waited = 0.0

    def add(self, tokens: int, flops: float) -> None:
        self.tokens += tokens
        self.flops += flops

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the block as waiting for data."""
        start = time.monotonic()
        yield
        self.waited += time.monotonic() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time in the block. The device should have no step left to work on."""
        start = time.monotonic()
        yield
        self.start += time.monotonic() - start

    def take(self) -> dict[str, float | None]:
        """The figures since the last time this was called."""
        figures = self.figures(max(time.monotonic() - self.start, 1e-9))
        self._restart()
        return figures

    def figures(self, seconds: float) -> dict[str, float | None]:
        """What was added so far, if it took so long."""
        return {
            "tokens_per_second": self.tokens / seconds,
            "model_flop_utilisation": self.flops / seconds / self.peak if self.peak else None,
            "data_wait_share": self.waited / seconds,
        }
