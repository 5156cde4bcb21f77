"""The command for a draft that is not of a run: an export that was copied away, or a published draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith import recipe as recipes
from draftsmith.draft.engine_files import CONFIG, MANIFEST, read_mapping, section
from draftsmith.engines import ENGINES
from draftsmith.errors import CheckpointError, RequestError
from draftsmith.recipe import Recipe
from draftsmith.serve import report_of
from draftsmith.serve.draft_tokens import beyond_measured

_GIVE = "give RUN/export/vllm, a published draft's folder, or a recipe"


def serve_folder(folder: Path, overrides: Sequence[str]) -> tuple[Recipe, dict[str, Any]]:
    """The report of `serve` for a draft's folder, and the recipe that it follows: the defaults, and the overrides.

    Target, its dtype, engine and K are those that the folder names, unless the overrides do.

    Raises:
        CheckpointError: it is no draft as an engine takes it.
        RequestError: nobody says which target it was made for, it is in another engine's format, or it cannot be split
            over so many devices.
    """
    if not (folder / CONFIG).exists():
        raise CheckpointError("holds no draft: there is no config.json", where=str(folder), hint=_GIVE)
    config, manifest = (
        read_mapping(folder / CONFIG),
        read_mapping(folder / MANIFEST) if (folder / MANIFEST).exists() else {},
    )
    if "architectures" not in config:
        raise CheckpointError("is not a draft as an engine takes it", where=str(folder), hint=_GIVE)
    speculators = section(config, "speculators_config", folder / CONFIG)
    verifier = section(speculators, "verifier", folder / CONFIG)
    made_for = section(manifest, "target", folder / MANIFEST)
    target = {
        "model": made_for.get("model") or verifier.get("name_or_path"),
        "revision": made_for.get("revision"),
        "dtype": made_for.get("computation_dtype", "auto"),
    }
    if any(override.startswith("target.model=") for override in overrides):
        target["revision"] = None
    elif target["model"] is None:
        raise RequestError(
            "does not say which target it was made for",
            where=str(folder),
            hint=f"draftsmith serve {folder} target.model=FOLDER_OR_HUB_ID",
        )
    tree = {"name": folder.resolve().name, "target": target, "serve": {"engine": manifest.get("format", "vllm")}}
    recipe = recipes.parse(tree, overrides)
    proposals = [proposal.get("speculative_tokens") for proposal in speculators.get("proposal_methods") or []]
    said = (recipe.serve.num_speculative_tokens, manifest.get("num_speculative_tokens"), *proposals)
    draft_tokens = next((k for k in said if k), recipe.num_speculative_tokens)
    layer = section(config, "transformer_layer_config", folder / CONFIG) or config
    heads = layer.get("num_attention_heads")
    engine = ENGINES[recipe.serve.engine]
    if engine.NAME == "sglang" and "transformer_layer_config" in config:
        raise RequestError(
            "is in vLLM's format, of which SGLang would pass over the decoder layer's weights without a word",
            where=str(folder),
            hint="serve.engine=vllm; or export it for SGLang, which export.formats does by itself where it can hold it",
        )
    notes = beyond_measured(draft_tokens, section(manifest, "acceptance", folder / MANIFEST))
    return recipe, report_of(recipe, engine, None, folder, heads, draft_tokens, manifest.get("requires", []), notes)
