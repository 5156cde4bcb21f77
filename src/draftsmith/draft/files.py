"""A draft as a folder: config.json and model.safetensors, without the embedding, which is the target's.

config.json is written last and removed first, so that a folder that has one is complete. It has the SHA-256 of the
weights, so that a damaged file is not taken for a draft.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith.draft.config import DraftConfig
from draftsmith.draft.model import Draft
from draftsmith.errors import CheckpointError, RequestError
from draftsmith.rundir import atomic_path, hash_file, sync_folder, write_json
from draftsmith.target import TargetHead

CONFIG, WEIGHTS, EMBEDDING = "config.json", "model.safetensors", "embed_tokens.weight"
DIGEST = "weights_sha256"
_HINT = (
    "if training wrote it, delete this draft's folder: `draftsmith train RECIPE` then makes it anew from the last "
    "checkpoint, or with --redo from the start"
)


def save_draft(folder: Path, draft: Draft) -> None:
    """Write every tensor but the embedding, in the dtype that it has."""
    write_draft(folder, draft.config, {name: x for name, x in draft.state_dict().items() if name != EMBEDDING})


def write_draft(folder: Path, config: DraftConfig, tensors: dict[str, torch.Tensor]) -> None:
    """`save_draft` for tensors that were taken from a draft."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    sync_folder(folder)
    with atomic_path(folder / WEIGHTS) as aside:
        write_tensors(aside, {name: tensor.contiguous() for name, tensor in tensors.items()})
    write_json(folder / CONFIG, {**config.to_json(), DIGEST: hash_file(folder / WEIGHTS)})


def write_tensors(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """`save_file` with the mode that the umask gives: safetensors leaves files that no other user can read or serve."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata)
    file.chmod(mode)


def load_draft(folder: Path, head: TargetHead) -> Draft:
    """Read what `save_draft` wrote, onto the head's device. The embedding is the head's own memory, frozen.

    Raises:
        CheckpointError: a file is not there or damaged, or a tensor is missing, unknown or does not fit; names it.
    """
    config, digest = _read_config(folder)
    draft = Draft(config)
    tensors = {**_read_tensors(folder, digest), EMBEDDING: head.embedding.detach()}
    _check_fit(draft, tensors, folder)
    draft.load_state_dict(tensors, assign=True)
    return draft.to(head.embedding.device)


def _read_config(folder: Path) -> tuple[DraftConfig, str]:
    """The shape, and the digest of the weights."""
    file = folder / CONFIG
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if "architectures" in data:
            raise CheckpointError(
                "is a draft as an engine takes it, not a checkpoint",
                where=str(folder),
                hint="give the folder that it was exported from, RUN/train/checkpoints/final",
            )
        digest = data.pop(DIGEST)
        return DraftConfig.from_json(data), digest
    except FileNotFoundError as error:
        raise CheckpointError(
            "holds no complete draft: config.json, which is written last, is not there", where=str(folder), hint=_HINT
        ) from error
    except (OSError, ValueError, TypeError, KeyError, RecursionError, RequestError) as error:
        raise CheckpointError(f"is not the configuration of a draft: {error}", where=str(file), hint=_HINT) from error


def _read_tensors(folder: Path, digest: str) -> dict[str, torch.Tensor]:
    file = folder / WEIGHTS
    try:
        if hash_file(file) != digest:
            raise CheckpointError("is not what was written: its checksum differs", where=str(file), hint=_HINT)
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(file), hint=_HINT) from error


def _check_fit(draft: Draft, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    wanted = draft.state_dict()
    problems = [f"{name} is missing" for name in wanted.keys() - tensors.keys()]
    problems += [f"{name} is not part of this draft" for name in tensors.keys() - wanted.keys()]
    for name in wanted.keys() & tensors.keys():
        there, right = tensors[name], wanted[name]
        if there.shape != right.shape:
            problems.append(f"{name} has shape {list(there.shape)}, not {list(right.shape)}")
        elif there.dtype != right.dtype and not (there.is_floating_point() and right.is_floating_point()):
            problems.append(f"{name} is {there.dtype}, not {right.dtype}")
    if problems:
        raise CheckpointError(
            "; ".join(sorted(problems)),
            where=str(folder),
            hint="the draft's config.json, its weights and the target must belong together",
        )
