"""Verdicts on the installed vLLM: does it know the architecture, and how does its model take and give states."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from packaging.requirements import Requirement

from draftsmith.probe.checks import Check
from draftsmith.probe.engine_source import inspect_engine
from draftsmith.records import TargetFacts

WITHOUT_ENGINE = "set probe.engine=transformers to go on without vLLM, with extract.engine=transformers"
COMPARE = "compare a few samples with extract.engine=transformers before extracting with vLLM"


def check_engine(facts: TargetFacts, evidence: dict[str, Any] | None = None) -> list[Check]:
    """Verdicts on capturing the target's states with vLLM and serving a draft for it there.

    Args:
        evidence: of another machine, whose `engine` is used; this machine's engine is inspected otherwise.
    """
    if evidence and "engine" in evidence:
        found = evidence["engine"]
    else:
        found = inspect_engine(facts.architecture, facts.text_model_type)
    wanted = supported_range()
    install = f"pip install 'draftsmith[vllm]' brings {wanted or 'it'}"
    if found is None:
        return [Check("engine", "warn", "no vLLM is installed; extraction with transformers needs none", install)]
    name = f"{found['distribution']} {found['version']}"
    checks = [_check_version(name, found, wanted, install), _check_architecture(name, facts, found)]
    if found["registered"]:
        checks += [_check_layers(found), _check_embedding(found), _check_eagle3(name, found)]
    return checks


def supported_range() -> Requirement | None:
    """The vLLM that the extra `vllm` asks for, by this package's metadata; None of a copy that is not installed."""
    try:
        lines = importlib.metadata.requires("draftsmith") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == "vllm":
            requirement.marker = None
            return requirement
    raise AssertionError("draftsmith's metadata has no extra for vllm")


def _check_version(name: str, found: dict[str, Any], wanted: Requirement | None, install: str) -> Check:
    """Extraction asks for a speculative method that came with 0.18 and that forks may lack (pitfall 71)."""
    version = found["version"]
    if wanted and version != "unknown" and not wanted.specifier.contains(version, prereleases=True):
        return Check("engine", "fail", f"{name} is installed and {wanted} is needed", f"{install}; or {WITHOUT_ENGINE}")
    if not found["extract_hidden_states"]:
        detail = f"{name} has no speculative method extract_hidden_states, which extraction with vLLM uses"
        return Check("engine", "fail", detail, f"{install}; or {WITHOUT_ENGINE}")
    runners = found["layer_id_runners"]
    if not runners:
        detail = f"{name}: no model runner was found to read layer ids from the root of a draft's configuration"
        return Check("engine", "warn", detail, "compare the acceptance that serving reports with the offline estimate")
    detail = f"{name}; captures by extract_hidden_states, reads layer ids in model runner {'/'.join(runners)}"
    return Check("engine", "ok", detail)


def _check_architecture(name: str, facts: TargetFacts, found: dict[str, Any]) -> Check:
    """An architecture that the registry lacks may still run through transformers, which only starting it tells."""
    asked = facts.architecture
    if found["registered"] is None:
        detail = f"serving support not known: the registry of {name} has a form that is not understood here"
        return Check("engine architecture", "warn", detail, "serve the target once before training a draft")
    if not found["registered"]:
        until = found["supported_until"]
        detail = f"serving support not known: {asked} is not in the registry of {name}"
        if until:
            detail += f", which dropped it after {until}"
        hint = "vLLM may run it with the model code of transformers; serve the target once before training a draft"
        return Check("engine architecture", "warn", detail, hint)
    if found["transformers_backend"]:
        detail = f"{asked} runs through the model code of transformers ({found['class']})"
    elif found["text_class"] not in (None, found["class"]):
        detail = f"{asked} runs as {found['class']} around {found['text_class']}"
    else:
        detail = f"{asked} runs as {found['class']}"
    return Check("engine architecture", "ok", detail)


def _check_layers(found: dict[str, Any]) -> Check:
    layers = [layer for layer in found["decoder_layers"] if layer["signature"]]
    called = "; ".join(f"{layer['class']}.forward{layer['signature']}" for layer in layers)
    if found["transformers_backend"]:
        return Check("engine decoder layer", "ok", "transformers' own; states are captured by hooks on its layers")
    if not layers:
        detail = f"which decoder layer {found['class']} builds could not be read from its source"
        return Check("engine decoder layer", "warn", detail, COMPARE)
    strange = [layer["class"] for layer in layers if "hidden_states" not in layer["parameters"]]
    if strange:
        detail = f"{', '.join(strange)} has no parameter hidden_states: {called}"
        return Check("engine decoder layer", "warn", detail, COMPARE)
    return Check("engine decoder layer", "ok", called)


def _check_embedding(found: dict[str, Any]) -> Check:
    method = found["embedding_method"]
    if method is None:
        detail = f"{found['class']} has neither embed_input_ids nor get_input_embeddings"
        return Check(
            "engine embedding lookup", "warn", detail, "a draft that shares the target's embedding may not load"
        )
    return Check("engine embedding lookup", "ok", method)


def _check_eagle3(name: str, found: dict[str, Any]) -> Check:
    support = found["supports_eagle3"]
    if support is None:
        detail = f"{found['class']} declares it for its text model, which its configuration chooses and was not found"
        return Check("engine EAGLE-3", "warn", detail, "serve the target once with any EAGLE-3 draft before training")
    if not support:
        detail = (
            f"{found['class']} of {name} hands out no auxiliary hidden states, so that no EAGLE-3 draft can be served"
        )
        hint = f"look for a newer vLLM, or serve with SGLang; {WITHOUT_ENGINE}"
        return Check("engine EAGLE-3", "fail", detail, hint)
    return Check("engine EAGLE-3", "ok", f"{found['class']} hands out auxiliary hidden states")
