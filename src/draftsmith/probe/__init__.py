"""A target's configuration and weight index -> facts and verdicts, before anything costly starts. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths, write_json

if TYPE_CHECKING:
    from draftsmith.probe.checks import Check
    from draftsmith.records import TargetFacts

# What people are shown, in this order; the JSON report has every fact.
SHOWN = (
    "architecture",
    "model_type",
    "text_model_type",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "attention",
    "num_experts",
    "scoring_func",
    "llama_4_scaling",
    "rope_theta",
    "rope_scaling",
    "tie_word_embeddings",
    "dtype",
    "quantization",
    "weight_bytes",
    "weight_files",
    "aux_layer_ids",
)


def examine(
    model: str, *, revision: str | None = None, ssh: str | None = None, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Facts and verdicts on a model, for `draftsmith probe MODEL`.

    Args:
        model: folder, hub id, or `host:/path`.
        ssh: `user@host` that has the folder; nothing is installed there.
        overrides: `probe.gpus=8`, `extract.aux_layer_ids=[2,30,58]` …: settings of a recipe that bear on the verdict.

    Returns:
        `verdict`, `facts`, `missing`, `checks` as JSON values, and `summary` for people.

    Raises:
        TargetNotFoundError, TargetError: the model cannot be read, here or there.
        RequestError: the overrides or layer ids are wrong.
    """
    from draftsmith import recipe as recipes

    tree = {"name": "probe", "target": {"model": model, "revision": revision}}
    recipe = recipes.parse(tree, overrides=overrides)
    return _report(*_judge(recipe, evidence_of(model, revision, ssh), weights_needed=False))


def run(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Write the target's facts where the other stages find them, and judge it.

    Raises:
        TargetNotFoundError, TargetError: the target cannot be read.
        RequestError: `extract.aux_layer_ids` are no ids of this model.
        CheckFailed: the run would die of what was found; the facts are written all the same.
    """
    from draftsmith.errors import CheckFailed
    from draftsmith.probe.hub import read_evidence

    evidence = read_evidence(recipe.target.model, revision=recipe.target.revision)
    facts, checks = _judge(recipe, evidence, weights_needed=True)
    write_json(paths.facts, facts.to_json())
    report = _report(facts, checks)
    failed = [f"{check.name}: {check.detail}" for check in checks if check.status == "fail"]
    if failed:
        hints = [check.hint for check in checks if check.status == "fail" and check.hint]
        raise CheckFailed("\n  ".join(failed), where=facts.path, hint="\n        ".join(hints) or None)
    return report


def foretell(stage: str, recipe: Recipe, paths: RunPaths) -> list[str]:
    """What to know before a stage begins, a line each: samples too long for the target; what extraction takes."""
    names = {"prepare": ("sample length",), "extract": ("store size", "extraction time")}[stage]
    _, checks = _judge(recipe, evidence_of(paths.read_facts().path), weights_needed=False)
    told = [check for check in checks if check.name in names]
    return [f"{check.name}: {check.detail}" + (f"; {check.hint}" if check.hint else "") for check in told]


def evidence_of(model: str, revision: str | None = None, ssh: str | None = None) -> dict[str, Any]:
    """What a model folder, hub id or `host:/path` says about itself.

    Raises:
        TargetNotFoundError, TargetError: it cannot be read, here or there.
    """
    from draftsmith.probe.hub import read_evidence
    from draftsmith.probe.remote import gather_over_ssh, split_remote

    remote = (ssh, model) if ssh else None if Path(model).exists() else split_remote(model)
    return gather_over_ssh(*remote) if remote else read_evidence(model, revision=revision)


def _judge(recipe: Recipe, evidence: dict[str, Any], *, weights_needed: bool) -> tuple[TargetFacts, list[Check]]:
    from draftsmith.layers import validate_layer_ids
    from draftsmith.probe.budget import check_budget
    from draftsmith.probe.checks import check_target
    from draftsmith.probe.engine import check_engine
    from draftsmith.probe.facts import facts_from_evidence

    facts = facts_from_evidence(evidence)
    chosen = recipe.extract.aux_layer_ids
    if chosen is not None and facts.num_hidden_layers is not None:
        facts = replace(facts, aux_layer_ids=validate_layer_ids(chosen, facts.num_hidden_layers))
    trusted = recipe.target.trust_remote_code
    checks = check_target(facts, evidence, weights_needed=weights_needed, code_trusted=trusted)
    if recipe.probe.engine == "vllm":
        checks += check_engine(facts, evidence)
    return facts, checks + check_budget(facts, evidence=evidence, recipe=recipe)


def _report(facts: TargetFacts, checks: list[Check]) -> dict[str, Any]:
    from draftsmith.probe.checks import verdict

    return {
        "verdict": verdict(checks),
        "facts": facts.to_json(),
        "missing": list(facts.missing),
        "checks": [check.to_json() for check in checks],
        "summary": _summary(facts, checks),
    }


def _summary(facts: TargetFacts, checks: list[Check]) -> list[str]:
    """Facts aligned, then the checks; a remedy stands below the check that needs it."""
    from draftsmith.probe.checks import verdict

    lines = [facts.path + (f" at revision {facts.revision}" if facts.revision else "")]
    lines += [f"  {name:<20} {_shown(facts, name)}" for name in SHOWN]
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = check.status.upper() if check.status == "fail" else check.status
        lines.append(f"  {mark:<4}  {check.name:<{width}}  {check.detail}")
        if check.hint and check.status != "ok":
            lines.append(f"  {'':<{width + 8}}hint: {check.hint}")
    counted = [f"{sum(c.status == s for c in checks)} {s}" for s in ("ok", "warn", "fail")]
    return [*lines, f"verdict: {verdict(checks)} ({', '.join(counted)})"]


def _shown(facts: TargetFacts, name: str) -> str:
    from draftsmith.probe.checks import describe_quantization

    value = getattr(facts, name)
    if name in facts.missing:
        return "NOT FOUND"
    if value is None:
        return "none"
    if name == "quantization":
        return describe_quantization(value)
    if name == "weight_bytes":
        return f"{value:,} ({value / 1e9:,.1f} GB)"
    note = " (derived)" if name in facts.derived else ""
    if isinstance(value, dict | bool):
        return json.dumps(value) + note
    return (", ".join(map(str, value)) if isinstance(value, tuple) else f"{value}") + note
