"""`draftsmith rehearse`: the whole way of a run on a scale model of its target, in about a minute. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECIPES = (".yaml", ".yml")


def rehearse(
    model: str,
    *,
    overrides: Sequence[str] = (),
    revision: str | None = None,
    ssh: str | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Build a scale model of a target and take it through capture, training, export and the serving engine.

    Args:
        model: folder, hub id, `host:/path`, or a recipe file, whose settings are then used.
        overrides: settings of a recipe; without a recipe, `extract.engine` is vllm.
        ssh: `user@host` that has the folder; nothing is installed there.
        folder: where the rehearsal is kept; replaced if it is an earlier one. None: `rehearsal` in the run's folder.

    Returns:
        `verdict`, `checks` and `seconds` as JSON values, and `summary` for people.

    Raises:
        TargetNotFoundError, TargetError: the configuration cannot be read, or no scale model of it can be built.
        RequestError: the settings are wrong, or the engine that they ask for is not installed.
    """
    from draftsmith import recipe as recipes
    from draftsmith.probe import evidence_of
    from draftsmith.probe.facts import facts_from_evidence
    from draftsmith.rehearse.rehearsal import Rehearsal

    if model.endswith(RECIPES):
        recipe = recipes.load(model, list(overrides))
        model, revision = recipe.target.model, recipe.target.revision
    else:
        tree = {"name": "rehearsal", "target": {"model": model, "revision": revision}, "extract": {"engine": "vllm"}}
        recipe = recipes.parse(tree, overrides)
    evidence = evidence_of(model, revision, ssh)
    facts_from_evidence(evidence)  # before a folder is made for it
    return Rehearsal(recipe, evidence, folder or recipe.folder / "rehearsal").run()
