"""The recipe of a run, from what its stages put on record, so that every figure can be had again by a command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from draftsmith.recipe import Recipe
from draftsmith.report.record import SHOWN, RunRecord

HEADER = """\
# The settings that the results of this run depend on, as its stages have them on record. Devices, batch sizes and other
# settings that cannot change a result are the defaults here. Relative paths are taken from the folder that the run was
# started in.
"""


def recorded_recipe(run: RunRecord) -> dict[str, Any] | None:
    """The settings of all stages that were begun; None if none was."""
    tree: dict[str, Any] = {"name": _name(run.root), "run_dir": str(run.root.resolve())}
    sections: dict[str, Any] = {}
    for stage in SHOWN:
        sections |= {name: value for name, value in run.stages[stage].settings.items() if name in Recipe.model_fields}
    if "target" not in sections:
        return None
    aux_layer_ids = run.stages["probe"].settings.get("extract.aux_layer_ids")
    if aux_layer_ids is not None:
        sections.setdefault("extract", {"aux_layer_ids": aux_layer_ids})
    return tree | {name: sections[name] for name in Recipe.model_fields if sections.get(name) not in (None, {})}


def as_yaml(tree: dict[str, Any]) -> str:
    return HEADER + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def command(stage: str, recipe: Path | None, *more: str) -> str:
    """What to type; RECIPE stands for a recipe that is not on record."""
    return shlex.join(["draftsmith", stage, str(recipe) if recipe else "RECIPE", *more])


def _name(root: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", root.resolve().name).lstrip("._-")
    return name or "run"
