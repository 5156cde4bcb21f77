"""How states become the tensors of a shard, and back.

`encode` splits states into named parts, each with the tokens as its first axis, so that any span of tokens can be
read alone; the part named "" is the values themselves. `decode` undoes it for any span.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Codec:
    encode: Callable[[torch.Tensor], Parts]  # [tokens, …, Ht] → parts
    decode: Callable[[Parts], torch.Tensor]
    vector_bytes: Callable[[int], int]  # Ht → bytes of one encoded state


def encode_bf16(states: torch.Tensor) -> Parts:
    """Round to bfloat16, to nearest even; exact for states computed in bfloat16."""
    return {"": states.to(torch.bfloat16)}


def encode_fp32(states: torch.Tensor) -> Parts:
    """Exact for states computed in float32, float16 or bfloat16."""
    return {"": states.to(torch.float32)}


def decode_plain(parts: Parts) -> torch.Tensor:
    """The values, in the dtype that they are stored in."""
    return parts[""]


CODECS = {
    "bf16": Codec(encode_bf16, decode_plain, lambda hidden_size: 2 * hidden_size),
    "fp32": Codec(encode_fp32, decode_plain, lambda hidden_size: 4 * hidden_size),
}
