"""A draft whose every norm flag and width can be chosen, and the folders it is exported to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftsmith.draft.model import Draft
from draftsmith.export.formats import CONFIG, WEIGHTS, write_sglang, write_vllm
from draftsmith.probe.facts import read_facts
from draftsmith.records import TargetFacts
from tests.draft.builders import DRAFT_IDS, make_config

PLAIN = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
VERIFIER, K = "someone/some-model", 4


def make_facts(tiny_target: Path, **overrides: Any) -> TargetFacts:
    return replace(read_facts(str(tiny_target)), **overrides)


def make_draft(**overrides: object) -> Draft:
    """A float32 draft with random weights, its vocabulary map set; ready for any width or number of states."""
    config = make_config(**overrides)
    torch.manual_seed(5)
    draft = Draft(config)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        if draft.has_vocab_map:
            ids = torch.tensor(DRAFT_IDS)
            draft.d2t.copy_(ids - torch.arange(len(ids)))
            draft.t2d[ids] = True
    return draft


def export_vllm(folder: Path, draft: Draft, facts: TargetFacts, dtype: torch.dtype = torch.bfloat16) -> Path:
    write_vllm(folder, draft, dtype, VERIFIER, facts, K)
    return folder


def export_sglang(folder: Path, draft: Draft, facts: TargetFacts, dtype: torch.dtype = torch.bfloat16) -> Path:
    write_sglang(folder, draft, dtype, facts)
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CONFIG).read_text(encoding="utf-8"))


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = read_config(folder)
    change(config)
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
