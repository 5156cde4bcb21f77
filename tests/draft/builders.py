"""A draft, a head and batches small enough to check by hand, in float64."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from draftsmith.draft.config import DraftConfig
from draftsmith.draft.model import Draft
from draftsmith.records import Batch
from draftsmith.rundir import hash_file
from draftsmith.target import FinalNorm, TargetHead

TARGET_VOCAB, DRAFT_IDS, HIDDEN, AUX = 23, [0, 2, 3, 5, 7, 11, 13, 17, 22], 8, 3


def make_config(**overrides: object) -> DraftConfig:
    settings: dict[str, object] = {
        "vocab_size": TARGET_VOCAB,
        "draft_vocab_size": len(DRAFT_IDS),
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "aux_layer_ids": (2, 4, 5),
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": True,
    }
    return DraftConfig(**{**settings, **overrides})


def make_head() -> TargetHead:
    torch.manual_seed(1)
    norm = FinalNorm(torch.rand(HIDDEN) + 0.5, None, 1e-5, "rms")
    return TargetHead(torch.randn(TARGET_VOCAB, HIDDEN), norm, torch.randn(TARGET_VOCAB, HIDDEN)).double()


def make_draft(**overrides: object) -> Draft:
    """A draft in float64 whose every weight is far from its initial value."""
    draft = Draft(make_config(**overrides)).double()
    draft.initialise(make_head(), DRAFT_IDS, seed=0)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return draft


def make_batch(lengths: list[int], seed: int = 3) -> Batch:
    torch.manual_seed(seed)
    total = sum(lengths)
    return Batch(
        sample_ids=tuple(f"s{i}" for i in range(len(lengths))),
        input_ids=torch.randint(0, TARGET_VOCAB, (total,)),
        loss_mask=torch.rand(total) < 0.8,
        document=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        position=torch.cat([torch.arange(length) for length in lengths]),
        aux=torch.randn(total, AUX, HIDDEN, dtype=torch.float64),
        last=torch.randn(total, HIDDEN, dtype=torch.float64),
    )


class Recomputed(torch.autograd.Function):
    """A function whose backward pass can run once, for gradcheck, which runs it many times."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx, doutput):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        return None, *torch.autograd.grad(output, inputs, doutput)


def sign(folder: Path) -> None:
    """Enter the digest of weights that were changed on purpose."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    digest = hash_file(folder / "model.safetensors")
    file.write_text(json.dumps({**config, "weights_sha256": digest}), encoding="utf-8")
