"""A target in small: a checkpoint of a few megabytes with its architecture, tensor names and layout, weights random.

    config.json → shrunk → transformers' model without memory → names and shapes → random shards

Every tensor is drawn from the seed and its own name, so that no two are alike and their order does not matter.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from draftsmith.errors import TargetError
from draftsmith.probe.facts import TEXT_CONFIGS
from draftsmith.progress import quiet_libraries
from draftsmith.rehearse.layouts import Layout, random_weight, read_layout
from draftsmith.rehearse.scale_config import shrink
from draftsmith.rehearse.scale_names import (
    Shape,
    as_transformers_names_it,
    compare_names,
    hub_shapes,
    model_class,
    read_config,
    spelled_as_target,
)
from draftsmith.rundir import write_json, write_text

SHARDS = 2
MOST_WEIGHTS = 200_000_000  # of a small one; published configurations come to 3 to 15 million
MAX_SHARD_WEIGHTS = 1 << 31
_QUANTIZATION = ("quantization_config", "quantization", "compression_config")
# vLLM's processor of Kimi-K2.5 is built from this file even where the engine serves text alone.
KIMI_PREPROCESSOR = {
    "image_processor_type": "KimiK25VisionProcessor",
    "media_proc_cfg": {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "in_patch_limit": 16384,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "patch_limit_on_one_side": 512,
        "fixed_output_tokens": None,
        "sample_fps": 2.0,
        "timestamp_mode": "hh:mm:ss.fff",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


@dataclass(frozen=True)
class ScaleModel:
    """A checkpoint that stands for a target.

    Attributes:
        folder: config.json and weights in the target's layout.
        plain: the same weights dense, for transformers to load; `folder` itself where that would be the same.
        shrunk: dotted setting -> (target's, scale model's).
        notes: in words, what was changed for an engine's sake, and what could not be kept.
        parameters: of the dense model.
    """

    folder: Path
    plain: Path
    shrunk: dict[str, tuple[Any, Any]]
    notes: tuple[str, ...]
    parameters: int


def build_scale_model(
    evidence: dict[str, Any],
    folder: Path,
    *,
    dtype: str = "float32",
    width: Literal["small", "full"] = "small",
    num_hidden_layers: int | None = None,
    seed: int = 0,
) -> ScaleModel:
    """Write the scale model of a target.

    Args:
        evidence: of the target, as `read_evidence` returns it; its config.json is enough.
        folder: to be written; the dense copy, if one is needed, goes beside it.
        dtype: of the weights that are not quantised.
        width: "full" keeps all sizes but the number of layers, and writes no dense copy of quantised weights.
        num_hidden_layers: by default as few as show every kind of layer, and no fewer than 7.
        seed: of the weights.

    Raises:
        TargetError: transformers does not know the architecture, its configuration is not usable or does not shrink,
            or what transformers builds lacks weights that the target's decoder has.
    """
    quiet_libraries()
    target, known = evidence.get("config"), evidence.get("tensors")
    if target is None:
        raise TargetError("has no readable config.json", where=evidence.get("path"))
    effective = read_config(as_transformers_names_it(target)).to_dict()
    shrunk = shrink(target, effective, width=width, num_hidden_layers=num_hidden_layers)
    notes: list[str] = []
    config = _for_engines(shrunk.config, dtype, notes)
    layout = _layout(config, notes)
    dense_config = _without_quantization(as_transformers_names_it(config))
    shapes = hub_shapes(dense_config)
    if known:
        shapes = spelled_as_target(shapes, known, model_class(dense_config).base_model_prefix)
    parameters = _count(shapes, math.inf if width == "full" else MOST_WEIGHTS)
    plan = _plan(shapes, parameters, 1 if len(evidence.get("shards") or ()) == 1 else SHARDS)
    weights = _Weights(layout, getattr(torch, dtype), seed)
    stored = _write(folder, config, shapes, plan, weights.stored)
    if known and (layout is not None or not _is_quantized(target)):
        notes += compare_names(known, stored)
    plain = folder
    if layout is not None and width == "full":
        notes.append("no dense copy is written at full width")
    elif dense_config != config:
        plain = folder.with_name(f"{folder.name}-plain")
        _write(plain, _with_dtype(dense_config, "float32"), shapes, plan, weights.dense)
    return ScaleModel(folder, plain, shrunk.changes, tuple(notes), parameters)


def _count(shapes: dict[str, Shape], most: float) -> int:
    """All weights. Raises TargetError if there are more of them than a small model may have."""
    parameters = sum(math.prod(shape) for shape in shapes.values())
    if parameters > most:
        largest = max(shapes, key=lambda name: math.prod(shapes[name]))
        raise TargetError(
            f"its scale model would have {parameters:,} weights: the setting that makes {largest} as large as "
            f"{shapes[largest]} is not among those that are known to shrink",
            where="config.json",
        )
    return parameters


# ---- Configuration ----


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configuration and the text configurations in it, outermost first."""
    parts = [config]
    while part := next((parts[-1][key] for key in TEXT_CONFIGS if isinstance(parts[-1].get(key), dict)), None):
        parts.append(part)
    return parts


