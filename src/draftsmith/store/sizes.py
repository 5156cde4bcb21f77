"""How large a store becomes. No torch, for the probe."""

from __future__ import annotations

import math
from collections.abc import Iterable

# Bytes of a state, of `hidden_size` values, by codec.
STATE_BYTES = {
    "bf16": lambda hidden_size: 2 * hidden_size,
    "fp32": lambda hidden_size: 4 * hidden_size,
    "fp8": lambda hidden_size: hidden_size + 2,  # and the scale
    "int8": lambda hidden_size: (
        hidden_size + 2 * hidden_size // math.gcd(hidden_size, 64)
    ),  # and a scale for each block
    # A byte of sign and mantissa; what the exponents take depends on the states: 0.69 of bf16 in all for SmolLM2's,
    # 0.71 for normally distributed ones.
    "lossless": lambda hidden_size: 7 * hidden_size // 5,
}


def bytes_per_token(hidden_size: int, aux_layers: int, codec: str, taught: float = 1.0) -> int:
    """Auxiliary states, the token's id as int32, its loss mask as a byte; and for a share of the tokens the last state:
    those before a token of the target's own."""
    return math.ceil((aux_layers + taught) * STATE_BYTES[codec](hidden_size)) + 4 + 1


def predict_bytes(lengths: Iterable[tuple[int, int]], *, aux_layers: int, hidden_size: int, codec: str) -> int:
    """Bytes on disk of sequences; headers and ledger, well under 1 % of it, are not counted.

    Args:
        lengths: of each sequence its tokens, and how many of them have their last state kept.
    """
    state = STATE_BYTES[codec](hidden_size)
    return sum((aux_layers * tokens + taught) * state + 5 * tokens + 16 for tokens, taught in lengths)
