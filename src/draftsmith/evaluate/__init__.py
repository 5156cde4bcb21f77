"""Checkpoint + target → acceptance: an estimate from recorded states, and lossless speculative decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths


def run(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Measure the trained draft, and the untrained beside it, on held-out conversations.

    Raises:
        CheckFailed: a decoded text is not the target's own greedy text, and rounding does not explain it.
    """
    from draftsmith.evaluate.figures import make_report, refuse_unfaithful, summary_lines
    from draftsmith.evaluate.held_out import decode_prompts, open_held_out, replay_recorded
    from draftsmith.rundir import write_json

    held_out = open_held_out(recipe, paths)
    recorded = replay_recorded(held_out)
    decoded = decode_prompts(held_out) if recipe.evaluate.prompts else {}
    report = make_report(held_out, recorded, decoded)
    write_json(paths.acceptance, report)
    refuse_unfaithful(report)
    return {**report, "summary": summary_lines(report)}


def why(recipe: Recipe, paths: RunPaths, draft: Path | None = None) -> dict[str, Any]:
    """Try other readings of the trained draft, or of the one in a folder, on held-out texts; see `diagnose`.

    The report is kept in evaluate/why.json; `cause` is null where none accepts more than the draft as it is.
    """
    from draftsmith.evaluate.explain import explain
    from draftsmith.rundir import write_json

    report = explain(recipe, paths, draft)
    write_json(paths.stage("evaluate") / "why.json", {k: v for k, v in report.items() if k != "summary"})
    return report
