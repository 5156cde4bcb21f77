"""Reads an exported draft as an engine would, and compares it with what was trained, bit for bit.

Engines pass over much of what this reader refuses: a weight without its flag, a flag without its weight, a vocabulary
map of target ids instead of offsets, layer ids that are not there. Each costs acceptance and says nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from draftsmith.draft.config import DraftConfig
from draftsmith.draft.engine_files import read_mapping
from draftsmith.draft.model import Draft
from draftsmith.draft.names import from_sglang, from_vllm, rename_all
from draftsmith.errors import CheckpointError, DataError, RequestError
from draftsmith.export.formats import CONFIG, EMBEDDING, NORM_FLAGS, WEIGHTS
from draftsmith.layers import from_sglang as canonical_ids
from draftsmith.vocab_map import check_mapping

_NORM_WEIGHTS = {"norm_before_fc": "input_norm.", "fc_norm": "fc_norm."}


@dataclass(frozen=True)
class ExportedDraft:
    """What a folder says: a shape, and tensors under our names, the embedding only if it is the draft's own."""

    config: DraftConfig
    tensors: dict[str, torch.Tensor]


def read_vllm(folder: Path) -> ExportedDraft:
    """Read a draft in the speculators format.

    Raises:
        CheckpointError: a file is damaged, or the configuration and the weights contradict each other or themselves;
            names the key or the tensor.
    """
    root = read_mapping(folder / CONFIG)
    layer = _need(root, "transformer_layer_config", folder)
    if root.get("speculators_model_type") != "eagle3":
        raise _error(folder, f"speculators_model_type is {root.get('speculators_model_type')!r}, not 'eagle3'")
    proposals = _need(_need(root, "speculators_config", folder), "proposal_methods", folder)
    if not proposals or "speculative_tokens" not in proposals[0]:
        raise _error(folder, "speculators_config.proposal_methods names no number of speculative_tokens")
    for flag in (*NORM_FLAGS, "tie_word_embeddings"):
        if layer.get(flag) != root.get(flag):
            raise _error(folder, f"{flag} is {root.get(flag)} at the root, {layer.get(flag)} for the layer")
    return _read(folder, root, layer, from_vllm)


def read_sglang(folder: Path) -> ExportedDraft:
    """Read a draft in the flat format of SGLang and SafeAILab. Raises CheckpointError like `read_vllm`."""
    root = read_mapping(folder / CONFIG)
    nested = _need(root, "eagle_config", folder)
    ids = nested.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and list(canonical_ids(ids)) != _need(root, "eagle_aux_hidden_state_layer_ids", folder):
        raise _error(folder, f"layer ids {ids} of eagle_config are not those of the root less one")
    if nested.get("norm_before_fc") != root.get("norm_before_fc"):
        raise _error(folder, "norm_before_fc at the root and in eagle_config differ")
    return _read(folder, root, root, from_sglang)


def check_identical(read: ExportedDraft, config: DraftConfig, shipped: dict[str, torch.Tensor], folder: Path) -> None:
    """Raise CheckpointError, naming the field or tensor, unless the folder holds exactly this draft.

    Args:
        shipped: the trained tensors after the cast to the export's dtype, under our names.
    """
    for field in dataclasses.fields(DraftConfig):
        there, trained = getattr(read.config, field.name), getattr(config, field.name)
        if there != trained:
            raise _error(folder, f"{field.name} is {there!r}, but {trained!r} was trained")
    if differing := read.tensors.keys() ^ shipped.keys():
        raise _error(folder, f"{', '.join(sorted(differing))}: in the folder or in the trained draft, not in both")
    for name, tensor in shipped.items():
        there = read.tensors[name]
        if there.dtype != tensor.dtype or not torch.equal(there, tensor):
            raise _error(folder, f"{name} is not what was trained")


