"""What transformers builds of a configuration, and the names that its weights have in checkpoints on the hub."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from draftsmith.errors import TargetError
from draftsmith.probe.facts import TEXT_CONFIGS
from draftsmith.probe.gather import NOT_TEXT

Shape = tuple[int, ...]

# What transformers writes otherwise than the hub has it, by model type: (pattern, replacement).
_HUB_NAMES = {
    "kimi_k25": (
        (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
        (r"^vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed."),
        (r"^model\.mm_projector\.", "mm_projector."),
    )
}
# Tensors of published checkpoints that no model reads: buffers, and scales of a cache.
_UNREAD = re.compile(r"inv_freq$|attn\.(masked_)?bias$|[kv]_scale$")


def as_transformers_names_it(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with model types under which transformers knows the same architecture.

    Kimi-K2's model type, `kimi_k2`, is defined by code in its folder; its architecture is `DeepseekV3ForCausalLM`.

    Raises:
        TargetError: transformers has neither the model type nor the architecture.
    """
    from transformers import CONFIG_MAPPING

    config = deepcopy(config)
    part: dict[str, Any] | None = config
    while part is not None:
        kind = part.get("model_type")
        if kind not in CONFIG_MAPPING and (kind is not None or part is config):
            part["model_type"] = model_class(part).config_class.model_type
        part = next((part[key] for key in TEXT_CONFIGS if isinstance(part.get(key), dict)), None)
    return config


def model_class(config: dict[str, Any]) -> Any:
    """transformers' class of an architecture; it spells some with other underscores (Kimi_K25…).

    Raises:
        TargetError: transformers has none.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    architecture, kind = next(iter(config.get("architectures") or ()), ""), config.get("model_type")
    for name in (architecture, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind, "")):
        same = name.replace("_", "") == architecture.replace("_", "")
        if same and name and (found := getattr(transformers, name, None)):
            return found
    raise TargetError(
        f"transformers {transformers.__version__} has no {architecture or 'architecture'} (model type {kind!r}), and "
        "the code in a model's folder is not run for a scale model",
        where="config.json",
        hint="a newer transformers may have it",
    )


def read_config(config: dict[str, Any]) -> Any:
    """transformers' configuration of it. Raises TargetError if its values do not go together."""
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise TargetError(f"transformers cannot read its configuration: {error}", where="config.json") from error


def hub_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Names and shapes of the weights as checkpoints on the hub have them. Takes no memory for the weights.

    Raises:
        TargetError: the configuration's values do not go together, or a weight is not of floating point.
    """
    from transformers.core_model_loading import revert_weight_conversion

    read, architecture = read_config(config), model_class(config)
    try:
        with torch.device("meta"):
            model = architecture._from_config(read, dtype=torch.float32)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        raise TargetError(f"transformers cannot build {architecture.__name__}: {error}", where="config.json") from error
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    stored = revert_weight_conversion(model, own)
    if odd := [name for name, tensor in stored.items() if not tensor.is_floating_point()]:
        raise TargetError(f"its {odd[0]} is not of floating point, and no random values stand for it")
    renames = _HUB_NAMES.get(config["model_type"], ())
    shapes = {}
    for name, tensor in stored.items():
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        shapes[name] = tuple(tensor.shape)
    return shapes


def spelled_as_target(shapes: dict[str, Shape], target: dict[str, Any], prefix: str) -> dict[str, Shape]:
    """The same without the name of the base model in front, where the target's names lack it (GPT-2's)."""
    if not prefix or any(name.startswith(f"{prefix}.") for name in target):
        return shapes
    bare = {name.removeprefix(f"{prefix}."): shape for name, shape in shapes.items()}
    return bare if bare.keys() & target.keys() else shapes


def compare_names(target: dict[str, Any], stored: list[str]) -> list[str]:
    """What differs between a target's tensor names and a scale model's, in words; layers and experts not told apart.

    Args:
        target: the evidence's tensors: some layers only.
        stored: all names of the scale model.

    Raises:
        TargetError: the target's decoder has weights that the scale model lacks.
    """
    theirs = {_pattern(name) for name in target if not _UNREAD.search(name)}
    ours = {_pattern(name) for name in stored}
    absent = sorted(name for name in theirs - ours if name != "lm_head.weight")  # it may be stored though it is tied
    if decoder := [name for name in absent if not any(word in name for word in NOT_TEXT)]:
        raise TargetError(
            f"its decoder has {len(decoder)} kinds of tensors that transformers' model lacks, such as {decoder[0]}",
            hint="the configuration and the weights do not belong together, or transformers has this model otherwise",
        )
    notes = [f"{len(absent)} kinds of tensors outside the decoder are left out, such as {absent[0]}"] if absent else []
    if more := sorted(ours - theirs):
        notes.append(f"{len(more)} kinds of tensors are not among those known of the target, such as {more[0]}")
    return notes


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)
