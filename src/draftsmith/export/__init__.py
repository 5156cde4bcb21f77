"""Checkpoint → draft folders for vLLM and SGLang, read back and compared with what was trained."""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.draft.files import load_draft
from draftsmith.draft.model import Draft
from draftsmith.export.formats import WEIGHTS, sglang_obstacles, sglang_requirements, write_sglang, write_vllm
from draftsmith.export.manifest import MANIFEST, describe
from draftsmith.export.parity import check_identical, read_sglang, read_vllm
from draftsmith.layers import validate_layer_ids
from draftsmith.recipe import Recipe
from draftsmith.records import TargetFacts
from draftsmith.rundir import RunPaths, atomic_folder, write_json
from draftsmith.target import DTYPES, load_head, read_facts_of_run


def run(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Write `export/vllm` and `export/sglang`, each complete or absent.

    Raises:
        MissingInputError: nothing was trained.
        CheckpointError: a format asked for by name cannot hold the draft, or what was written is not what was trained.
    """
    facts = read_facts_of_run(paths)
    trained = paths.require(paths.checkpoints / "final", "train")
    draft = load_draft(trained, load_head(facts, torch.device("cpu"), DTYPES[recipe.export.dtype]))
    validate_layer_ids(draft.config.aux_layer_ids, facts.num_hidden_layers or 0)
    obstacles = sglang_obstacles(draft.config, facts)
    if recipe.export.formats is None:
        formats = ["vllm"] if obstacles else ["vllm", "sglang"]
        left_out = {"sglang": "; ".join(obstacles)} if obstacles else {}
    else:
        formats, left_out = list(recipe.export.formats), {}
    written = {format: _export(format, recipe, paths, facts, draft) for format in formats}
    return {
        "formats": written,
        "left_out": left_out,
        "aux_layer_ids": list(draft.config.aux_layer_ids),
        "num_speculative_tokens": recipe.num_speculative_tokens,
        "summary": _summary(written, left_out),
    }


def _export(format: str, recipe: Recipe, paths: RunPaths, facts: TargetFacts, draft: Draft) -> dict[str, Any]:
    """Write one format aside, read it back, compare, and only then give it its name."""
    dtype = DTYPES[recipe.export.dtype]
    with atomic_folder(paths.export(format)) as aside:
        if format == "vllm":
            verifier, draft_tokens = recipe.target.name_for_engines, recipe.num_speculative_tokens
            shipped, requires = write_vllm(aside, draft, dtype, verifier, facts, draft_tokens), []
            read = read_vllm(aside)
        else:
            shipped, requires = write_sglang(aside, draft, dtype, facts), sglang_requirements(draft.config)
            read = read_sglang(aside)
        check_identical(read, draft.config, shipped, aside)
        write_json(aside / MANIFEST, describe(format, recipe, paths, facts, draft, sorted(shipped), requires))
    return {
        "folder": str(paths.export(format).relative_to(paths.root)),  # a run may be moved
        "tensors": len(shipped),
        "bytes": (paths.export(format) / WEIGHTS).stat().st_size,
        "dtype": recipe.export.dtype,
        "requires": requires,
    }


def _summary(written: dict[str, dict[str, Any]], left_out: dict[str, str]) -> list[str]:
    lines = []
    for format, facts in written.items():
        size = f"{facts['tensors']} tensors, {facts['bytes'] / 1e6:.1f} MB {facts['dtype']}"
        lines.append(f"{format}: {facts['folder']} of the run, {size}; read back, and bit for bit what was trained")
        lines += [f"  needs {need}" for need in facts["requires"]]
    return lines + [f"{format}: left out, for it cannot hold this draft: {why}" for format, why in left_out.items()]
