"""Checkpoints that are complete or absent.

checkpoints/initial/            the draft before training
checkpoints/step-00000500/      draft, optimizer.safetensors, state.json: all that resuming needs
checkpoints/final/              the trained draft
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith.draft.files import load_draft, save_draft
from draftsmith.draft.model import Draft
from draftsmith.errors import CheckpointError
from draftsmith.rundir import atomic_folder, write_json
from draftsmith.target import TargetHead


def save_checkpoint(folder: Path, step: int, draft: Draft, optimizer: torch.optim.Optimizer, keep: int) -> None:
    """Write the checkpoint after optimizer step `step`, then delete all but the newest `keep`."""
    with atomic_folder(folder / f"step-{step:08d}") as aside:
        save_draft(aside, draft)
        save_file(_optimizer_tensors(draft, optimizer), aside / "optimizer.safetensors")
        write_json(aside / "state.json", {"step": step})
    for old in checkpoints_in(folder)[:-keep]:
        shutil.rmtree(old)


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("step-????????"))


def load_checkpoint(folder: Path, draft: Draft, head: TargetHead, optimizer: torch.optim.Optimizer) -> int:
    """Put a checkpoint's weights and moments in place and return the number of steps done.

    Raises:
        CheckpointError: a file is missing or damaged, or does not fit the draft.
    """
    draft.load_state_dict(load_draft(folder, head).state_dict())
    try:
        tensors = load_file(folder / "optimizer.safetensors")
        step = int(json.loads((folder / "state.json").read_text(encoding="utf-8"))["step"])
        for name, parameter in _trained(draft):
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step), device=parameter.device),
                "exp_avg": tensors[f"{name}.exp_avg"].to(parameter.device),
                "exp_avg_sq": tensors[f"{name}.exp_avg_sq"].to(parameter.device),
            }
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"is damaged: {error!r}", where=str(folder), hint="delete this folder to resume from the one before"
        ) from error
    return step


def _trained(draft: Draft) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in draft.named_parameters() if p.requires_grad]


def _optimizer_tensors(draft: Draft, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment].contiguous()
        for name, parameter in _trained(draft)
        for moment in ("exp_avg", "exp_avg_sq")
    }
