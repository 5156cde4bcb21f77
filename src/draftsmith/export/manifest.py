"""What travels with an exported draft: what it was made for, from what, and what its numbers mean."""

from __future__ import annotations

import json
from typing import Any

from draftsmith import __version__
from draftsmith.draft.model import Draft
from draftsmith.export.formats import EMBEDDING
from draftsmith.recipe import Recipe
from draftsmith.records import TargetFacts
from draftsmith.rundir import RunPaths

MANIFEST = "draftsmith.json"
CONVENTION = (
    "canonical: id a is the residual stream after a decoder layers, before any norm, as in vLLM and speculators; "
    "SGLang and SpecForge write a - 1"
)
_HASHES = ("config_sha256", "weights_sha256", "tokenizer_sha256", "template_sha256")
_TARGET = ("revision", "architecture", "dtype", "quantization", *_HASHES)


def describe(
    format: str,
    recipe: Recipe,
    paths: RunPaths,
    facts: TargetFacts,
    draft: Draft,
    shipped: list[str],
    requires: list[str],
) -> dict[str, Any]:
    """The manifest of one folder. Tensors go by our names, which are vLLM's.

    Args:
        shipped: names of the tensors in the folder.
        requires: what the engine must have beside EAGLE-3.
    """
    trained = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    return {
        "draftsmith": __version__,
        "format": format,
        "requires": requires,
        "target": {"model": recipe.target.name_for_engines, "computation_dtype": recipe.target.dtype}
        | {name: getattr(facts, name) for name in _TARGET},
        "draft": draft.config.to_json(),
        "aux_layer_ids": {"ids": list(draft.config.aux_layer_ids), "convention": CONVENTION},
        "tensors": {
            "trained": [name for name in shipped if name in trained],
            "frozen": [name for name in shipped if name not in trained],
            "of_the_target": [] if EMBEDDING in shipped else [EMBEDDING],
        },
        "dtype": recipe.export.dtype,
        "num_speculative_tokens": recipe.num_speculative_tokens,
        "acceptance": _acceptance(paths),
    }


def _acceptance(paths: RunPaths) -> Any:
    """What `evaluate` measured, if it measured the draft that is exported."""
    ours, evaluated = (paths.stage_file(stage) for stage in ("export", "evaluate"))
    if not (ours.exists() and evaluated.exists() and paths.acceptance.exists()):
        return None
    states = [json.loads(file.read_text(encoding="utf-8")) for file in (ours, evaluated)]
    trained = [state["fingerprint"]["inputs"]["train"] for state in states]
    if states[1]["status"] != "done" or trained[0] != trained[1]:
        return None
    return json.loads(paths.acceptance.read_text(encoding="utf-8"))
