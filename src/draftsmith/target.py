"""The target model, as far as several stages need it: tokenizer, frozen model, and the dense head on its own.

`TargetHead` reads three tensors from the weight files, so that a trainer never loads a target of half a terabyte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from draftsmith import recipe
from draftsmith.errors import TargetError
from draftsmith.records import TargetFacts
from draftsmith.rundir import RunPaths

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Final norms that are not x / rms(x) * weight, by text model type (transformers `models/*/modeling_*.py`).
_NORM_PLUS_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_LAYER_NORM = ("gpt2", "phi", "cohere", "cohere2")


def read_facts_of_run(paths: RunPaths) -> TargetFacts:
    """The facts that the probe left in the run."""
    return TargetFacts.from_json(json.loads(paths.require(paths.facts, "probe").read_text(encoding="utf-8")))


def pick_device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def pick_dtype(wanted: str, facts: TargetFacts, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own dtype on an accelerator, and float32 on a CPU, where it is the fastest."""
    if wanted != "auto":
        return DTYPES[wanted]
    return torch.float32 if device.type == "cpu" else DTYPES.get(facts.dtype or "", torch.bfloat16)


def load_tokenizer(facts: TargetFacts, target: recipe.Target) -> Any:
    """The target's tokenizer. Raises TargetError if the folder has none that can be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(facts.path, trust_remote_code=target.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TargetError(
            f"its tokenizer cannot be loaded: {error}",
            where=facts.path,
            hint="the folder needs tokenizer.json or the model's own tokenizer files; a tokenizer that is Python code "
            "of the model's needs target.trust_remote_code=true",
        ) from error


def load_target(facts: TargetFacts, target: recipe.Target, device: torch.device, dtype: torch.dtype) -> Any:
    """The whole target through transformers, frozen and in evaluation mode. Raises TargetError if it will not load."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            facts.path, dtype=dtype, trust_remote_code=target.trust_remote_code, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise TargetError(f"transformers cannot load it: {error}", where=facts.path) from error
    return model.to(device).eval().requires_grad_(False)


def decoder_layers(model: nn.Module, facts: TargetFacts) -> nn.ModuleList:
    """The text model's decoder layers: the one list of `num_hidden_layers` blocks that hold attention or a mixer."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == facts.num_hidden_layers
        and not any(part in name for part in ("vision", "visual", "audio", "experts", "mtp"))
    ]
    if not found:
        raise TargetError(f"no list of {facts.num_hidden_layers} decoder layers in {type(model).__name__}")
    return min(found, key=lambda pair: pair[0].count("."))[1]


class FinalNorm(nn.Module):
    """The target's norm before its head, in float32 inside as every target does it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False) if bias is not None else None
        self.eps, self.kind = eps, kind

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """[..., Ht] → [..., Ht]"""
        wide = state.float()
        if self.kind == "layer_norm":
            bias = self.bias.float() if self.bias is not None else None
            normed = nn.functional.layer_norm(wide, wide.shape[-1:], self.weight.float(), bias, self.eps)
            return normed.to(state.dtype)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.kind == "rms_plus_one":
            return (normed * (1.0 + self.weight.float())).to(state.dtype)
        return self.weight * normed.to(state.dtype)


class TargetHead(nn.Module):
    """Embedding, final norm and lm_head of the target, frozen: all that training needs of it."""

    def __init__(
        self,
        embedding: torch.Tensor,
        norm: FinalNorm,
        lm_head: torch.Tensor,
        logit_scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding, requires_grad=False)  # [Vt, Ht]
        self.norm = norm
        self.lm_head = nn.Parameter(lm_head, requires_grad=False)  # [Vt, Ht]
        self.logit_scale, self.softcap = logit_scale, softcap

    def logits(self, last: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the target from its state before the final norm.

        Args:
            last: [..., Ht], canonical id N.
            rows: token ids to compute, [R] int64; all if None.

        Returns:
            [..., R or Vt], in the dtype of `last`.
        """
        weight = self.lm_head if rows is None else self.lm_head[rows]
        logits = nn.functional.linear(self.norm(last), weight) * self.logit_scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def load_head(facts: TargetFacts, device: torch.device, dtype: torch.dtype) -> TargetHead:
    """Read embedding, final norm and lm_head from the target's weight files.

    Raises:
        TargetError: a tensor is not there or not dense; names it.
    """
    config = json.loads((Path(facts.path) / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    kind = facts.text_model_type or facts.model_type or ""
    norm_kind = "layer_norm" if kind in _LAYER_NORM else "rms_plus_one" if kind in _NORM_PLUS_ONE else "rms"

    def read(key: str | None, what: str) -> torch.Tensor:
        if key is None:
            raise TargetError(f"has no dense {what} that the probe could find", where=facts.path)
        return read_tensor(Path(facts.path), key).to(device=device, dtype=dtype)

    embedding = read(facts.embedding_key, "embedding")
    tied = facts.lm_head_key == facts.embedding_key
    bias_key = (facts.final_norm_key or "").removesuffix("weight") + "bias"
    bias = read(bias_key, "final norm's bias") if norm_kind == "layer_norm" and kind != "cohere" else None
    return TargetHead(
        embedding=embedding,
        norm=FinalNorm(
            read(facts.final_norm_key, "final norm"),
            bias,
            text.get("layer_norm_epsilon") or facts.rms_norm_eps or 1e-6,
            norm_kind,
        ),
        lm_head=embedding if tied else read(facts.lm_head_key, "lm_head"),
        logit_scale=1.0 / text["logits_scaling"] if text.get("logits_scaling") else text.get("logit_scale") or 1.0,
        softcap=text.get("final_logit_softcapping"),
    )


def read_tensor(folder: Path, key: str) -> torch.Tensor:
    """One tensor of a safetensors checkpoint, sharded or not."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / weight_map[key]] if key in weight_map else []
    else:
        files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            if key in tensors.keys():  # noqa: SIM118 - not a mapping
                return tensors.get_tensor(key)
    raise TargetError(f"tensor {key} is in none of its weight files", where=str(folder))
