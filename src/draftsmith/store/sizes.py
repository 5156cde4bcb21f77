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


def bytes_per_token(hidden_size: int, aux_layers: int, codec: str) -> int:
    """Auxiliary and last states, the token's id as int32, its loss mask as a byte."""
    return (aux_layers + 1) * STATE_BYTES[codec](hidden_size) + 4 + 1


def predict_bytes(lengths: Iterable[int], *, aux_layers: int, hidden_size: int, codec: str) -> int:
    """Bytes on disk of sequences of so many tokens; headers and ledger, well under 1 % of it, are not counted."""
    per_token = bytes_per_token(hidden_size, aux_layers, codec)
    return sum(length * per_token + 8 for length in lengths)
