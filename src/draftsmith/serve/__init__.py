"""Draft folder + target → the command that serves them, printed or run."""

from __future__ import annotations

import json
import shlex
from typing import Any

from draftsmith.errors import RequestError
from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths


def run(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Print the command of `serve.engine`.

    Raises:
        RequestError: the draft was not exported for this engine, or cannot be split over so many devices.
    """
    from draftsmith.engines import ENGINES, exported_draft
    from draftsmith.serve.draft_tokens import choose_draft_tokens

    engine = ENGINES[recipe.serve.engine]
    folder = exported_draft(paths, engine, f"serve.engine={engine.NAME}")
    manifest = json.loads((folder / "draftsmith.json").read_text(encoding="utf-8"))
    heads, devices = manifest["draft"]["num_attention_heads"], recipe.serve.tensor_parallel_size
    if heads % devices:
        raise RequestError(
            f"the draft's {heads} attention heads cannot be split over {devices} devices",
            where="serve.tensor_parallel_size",
            hint="use a divisor of the heads, or train with train.draft.num_attention_heads that it divides",
        )
    facts = paths.read_facts()
    draft_tokens, notes = choose_draft_tokens(recipe, paths)
    arguments = engine.command(recipe, facts, folder, draft_tokens)
    notes += engine.command_notes(arguments)
    return {
        "engine": engine.NAME,
        "command": shlex.join(arguments),
        "arguments": arguments,
        "num_speculative_tokens": draft_tokens,
        "requires": manifest["requires"],
        "notes": notes,
        "summary": [
            shlex.join(arguments),
            *(f"# needs {need}" for need in manifest["requires"]),
            *(f"# {note}" for note in notes),
        ],
    }
