"""What the command lines of both engines have in common."""

from __future__ import annotations

from typing import Any

from draftsmith.recipe import Recipe
from draftsmith.records import TargetFacts


def target_flags(recipe: Recipe, facts: TargetFacts | None) -> list[str]:
    """What both engines call alike. The revision is the one that was probed; a local folder has none."""
    revision = facts.revision if facts else recipe.target.revision
    flags = ["--revision", revision] if revision else []
    if recipe.target.dtype != "auto":
        flags += ["--dtype", recipe.target.dtype]
    if recipe.target.trust_remote_code:
        flags += ["--trust-remote-code"]
    return flags


def port_args(recipe: Recipe) -> dict[str, Any]:
    return {"port": recipe.serve.port} if recipe.serve.port is not None else {}


def flag(name: str) -> str:
    """`max_model_len` as `--max-model-len`."""
    return f"--{name.replace('_', '-')}"
