"""A draft's folder as an engine reads it, and where that, its manifest and the target contradict one another.

Where config.json is silent, each value is what vLLM takes for it (vLLM 0.32 `configs/speculators/algos.py` and
`models/llama_eagle3.py`), however the draft was trained: it is the draft as it is served that accepts little.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from draftsmith.draft.config import DraftConfig
from draftsmith.draft.engine_files import CONFIG, MANIFEST, read_mapping, section
from draftsmith.draft.files import EMBEDDING, WEIGHTS
from draftsmith.draft.model import Draft
from draftsmith.draft.names import SGLANG, from_sglang, from_vllm, rename_all
from draftsmith.errors import CheckpointError, RequestError
from draftsmith.layers import default_aux_layer_ids, from_specforge
from draftsmith.records import TargetFacts
from draftsmith.target import TargetHead

INDEX, PICKLED = "model.safetensors.index.json", "pytorch_model.bin"
IDS, HEAD = "eagle_aux_hidden_state_layer_ids", "lm_head.weight"
_SAME_TARGET = ("config_sha256", "weights_sha256", "tokenizer_sha256", "template_sha256", "quantization", "dtype")


def is_for_engines(folder: Path) -> bool:
    """Whether it is an exported or published draft, not a checkpoint."""
    return (folder / CONFIG).exists() and "architectures" in read_mapping(folder / CONFIG)


def load_engine_draft(
    folder: Path, facts: TargetFacts, head: TargetHead, *, to_train: bool = False
) -> tuple[Draft, list[str]]:
    """The draft as vLLM would run it, and what is known to be wrong without running it.

    Args:
        to_train: as it was trained instead, where SpecForge writes what vLLM passes over or takes for something else
            (docs/decisions/0008).

    Raises:
        CheckpointError: the files are damaged, or are no draft for this target; names what differs.
    """
    root = read_mapping(folder / CONFIG)
    if to_train:
        _refuse_specforge_norm(root, folder)
    config, silent = _config(root, facts, folder, to_train)
    _refuse_other_shape(config, facts, folder)
    tensors = _read_tensors(folder)
    rename = from_sglang if any(name.startswith(SGLANG) for name in tensors) else from_vllm
    tensors = rename_all(tensors, rename)
    draft = Draft(config)
    tensors = {EMBEDDING: head.embedding.detach(), **tensors}
    if HEAD not in tensors and _shares_head(config, head):
        tensors[HEAD] = head.lm_head.detach().clone()  # which training changes
    wrong = [
        f"{name}: {'not in the weights' if name not in tensors else 'of another shape than config.json says'}"
        for name, value in draft.state_dict().items()
        if name != "t2d" and (name not in tensors or tensors[name].shape != value.shape)
    ]
    if wrong:
        hint = "an engine refuses it, runs random weights, or says the first tokens only: export or fetch it anew"
        raise CheckpointError("; ".join(wrong), where=str(folder), hint=hint)
    unread = sorted(tensors.keys() - draft.state_dict().keys())
    draft.load_state_dict({name: x for name, x in tensors.items() if name not in unread}, assign=True, strict=False)
    found = silent + [f"the weights hold {name}, which config.json has no place for" for name in unread]
    return draft.to(head.embedding.device).requires_grad_(False), found + _against_manifest(folder, config, facts)


def _shares_head(config: DraftConfig, head: TargetHead) -> bool:
    """Whether the target's head does for one that is not in the weights, which vLLM then takes
    (`v1/spec_decode/llm_base_proposer.py`)."""
    return (config.draft_vocab_size, config.hidden_size) == tuple(head.lm_head.shape) and head.lm_head_bias is None


def _refuse_specforge_norm(root: dict[str, Any], folder: Path) -> None:
    """In the flat format, `norm_output` has two meanings. Raises CheckpointError unless the draft is our own."""
    if root.get("norm_output") and "transformer_layer_config" not in root and not (folder / MANIFEST).exists():
        raise CheckpointError(
            "says norm_output=true, which in SpecForge is the norm before the head, and in vLLM one before the state "
            "is fed back too",
            where=str(folder / CONFIG),
            hint="if SpecForge trained it, set norm_output to false there, which is what it was trained with in vLLM's "
            "terms; otherwise give it in the speculators format",
        )


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """In one file or several. The first EAGLE-3 drafts that were published are pickled by torch."""
    names = {name: folder / name for name in (WEIGHTS, INDEX, PICKLED) if (folder / name).exists()}
    file = next(iter(names.values()), folder / WEIGHTS)
    try:
        if file.name == PICKLED:
            return {**torch.load(file, map_location="cpu", weights_only=True)}
        if file.name == WEIGHTS:
            return load_file(file)
        files = set(section(read_mapping(file), "weight_map", file).values())
        return {name: tensor for one in sorted(files) for name, tensor in load_file(folder / one).items()}
    except (OSError, SafetensorError, UnpicklingError, RuntimeError, EOFError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot be read: {error}", where=str(file), hint="export it anew, or fetch it again"
        ) from error


def _config(root: dict[str, Any], facts: TargetFacts, folder: Path, to_train: bool) -> tuple[DraftConfig, list[str]]:
    """The shape as vLLM reads it, or with SpecForge's layer ids as it was trained, and what has to be assumed."""
    file = folder / CONFIG
    speculators = "transformer_layer_config" in root
    layer = section(root, "transformer_layer_config", file) if speculators else root
    rope = section(layer, "rope_parameters", file) or section(layer, "rope_scaling", file)
    eagle = section(root, "eagle_config", file)
    nested = eagle.get(IDS) if root.get(IDS) is None else None
    said = {
        "aux_layer_ids": (to_train and nested) or root.get(IDS),
        "norm_before_residual": root.get("norm_before_residual"),
        "rope_theta": rope.pop("rope_theta", layer.get("rope_theta")),
    }
    defaults = {
        "aux_layer_ids": default_aux_layer_ids(facts.num_hidden_layers or 0),
        "norm_before_residual": speculators,
        "rope_theta": 10000.0,
    }
    silent = {name: defaults[name] for name, value in said.items() if value is None}
    heads, hidden_size = layer.get("num_attention_heads") or None, layer.get("hidden_size")
    shared = hidden_size // heads if isinstance(hidden_size, int) and isinstance(heads, int) else None
    values = {field.name: layer.get(field.name) for field in dataclasses.fields(DraftConfig)} | {
        "draft_vocab_size": root.get("draft_vocab_size") or layer.get("vocab_size"),
        "target_hidden_size": root.get("target_hidden_size") or hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": layer.get("num_key_value_heads") or heads,
        "head_dim": layer.get("head_dim") or shared,
        "norm_before_fc": bool(eagle.get("norm_before_fc", root.get("norm_before_fc"))),
        "fc_norm": bool(root.get("fc_norm")),
        "norm_output": bool(root.get("norm_output")),
        **said,
        **silent,
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
    }
    if absent := [name for name, value in values.items() if value is None and name != "rope_scaling"]:
        raise CheckpointError(f"does not say {', '.join(absent)}", where=str(file))
    assumed = [f"config.json does not say {name}: vLLM takes {json.dumps(value)}" for name, value in silent.items()]
    try:
        config = TypeAdapter(DraftConfig).validate_python(values)
    except ValidationError as error:
        wrong = [f"{found['loc'][0]} is {json.dumps(found['input'])}: {found['msg']}" for found in error.errors()]
        raise CheckpointError("; ".join(wrong), where=str(file)) from error
    except RequestError as error:  # which would send to the recipe
        raise CheckpointError(error.what, where=str(file)) from error
    if nested:
        here = "are passed over by vLLM"
        if to_train:
            config = dataclasses.replace(config, aux_layer_ids=from_specforge(config.aux_layer_ids))
            here = f"are canonical {list(config.aux_layer_ids)}"
        assumed.append(f"config.json has layer ids in eagle_config alone, as SpecForge: {json.dumps(nested)} {here}")
    return config, assumed


def _refuse_other_shape(config: DraftConfig, facts: TargetFacts, folder: Path) -> None:
    wrong = [
        f"{name} is {there}, the target's is {own}"
        for name, there, own in (
            ("target_hidden_size", config.target_hidden_size, facts.hidden_size),
            ("vocab_size", config.vocab_size, facts.vocab_size),
        )
        if there != own
    ]
    last = facts.num_hidden_layers or 0
    wrong += [f"layer id {id} is not one of {last} layers" for id in config.aux_layer_ids if not 1 <= id <= last]
    if wrong:
        raise CheckpointError(
            "was made for another target: " + "; ".join(wrong), where=str(folder / CONFIG), hint="give its own target"
        )


def _against_manifest(folder: Path, config: DraftConfig, facts: TargetFacts) -> list[str]:
    """What config.json and the target say otherwise than the manifest of the export, where there is one."""
    if not (folder / MANIFEST).exists():
        return []
    manifest = read_mapping(folder / MANIFEST)
    found = []
    trained, read = section(manifest, "draft", folder / MANIFEST), config.to_json()
    for name in read:
        there, own = (json.loads(json.dumps(of.get(name))) for of in (read, trained))
        if name in trained and there != own:
            found.append(f"config.json says {name} {json.dumps(there)}, it was trained with {json.dumps(own)}")
    target = section(manifest, "target", folder / MANIFEST)
    for name in _SAME_TARGET:
        there, own = target.get(name), getattr(facts, name)
        if name in target and there != own:
            found.append(f"it was trained for a target of {name} {json.dumps(there)}, this one has {json.dumps(own)}")
    return found