def _for_engines(config: dict[str, Any], dtype: str, notes: list[str]) -> dict[str, Any]:
    """The settings that an engine needs and a published configuration may leave to its own code."""
    config = _with_dtype(config, dtype)
    parts = _parts(config)
    if any([part.pop("auto_map", None) for part in parts]):  # of every part
        notes.append("auto_map is left out: the model's own code is not run")
    text = parts[-1]
    if text.get("model_type") in ("deepseek_v3", "kimi_k2"):
        for key, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
            if key not in text:
                text[key] = value
                notes.append(f"{key} is set to {value}, which transformers takes for granted and engines do not")
    return config


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    config = deepcopy(config)
    places = [(part, key) for part in _parts(config) for key in ("dtype", "torch_dtype") if part.get(key)]
    for part, key in places or [(config, "dtype")]:
        part[key] = dtype
    return config


def _is_quantized(config: dict[str, Any]) -> bool:
    return any(part.get(key) for part in _parts(config) for key in _QUANTIZATION)


def _layout(config: dict[str, Any], notes: list[str]) -> Layout | None:
    """The layout of the weights; one that is not known here is taken out of the configuration."""
    for part in _parts(config):
        for key in _QUANTIZATION:
            if quantization := part.get(key):
                if layout := read_layout(quantization):
                    return layout
                notes.append(f"its quantisation ({quantization.get('quant_method')}) is not kept: weights are dense")
                del part[key]
    return None


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    config = deepcopy(config)
    for part in _parts(config):
        for key in _QUANTIZATION:
            part.pop(key, None)
    return config


# ---- Weights ----


@dataclass(frozen=True)
class _Weights:
    """Random weights, the same whenever they are asked for."""

    layout: Layout | None
    dtype: torch.dtype
    seed: int

    def stored(self, name: str, shape: Shape) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint that hold one weight."""
        generator = torch.Generator().manual_seed(self._seed_of(name))
        if self.layout is not None and self.layout.takes(name, shape):
            return self.layout.random(name, shape, self.dtype, generator)
        return {name: random_weight(name, shape, generator).to(self.dtype)}

    def dense(self, name: str, shape: Shape) -> dict[str, torch.Tensor]:
        """The same weight in float32."""
        stored = self.stored(name, shape)
        if self.layout is not None and self.layout.takes(name, shape):
            return {name: self.layout.dense(name, stored)}
        return {name: stored[name].float()}

    def _seed_of(self, name: str) -> int:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return int.from_bytes(digest[:7], "little")


def _plan(shapes: dict[str, Shape], parameters: int, least: int) -> list[list[str]]:
    """Names of the weights in each shard, in order, about as many weights in each; `least` shards, or more."""
    shards, before = max(least, math.ceil(parameters / MAX_SHARD_WEIGHTS)), 0
    plan: list[list[str]] = [[] for _ in range(shards)]
    for name, shape in shapes.items():
        plan[before * shards // parameters].append(name)
        before += math.prod(shape)
    return [names for names in plan if names]


def _write(
    folder: Path,
    config: dict[str, Any],
    shapes: dict[str, Shape],
    plan: list[list[str]],
    tensors_of: Callable[[str, Shape], dict[str, torch.Tensor]],
) -> list[str]:
    """Write a checkpoint, one shard in memory at a time; its configuration comes last. Returns the tensors' names."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(plan, start=1):
        file = f"model-{number:05}-of-{len(plan):05}.safetensors" if len(plan) > 1 else "model.safetensors"
        with ThreadPoolExecutor() as pool:  # drawing a tensor takes one core, and holds no lock of Python's
            drawn = list(pool.map(lambda name: tensors_of(name, shapes[name]), names))
        tensors = {key: tensor for found in drawn for key, tensor in found.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(plan) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
    if config.get("model_type") == "kimi_k25":
        write_json(folder / "preprocessor_config.json", KIMI_PREPROCESSOR)
    write_text(folder / "config.json", json.dumps(config, indent=2))  # a published one may hold Infinity
    return list(weight_map)
