"""The engine's command line for a target with its draft.

The method is always said: vLLM would otherwise guess it from the draft's path (vLLM `config/speculative.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

from draftsmith.recipe import Recipe
from draftsmith.records import TargetFacts


def vllm_command(recipe: Recipe, facts: TargetFacts, draft: Path) -> list[str]:
    """`vllm serve` with the draft, as arguments."""
    speculative = {
        "method": "eagle3",
        "model": str(draft.resolve()),
        "num_speculative_tokens": recipe.num_speculative_tokens,
    }
    arguments = ["vllm", "serve", recipe.target.name_for_engines, *_target_flags(recipe, facts)]
    if recipe.serve.tensor_parallel_size > 1:
        arguments += ["--tensor-parallel-size", str(recipe.serve.tensor_parallel_size)]
    return [*arguments, "--speculative-config", json.dumps(speculative)]


def sglang_command(recipe: Recipe, facts: TargetFacts, draft: Path) -> list[str]:
    """`sglang.launch_server` with the draft, as arguments: a chain, as in vLLM, of one token more than is drafted."""
    arguments = ["python", "-m", "sglang.launch_server", "--model-path", recipe.target.name_for_engines]
    arguments += _target_flags(recipe, facts)
    if recipe.serve.tensor_parallel_size > 1:
        arguments += ["--tp-size", str(recipe.serve.tensor_parallel_size)]
    arguments += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft.resolve())]
    arguments += ["--speculative-num-steps", str(recipe.num_speculative_tokens), "--speculative-eagle-topk", "1"]
    return [*arguments, "--speculative-num-draft-tokens", str(recipe.num_speculative_tokens + 1)]


def _target_flags(recipe: Recipe, facts: TargetFacts) -> list[str]:
    """What both engines call alike. The revision is the one that was probed; a local folder has none."""
    flags = ["--revision", facts.revision] if facts.revision else []
    if recipe.target.dtype != "auto":
        flags += ["--dtype", recipe.target.dtype]
    if recipe.target.trust_remote_code:
        flags += ["--trust-remote-code"]
    return flags
