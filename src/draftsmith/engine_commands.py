"""The engine's command line for a target, with its draft or without.

The method is always said: vLLM would otherwise guess it from the draft's path (vLLM `config/speculative.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.recipe import Recipe
from draftsmith.records import TargetFacts


def vllm_command(
    recipe: Recipe, facts: TargetFacts, draft: Path | None, num_speculative_tokens: int, **engine_args: Any
) -> list[str]:
    """`vllm serve` as arguments.

    Args:
        draft: its folder; None: the target alone.
        engine_args: as `serve.engine_args`, which they replace.
    """
    arguments = ["vllm", "serve", recipe.target.name_for_engines, *_target_flags(recipe, facts)]
    if recipe.serve.tensor_parallel_size > 1:
        arguments += ["--tensor-parallel-size", str(recipe.serve.tensor_parallel_size)]
    arguments += _flags(recipe, engine_args)
    if draft is None:
        return arguments
    speculative = {
        "method": "eagle3",
        "model": str(draft.resolve()),
        "num_speculative_tokens": num_speculative_tokens,
    }
    return [*arguments, "--speculative-config", json.dumps(speculative)]


def sglang_command(recipe: Recipe, facts: TargetFacts, draft: Path, num_speculative_tokens: int) -> list[str]:
    """`sglang.launch_server` with the draft, as arguments: a chain, as in vLLM, of one token more than is drafted."""
    arguments = ["python", "-m", "sglang.launch_server", "--model-path", recipe.target.name_for_engines]
    arguments += _target_flags(recipe, facts)
    if recipe.serve.tensor_parallel_size > 1:
        arguments += ["--tp-size", str(recipe.serve.tensor_parallel_size)]
    arguments += _flags(recipe, {})
    arguments += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft.resolve())]
    arguments += ["--speculative-num-steps", str(num_speculative_tokens), "--speculative-eagle-topk", "1"]
    return [*arguments, "--speculative-num-draft-tokens", str(num_speculative_tokens + 1)]


def _target_flags(recipe: Recipe, facts: TargetFacts) -> list[str]:
    """What both engines call alike. The revision is the one that was probed; a local folder has none."""
    flags = ["--revision", facts.revision] if facts.revision else []
    if recipe.target.dtype != "auto":
        flags += ["--dtype", recipe.target.dtype]
    if recipe.target.trust_remote_code:
        flags += ["--trust-remote-code"]
    return flags


def _flags(recipe: Recipe, engine_args: dict[str, Any]) -> list[str]:
    """`max_model_len: 4096` as `--max-model-len 4096`; true and false as `--name` and `--no-name`."""
    port = {"port": recipe.serve.port} if recipe.serve.port is not None else {}
    flags = []
    for name, value in {**recipe.serve.engine_args, **port, **engine_args}.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif value is not None:
            flags += [f"--{dashed}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags
