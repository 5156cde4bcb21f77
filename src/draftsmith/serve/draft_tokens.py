"""How many draft tokens a round should have."""

from __future__ import annotations

import json
from typing import Any

from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths, digest_draft


def beyond_measured(draft_tokens: int, acceptance: dict[str, Any]) -> list[str]:
    """What a person should know of so many draft tokens, given what `evaluate` found."""
    measured = acceptance.get("num_speculative_tokens")
    if not isinstance(measured, int) or draft_tokens <= measured:
        return []
    return [
        f"K = {draft_tokens} is more than the {measured} that `evaluate` measured: what the rest brings is not known"
    ]


def choose_draft_tokens(recipe: Recipe, paths: RunPaths) -> tuple[int, list[str]]:
    """K as said, else the fastest, measured or forecast, at the concurrency nearest to serving's, else as evaluated.

    Returns:
        K, and what a person should know of the choice.
    """
    if recipe.serve.num_speculative_tokens is not None:
        return recipe.serve.num_speculative_tokens, []
    evaluated = recipe.evaluate.num_speculative_tokens
    best, note = _forecast_of_this_draft(recipe, paths)
    if not best:
        return evaluated, note
    wanted = recipe.serve.concurrency
    nearest = min(best, key=lambda measured: (abs(int(measured) - wanted), int(measured)))
    chosen = best[nearest]
    if chosen is None:
        return evaluated, [f"no K is faster than the target alone, measured or forecast, {nearest} at once"]
    k, speedup = chosen["num_speculative_tokens"], chosen["speedup"]
    how = "as measured" if chosen.get("measured") else "by the forecast"  # earlier versions chose by forecasts alone
    return k, [f"K = {k} is the fastest {how}, {nearest} at once: {speedup:.2f} times the target alone"]


def _forecast_of_this_draft(recipe: Recipe, paths: RunPaths) -> tuple[dict[str, Any], list[str]]:
    """By concurrency; empty if there is none, or only one of another draft or engine, of which a person is told."""
    if not paths.served.exists():
        return {}, []
    served, wanted = json.loads(paths.served.read_text(encoding="utf-8")), recipe.serve.engine
    engine = served.get("engine", "vllm")  # an earlier version knew no other
    if engine != wanted:
        return {}, [f"the forecast is of {engine}: evaluate.served.engine={wanted} makes one of {wanted}"]
    folder = paths.export(engine)
    if not folder.exists() or served["draft_sha256"] != digest_draft(folder):
        return {}, []
    return served["forecast"]["best"], []
