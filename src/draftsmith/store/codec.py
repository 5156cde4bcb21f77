"""How states become the tensors of a shard, and back.

`encode` splits the states of a sequence into named parts, and `decode` undoes it, in memory that it is given, of the
states' shape in dtype `decoded` and contiguous, or else in new memory, or in none where the states are as they are
stored. The part named "" has the states' own shape, and every part has the tokens as its first axis, so that any span
of them can be read alone. But for the parts that are `ragged`: those are bytes, and can be read for the whole sequence
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow
import torch

from draftsmith.errors import StoreError

Parts = dict[str, torch.Tensor]


class Decode(Protocol):
    def __call__(self, parts: Parts, into: torch.Tensor | None = None) -> torch.Tensor: ...


E4M3_LARGEST = 448.0
BLOCK = 64  # values of a state that share a scale in int8, but for a width that is no multiple
VALUES_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 24}  # in a processor's cache; in little of a device's memory
LARGEST_SCALE = 2.0**112  # so that the largest that `decode_int8` makes of it is a bfloat16
_ZSTD = pyarrow.Codec("zstd", compression_level=1)


@dataclass(frozen=True)
class Codec:
    encode: Callable[[torch.Tensor], Parts]  # [T, …, Ht] → parts
    decode: Decode
    ragged: tuple[str, ...] = ()
    error: float | None = None  # of a state, relative, as large as is usual; None: encoded on the CPU alone
    dtype: str | None = None  # that the target must compute in
    decoded: torch.dtype = torch.bfloat16


def encode_bf16(states: torch.Tensor) -> Parts:
    """Round to bfloat16, to nearest even; exact for states computed in bfloat16."""
    return {"": states.to(torch.bfloat16)}


def encode_fp32(states: torch.Tensor) -> Parts:
    """Exact for states computed in float32, float16 or bfloat16."""
    return {"": states.to(torch.float32)}


def decode_plain(parts: Parts, into: torch.Tensor | None = None) -> torch.Tensor:
    """The values, in the dtype that they are stored in."""
    return parts[""] if into is None else into.copy_(parts[""])


def encode_fp8(states: torch.Tensor) -> Parts:
    """Round to float8 e4m3, with a scale for every token and layer: the least power of two that keeps the largest
    value in range, so that scaling itself rounds nothing. A state with a value that is not finite is NaN throughout."""
    states = states.to(torch.bfloat16)
    if not states.numel():
        return {"": states.to(torch.float8_e4m3fn), "scale": states.new_ones(states.shape[:-1])}
    largest = states.abs().amax(dim=-1).float()
    half_to_one, exponent = torch.frexp(largest / E4M3_LARGEST)
    exponent = (exponent - (half_to_one == 0.5).int()).clamp(-100, 120)
    scale = torch.where(largest.isfinite(), torch.exp2(exponent.float()), torch.nan)
    codes = states * (1 / scale).to(torch.bfloat16).unsqueeze(-1)
    if (exponent == 120).any():  # the next code, 256, would be beyond bfloat16's largest value
        codes = torch.where(exponent.unsqueeze(-1) == 120, codes.clamp(-240, 240), codes)
    return {"": codes.to(torch.float8_e4m3fn), "scale": scale.to(torch.bfloat16)}


def decode_fp8(parts: Parts, into: torch.Tensor | None = None) -> torch.Tensor:
    """In bfloat16, which holds every product of a code and its scale exactly.

    A code's bits, moved into place, are those of a bfloat16 whose exponent is 120 too low: e4m3 counts exponents from
    -7, bfloat16 from -127. torch's own conversion takes three times as long on a CPU.
    """
    codes, scales = parts[""], parts["scale"]
    states = _room(codes, into)
    rows = (values.flatten(0, -2) for values in (codes, scales.unsqueeze(-1), states))
    for code, scale, some in _pieces(*rows):
        bits = code.view(torch.int8).to(torch.int16)
        raised = ((bits & 0x7F) << 4) | (bits & -0x8000)
        torch.mul(raised.view(torch.bfloat16).mul_(2.0**120), scale, out=some)
    return states


def encode_int8(states: torch.Tensor) -> Parts:
    """Round each block of a state to 8-bit integers, after a Hadamard matrix turned it: that spreads the few values
    which tower above the rest over the whole block (QuaRot, Ashkboos et al. 2024), so that the step, 1/127 of the
    largest, is fine for all. A state with a value that is not finite, or beyond 2^119, is NaN throughout."""
    size = math.gcd(states.shape[-1], BLOCK)
    count = states.shape[-1] // size  # of each state
    blocks = states.to(torch.bfloat16).reshape(-1, count, size).flatten(0, 1)
    turn = _hadamard(size, blocks.device) / size
    codes = torch.empty(blocks.shape, dtype=torch.int8, device=blocks.device)
    scales = torch.empty(len(blocks), 1, dtype=torch.bfloat16, device=blocks.device)
    for some, code, scale in _pieces(blocks, codes, scales):
        turned = some.float() @ turn
        scale.copy_(turned.abs().amax(-1, keepdim=True) / 127).clamp_(min=2.0**-126)
        code.copy_(turned.div_(scale.float()).round_().nan_to_num_(0).clamp_(-127, 127))
    scales = scales.view(*states.shape[:-1], count)
    whole = (scales <= LARGEST_SCALE).all(-1, keepdim=True)
    return {"": codes.view(states.shape), "scale": scales.where(whole, torch.nan)}


def decode_int8(parts: Parts, into: torch.Tensor | None = None) -> torch.Tensor:
    """In bfloat16. The sums are of integers and exact, whatever their order."""
    codes, scales = parts[""], parts["scale"]
    states = _room(codes, into)
    size = codes.shape[-1] // scales.shape[-1]
    turn = _hadamard(size, codes.device)
    blocks = (values.unflatten(-1, (scales.shape[-1], -1)).flatten(0, -2) for values in (codes, scales, states))
    for code, scale, some in _pieces(*blocks):
        torch.mul(code.float() @ turn, scale.float(), out=some)
    return states


def _room(codes: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device) if into is None else into


def _pieces(*rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Some rows of each at a time, [n, width]: so many that what is computed of them is in fast memory."""
    at_once = max(1, VALUES_AT_ONCE[rows[0].device.type] // max(values.shape[-1] for values in rows))
    return zip(*(values.split(at_once) for values in rows), strict=True)


def _hadamard(size: int, device: torch.device) -> torch.Tensor:
    """[size, size] of ±1, symmetric, and `size` times its own inverse; a power of two (Sylvester's construction)."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device), matrix)
    return matrix


def encode_lossless(states: torch.Tensor) -> Parts:
    """bfloat16, bit for bit: a byte of sign and mantissa as it is, for it hardly repeats, and the exponents, of which
    few occur, packed. Layer by layer, since each has its own scale: one code for all would be longer.

    Raises StoreError if the states are not in bfloat16.
    """
    if states.dtype != torch.bfloat16:
        raise StoreError(f"keeps states in bfloat16, and these are in {states.dtype}", where="codec lossless")
    bits = states.contiguous().view(torch.int16).numpy().view(np.uint16)
    low, exponent = _halves((bits << 1) | (bits >> 15))
    layers_first = np.ascontiguousarray(exponent.swapaxes(0, -2))
    packed = np.frombuffer(_ZSTD.compress(layers_first.data, asbytes=False) if exponent.size else b"", dtype=np.uint8)
    return {"": torch.from_numpy(np.ascontiguousarray(low)), "exponent": torch.from_numpy(packed.copy())}


def decode_lossless(parts: Parts, into: torch.Tensor | None = None) -> torch.Tensor:
    low = parts[""].numpy()
    bits = np.empty(low.shape, dtype=np.uint16)
    lower, upper = _halves(bits)
    lower[:] = low
    if low.size:
        unpacked = np.frombuffer(_ZSTD.decompress(parts["exponent"].numpy().data, low.size, asbytes=False), np.uint8)
        shape = list(low.shape)
        shape[0], shape[-2] = shape[-2], shape[0]
        upper[:] = unpacked.reshape(shape).swapaxes(0, -2)
    states = torch.from_numpy(((bits >> 1) | (bits << 15)).view(np.int16)).view(torch.bfloat16)
    return states if into is None else into.copy_(states)


def _halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper byte of each 16-bit word, as views."""
    halves = words.view(np.uint8).reshape(*words.shape, 2)
    return halves[..., 0], halves[..., 1]


CODECS = {
    "bf16": Codec(encode_bf16, decode_plain),
    "fp32": Codec(encode_fp32, decode_plain, decoded=torch.float32),
    "fp8": Codec(encode_fp8, decode_fp8, error=0.03),
    "int8": Codec(encode_int8, decode_int8, error=0.008),
    "lossless": Codec(encode_lossless, decode_lossless, ragged=("exponent",), dtype="bfloat16"),
}
