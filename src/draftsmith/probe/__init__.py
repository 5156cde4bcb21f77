"""A target's configuration and weight index -> facts and verdicts, before anything costly starts. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths, write_json


def run(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Write the target's facts where the other stages find them.

    Raises:
        TargetError: the target cannot be read.
        RequestError: `extract.aux_layer_ids` are no ids of this model.
    """
    from draftsmith.layers import default_aux_layer_ids, validate_layer_ids
    from draftsmith.probe.facts import read_facts

    facts = read_facts(recipe.target.model, revision=recipe.target.revision)
    layers = facts.num_hidden_layers or 0
    chosen = recipe.extract.aux_layer_ids
    ids = validate_layer_ids(chosen, layers) if chosen is not None else default_aux_layer_ids(layers)
    facts = replace(facts, aux_layer_ids=ids)
    write_json(paths.facts, facts.to_json())
    return {"facts": facts.to_json(), "missing": list(facts.missing), "checks": [], "summary": []}
