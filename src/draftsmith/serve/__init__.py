"""Draft folder + target → the command that serves them, printed or run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import RequestError
from draftsmith.recipe import Recipe
from draftsmith.records import TargetFacts
from draftsmith.rundir import RunPaths

if TYPE_CHECKING:
    from draftsmith.engine_api import Engine


def run(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Print the command of `serve.engine`.

    Raises:
        RequestError: the draft was not exported for this engine, or cannot be split over so many devices.
    """
    from draftsmith.engines import ENGINES, exported_draft
    from draftsmith.serve.draft_tokens import beyond_measured, choose_draft_tokens

    engine = ENGINES[recipe.serve.engine]
    folder = exported_draft(paths, engine, f"serve.engine={engine.NAME}")
    manifest = json.loads((folder / "draftsmith.json").read_text(encoding="utf-8"))
    measured = json.loads(paths.acceptance.read_text(encoding="utf-8")) if paths.acceptance.exists() else {}
    draft_tokens, notes = choose_draft_tokens(recipe, paths)
    notes += beyond_measured(draft_tokens, measured or manifest.get("acceptance") or {})
    heads, requires = manifest["draft"]["num_attention_heads"], manifest["requires"]
    return report_of(recipe, engine, paths.read_facts(), folder, heads, draft_tokens, requires, notes)


def report_of(
    recipe: Recipe,
    engine: Engine,
    facts: TargetFacts | None,
    folder: Path,
    heads: int | None,
    draft_tokens: int,
    requires: list[str],
    notes: list[str],
) -> dict[str, Any]:
    """The command for the draft in `folder`, whose attention has so many heads, and what a person should know of it.

    Raises RequestError if it cannot be split over so many devices.
    """
    devices = recipe.serve.tensor_parallel_size
    if heads is not None and heads % devices:
        raise RequestError(
            f"the draft's {heads} attention heads cannot be split over {devices} devices",
            where="serve.tensor_parallel_size",
            hint="use a divisor of the heads, or train with train.draft.num_attention_heads that it divides",
        )
    arguments = engine.command(recipe, facts, folder, draft_tokens)
    notes = [*notes, *engine.command_notes(arguments)]
    return {
        "engine": engine.NAME,
        "command": shlex.join(arguments),
        "arguments": arguments,
        "num_speculative_tokens": draft_tokens,
        "requires": requires,
        "notes": notes,
        "summary": [shlex.join(arguments), *(f"# needs {need}" for need in requires), *(f"# {note}" for note in notes)],
    }