def _read(folder: Path, root: dict[str, Any], layer: dict[str, Any], rename: Callable[[str], str]) -> ExportedDraft:
    config = _draft_config(folder, root, layer)
    try:
        tensors = rename_all(load_file(folder / WEIGHTS), rename)
    except (OSError, SafetensorError) as error:
        raise _error(folder, f"{WEIGHTS} cannot be read: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(error.what, where=str(folder), hint=error.hint) from error
    _check_tensors(folder, config, tensors)
    return ExportedDraft(config, tensors)


def _draft_config(folder: Path, root: dict[str, Any], layer: dict[str, Any]) -> DraftConfig:
    """`root` has what concerns EAGLE-3, `layer` the decoder layer in transformers' terms."""
    if "auto_map" in root or "auto_map" in layer:
        raise _error(folder, "auto_map asks for code that is not in the folder")
    if root.get("tie_word_embeddings") is not False:
        raise _error(folder, "tie_word_embeddings is not false: SGLang would take the embedding for the draft's head")
    ids = _need(root, "eagle_aux_hidden_state_layer_ids", folder)
    if layer.get("num_aux_hidden_states") != len(ids):
        raise _error(folder, f"num_aux_hidden_states is {layer.get('num_aux_hidden_states')} for layer ids {ids}")
    rope = dict(_need(layer, "rope_parameters", folder))
    theta = rope.pop("rope_theta", None)
    if theta != layer.get("rope_theta"):
        raise _error(folder, f"rope_theta is {layer.get('rope_theta')}, but {theta} in rope_parameters")
    scaling = None if rope == {"rope_type": "default"} else rope
    if scaling != layer.get("rope_scaling"):
        raise _error(folder, f"rope_scaling is {layer.get('rope_scaling')}, but {scaling} in rope_parameters")
    places = {"draft_vocab_size": root, "target_hidden_size": root} | dict.fromkeys(NORM_FLAGS, root)
    found: dict[str, Any] = {"aux_layer_ids": ids, "rope_theta": theta, "rope_scaling": scaling}
    for field in dataclasses.fields(DraftConfig):
        if field.name not in found:
            found[field.name] = _need(places.get(field.name, layer), field.name, folder)
    try:
        return DraftConfig.from_json(found)
    except RequestError as error:
        raise _error(folder, error.what) from error


def _check_tensors(folder: Path, config: DraftConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Configuration and weights must speak of the same draft, with an embedding where the target's cannot be shared."""
    for flag, prefix in _NORM_WEIGHTS.items():
        weights = [name for name in tensors if name.startswith(prefix)]
        if weights and not getattr(config, flag):
            raise _error(folder, f"{weights[0]} is there, but {flag} is false: an engine would leave it out")
        if not weights and getattr(config, flag):
            raise _error(folder, f"{flag} is true, but no {prefix}*weight is there: an engine would use ones")
    with torch.device("meta"):
        wanted = Draft(config).state_dict()
    if config.hidden_size == config.target_hidden_size and EMBEDDING not in tensors:
        del wanted[EMBEDDING]
    if "d2t" in wanted and "d2t" not in tensors:
        raise _error(folder, f"d2t is missing: an engine would say the first {config.draft_vocab_size} tokens only")
    problems = [f"{name} is missing" for name in wanted.keys() - tensors.keys()]
    problems += [f"{name} is not part of a draft of this configuration" for name in tensors.keys() - wanted.keys()]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, not {list(wanted[name].shape)}"
        for name in wanted.keys() & tensors.keys()
        if tensors[name].shape != wanted[name].shape
    ]
    if problems:
        raise _error(folder, "; ".join(sorted(problems)))
    if "d2t" in tensors:
        try:
            check_mapping(tensors["d2t"].tolist(), tensors["t2d"].tolist(), config.vocab_size, config.draft_vocab_size)
        except DataError as error:
            raise CheckpointError(f"d2t: {error.what}", where=str(folder), hint=error.hint) from error


def _need(config: dict[str, Any], key: str, folder: Path) -> Any:
    if key not in config:
        raise _error(folder, f"{key} is not in {CONFIG}: engines would each assume something else")
    return config[key]


def _error(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(folder))
