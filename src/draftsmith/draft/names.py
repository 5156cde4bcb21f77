"""Tensor names of a draft in every format.

Ours are those of vLLM and speculators (`layers.0.*`). SGLang and SafeAILab call the decoder layer `midlayer`. SGLang
passes over a name that it does not know and leaves random weights in its place (sglang `models/llama_eagle3.py`), so
that an unknown name is an error in either direction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from draftsmith.errors import CheckpointError

T = TypeVar("T")

OURS, SGLANG = "layers.0.", "midlayer."

_OUTER = re.compile(r"(embed_tokens|fc|input_norm|fc_norm\.\d+|norm|lm_head)\.weight|d2t|t2d")
_INNER = re.compile(
    r"(input_layernorm|hidden_norm|post_attention_layernorm|self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight"
)


def from_vllm(name: str) -> str:
    return _renamed(name, OURS, OURS)


def to_sglang(name: str) -> str:
    return _renamed(name, OURS, SGLANG)


def from_sglang(name: str) -> str:
    return _renamed(name, SGLANG, OURS)


def rename_all(tensors: Mapping[str, T], rename: Callable[[str], str]) -> dict[str, T]:
    """The same tensors under other names.

    Raises:
        CheckpointError: names every tensor that has no place in a draft of this format.
    """
    renamed, unknown = {}, []
    for name, tensor in tensors.items():
        try:
            renamed[rename(name)] = tensor
        except KeyError:
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"no tensor of an EAGLE-3 draft in this format is called {', '.join(sorted(unknown))}",
            hint="a draft is one Llama layer without biases; its names start with neither `model.` nor another layer",
        )
    return renamed


def _renamed(name: str, before: str, after: str) -> str:
    """The name with its layer prefix replaced. Raises KeyError if a draft has no such tensor."""
    if name.startswith(before) and _INNER.fullmatch(name, len(before)):
        return after + name.removeprefix(before)
    if _OUTER.fullmatch(name):
        return name
    raise KeyError(name)
