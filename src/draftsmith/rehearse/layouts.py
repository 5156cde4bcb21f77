"""How checkpoints keep quantised weights: random ones in that layout, and the dense weights that they stand for.

Nothing is quantised here: the stored integers are drawn, and the dense weights follow exactly. Shapes: O, I rows and
columns of a linear layer; E experts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch

_LINEAR = re.compile(r"\.(?:layers|h|blocks)\.\d+\..*\.weight$")
_EMBEDDING = re.compile(r"embed|wte|wpe")
_NOT_LINEAR = re.compile(
    r"norm|router|conv1d|\.(gate|shared_expert_gate)\.weight$|(vision|visual|audio)\w*\.|projector"
)


def spread(shape: tuple[int, ...]) -> float:
    """Standard deviation at which what a linear layer gives is as large as what it gets.

    Each layer then changes the residual stream by much more than rounding, and attention is neither flat nor a spike.
    """
    return 1 / math.sqrt(shape[-1])


def random_words(count: int, generator: torch.Generator) -> torch.Tensor:
    """[count] int64, each bit random."""
    return torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=generator)


def random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """uint8 of that shape."""
    count = math.prod(shape)
    return random_words((count + 7) // 8, generator).view(torch.uint8)[:count].view(shape)


def _random_scales(shape: tuple[int, ...], typical: float, generator: torch.Generator) -> torch.Tensor:
    """float32 scales that differ by up to three times, so that none can stand for another."""
    return (torch.rand(shape, generator=generator) + 0.5) * typical


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """float32 weights of the size that trained ones have: factors about one, biases about zero, neither just that."""
    values = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return values.mul_(0.05)  # beside sigmoid scores: it changes some choices of experts, not all
    if name.endswith("bias"):
        return values.mul_(0.1)
    if len(shape) < 2:
        return values.mul_(0.2).add_(1)
    if _EMBEDDING.search(name):
        return values.mul_(0.3)
    return values.mul_(0.4 if "conv1d" in name else spread(shape))


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear layer within the text model's decoder layers."""
    return len(shape) == 2 and bool(_LINEAR.search(name)) and not _NOT_LINEAR.search(name)


@dataclass(frozen=True)
class Int4Groups:
    """compressed-tensors `pack-quantized`, 4 bits, symmetric, a scale for each group of columns; as in Kimi-K2.5.

    weight_packed [O, I / 8] int32, the first column in the lowest bits and 8 added to each; weight_scale
    [O, I / group]; weight_shape [2]. (compressed_tensors `compressors/pack_quantized`)
    """

    group_size: int
    ignore: tuple[str, ...]

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        if not _is_linear(name, shape):
            return False
        module = name.removesuffix(".weight")
        return not any(
            re.match(rule.removeprefix("re:"), module) if rule.startswith("re:") else rule == module
            for rule in self.ignore
        )

    def random(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        module, (rows, columns) = name.removesuffix("weight"), shape
        codes = random_words(rows * columns // 16, generator).view(torch.int32).view(rows, columns // 8)
        scales = _random_scales((rows, columns // self.group_size), spread(shape) / 4.6, generator)
        return {
            f"{module}weight_packed": codes,
            f"{module}weight_scale": scales.to(torch.bfloat16).to(dtype),
            f"{module}weight_shape": torch.tensor(shape, dtype=torch.int32),
        }

    def dense(self, name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        """[O, I] float32"""
        module = name.removesuffix("weight")
        packed, scales = stored[f"{module}weight_packed"], stored[f"{module}weight_scale"].float()
        codes = (packed[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15) - 8  # [O, I / 8, 8]
        groups = codes.view(*scales.shape, self.group_size)
        return (groups * scales[..., None]).flatten(1)


@dataclass(frozen=True)
class Fp8Blocks:
    """DeepSeek's FP8: weight [O, I] float8_e4m3fn, and a factor for each block, weight_scale_inv [ceil O, ceil I]."""

    block: tuple[int, int]
    skip: tuple[str, ...]

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        return _is_linear(name, shape) and not any(f".{part}." in f".{name}" for part in self.skip)

    def random(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        below_two = random_bytes(shape, generator) & 0xBF  # the top bit of the exponent is off: no NaN either
        blocks = (math.ceil(shape[0] / self.block[0]), math.ceil(shape[1] / self.block[1]))
        return {
            name: below_two.view(torch.float8_e4m3fn),
            f"{name}_scale_inv": _random_scales(blocks, spread(shape) / 0.6, generator),
        }

    def dense(self, name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        """[O, I] float32"""
        codes, scales = stored[name], stored[f"{name}_scale_inv"]
        rows = scales.repeat_interleave(self.block[0], dim=0)[: codes.shape[0]]
        return codes.float() * rows.repeat_interleave(self.block[1], dim=1)[:, : codes.shape[1]]


@dataclass(frozen=True)
class Mxfp4Experts:
    """gpt-oss: expert weights as E2M1 pairs in bytes with a power of two for each 32 columns.

    `…_blocks` [E, O, I / 32, 16] uint8, the first column in the low bits; `…_scales` [E, O, I / 32] uint8, exponents
    above 127. The dense tensor is [E, I, O]. (transformers `integrations/mxfp4.py`)
    """

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 3 and name.endswith(("experts.gate_up_proj", "experts.down_proj"))

    def random(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        experts, columns, rows = shape
        exponent = 127 + round(math.log2(spread((rows, columns)) / 2.9))
        around = torch.randint(exponent - 1, exponent + 2, (experts, rows, columns // 32), generator=generator)
        return {
            f"{name}_blocks": random_bytes((experts, rows, columns // 32, 16), generator),
            f"{name}_scales": around.to(torch.uint8),
        }

    def dense(self, name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        """[E, I, O] float32"""
        blocks, exponents = stored[f"{name}_blocks"], stored[f"{name}_scales"].to(torch.int32) - 127
        magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        values = torch.tensor([*magnitudes, *(-value for value in magnitudes)])
        pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1)  # [E, O, I / 32, 16, 2]
        return torch.ldexp(pairs.flatten(3), exponents[..., None]).flatten(2).transpose(1, 2).contiguous()


Layout = Int4Groups | Fp8Blocks | Mxfp4Experts


def read_layout(quantization: dict[str, Any]) -> Layout | None:
    """The layout that a `quantization_config` describes; None if it is none of ours."""
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return Mxfp4Experts()
    if method == "fp8" and quantization.get("weight_block_size"):
        rows, columns = quantization["weight_block_size"]
        return Fp8Blocks((rows, columns), tuple(quantization.get("modules_to_not_convert") or ()))
    groups = list((quantization.get("config_groups") or {}).values())
    if method != "compressed-tensors" or quantization.get("format") != "pack-quantized" or len(groups) != 1:
        return None
    weights = groups[0]["weights"]
    if (weights["num_bits"], weights["strategy"], weights["symmetric"]) != (4, "group", True):
        return None
    if groups[0].get("input_activations") or groups[0]["targets"] != ["Linear"] or weights.get("actorder"):
        return None
    return Int4Groups(weights["group_size"], tuple(quantization.get("ignore") or ()))
