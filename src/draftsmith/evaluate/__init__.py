"""Checkpoint + target → acceptance: an estimate from recorded states, and lossless speculative decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths


def run(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Measure the trained draft, and the untrained beside it, on held-out conversations; in serving too, if wanted.

    Raises:
        CheckFailed: a decoded text is not the target's own greedy text, and rounding does not explain it; or sampled
            texts are not spread as the target's own would be.
        EngineError: an engine to be measured did not come up or broke off.
        RequestError: more draft tokens are to be served than acceptance is measured with.
    """
    from draftsmith.evaluate import served_figures
    from draftsmith.evaluate.figures import refuse_unfaithful, summary_lines

    if recipe.evaluate.served.enabled:
        served_figures.refuse_more_than_evaluated(recipe)
    report = _offline(recipe, paths)
    refuse_unfaithful(report)
    summary = summary_lines(report)
    if recipe.evaluate.served.enabled:
        from draftsmith.engines import name_of
        from draftsmith.evaluate.served import measure_served

        served = measure_served(recipe, paths, report)
        served_figures.refuse_other_texts(served)
        report = {**report, **served, "prompt_sets": report["prompt_sets"] + served["prompt_sets"]}
        summary += [f"{'':<9} in {name_of(served)}:", *served_figures.summary_lines(served)]
    return {**report, "summary": summary}


def _offline(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Everything but serving. The target is let go of at the end, for the engines need its memory."""
    from draftsmith.evaluate.figures import make_report
    from draftsmith.evaluate.held_out import decode_prompts, open_held_out, open_target, release_memory, replay_recorded
    from draftsmith.evaluate.sampled import read_recorded, sample_prompts
    from draftsmith.rundir import write_json

    if recipe.evaluate.served.enabled and paths.acceptance.exists():  # of the same settings, or it would be stale
        return json.loads(paths.acceptance.read_text(encoding="utf-8"))
    held_out = open_held_out(recipe, paths)
    recorded = replay_recorded(held_out)
    target = open_target(held_out, held_out.store.manifest.aux_layer_ids) if recipe.evaluate.prompts else None
    decoded = decode_prompts(held_out, target) if target else {}
    sampled = sample_prompts(held_out, target) if target and recipe.evaluate.temperature else {}
    at_temperature = read_recorded(held_out) if recipe.evaluate.temperature else {}
    report = make_report(held_out, recorded, decoded, sampled, at_temperature)
    write_json(paths.acceptance, report)
    del held_out, target
    release_memory()
    return report


def why(recipe: Recipe, paths: RunPaths, draft: Path | None = None) -> dict[str, Any]:
    """Try other readings of the trained draft, or of the one in a folder, on held-out texts; see `diagnose`.

    The report is kept in evaluate/why.json; `cause` is null where none accepts more than the draft as it is.
    """
    from draftsmith.evaluate.explain import explain
    from draftsmith.rundir import write_json

    report = explain(recipe, paths, draft)
    write_json(paths.stage("evaluate") / "why.json", {k: v for k, v in report.items() if k != "summary"})
    return report
