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
    from draftsmith.engine_commands import sglang_command, vllm_command
    from draftsmith.serve.draft_tokens import choose_draft_tokens

    engine = recipe.serve.engine
    folder = paths.export(engine)
    if not folder.exists():
        raise RequestError(_why_not_exported(paths, engine), where=f"serve.engine={engine}")
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
    arguments = (vllm_command if engine == "vllm" else sglang_command)(recipe, facts, folder, draft_tokens)
    return {
        "engine": engine,
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


def _why_not_exported(paths: RunPaths, engine: str) -> str:
    file = paths.stage_file("export")
    left_out = (
        json.loads(file.read_text(encoding="utf-8")).get("report", {}).get("left_out", {}) if file.exists() else {}
    )
    if engine in left_out:
        return f"{engine} cannot hold this draft: {left_out[engine]}"
    return f"{paths.export(engine)} is not there: export.formats leaves it out"
