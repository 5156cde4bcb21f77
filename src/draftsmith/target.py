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
from draftsmith.progress import quiet_libraries
from draftsmith.records import TargetFacts
from draftsmith.rundir import RunPaths

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Final norms that are not x / rms(x) * weight, by text model type (transformers `models/*/modeling_*.py`). One that has
# a bias is a LayerNorm in every model.
_RMS_PLUS_ONE = (
    "gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "minimax_m3_vl_text", "step3p5",
)  # fmt: skip
_LAYER_NORM_WITHOUT_BIAS = ("cohere", "cohere2", "dbrx")
_LAYER_NORM_PLUS_ONE = ("nemotron",)


def read_facts_of_run(paths: RunPaths) -> TargetFacts:
    """The facts that the probe left in the run."""
    return paths.read_facts()


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
    """The whole target through transformers, frozen and in evaluation mode.

    Raises:
        TargetError: it will not load, or the checkpoint lacks weights, which transformers would fill with random ones.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    quiet_libraries()
    trust = target.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(facts.path, trust_remote_code=trust)
        own_code = trust and "AutoModelForCausalLM" in (facts.auto_map or {})
        text_alone = own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        auto = AutoModelForCausalLM if text_alone else AutoModelForImageTextToText
        model, loaded = auto.from_pretrained(
            facts.path, config=config, dtype=dtype, trust_remote_code=trust, output_loading_info=True
        )
        model = model.to(device)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise TargetError(f"transformers cannot load it: {error}", where=facts.path) from error
    if absent := sorted(loaded["missing_keys"]):
        raise TargetError(
            f"its checkpoint lacks {len(absent)} weights that {type(model).__name__} has, such as {absent[0]}",
            where=facts.path,
            hint="`draftsmith probe` lists what the weight files hold",
        )
    return model.eval().requires_grad_(False)


def text_model(model: nn.Module, facts: TargetFacts) -> nn.Module:
    """The part from embedding to final norm, inside whatever wrappers: called alone, it computes no logits."""
    return model.get_submodule(_layers_name(model, facts).rpartition(".")[0])


def decoder_layers(model: nn.Module, facts: TargetFacts) -> nn.ModuleList:
    """The text model's decoder layers."""
    layers = model.get_submodule(_layers_name(model, facts))
    assert isinstance(layers, nn.ModuleList)
    return layers


def final_norm(model: nn.Module, facts: TargetFacts) -> nn.Module:
    """The text model's norm before its head, by the name that its weight has. Raises TargetError if there is none."""
    name = (facts.final_norm_key or "").rpartition(".")[0].rpartition(".")[2]
    norm = getattr(text_model(model, facts), name, None)
    if not isinstance(norm, nn.Module):
        raise TargetError(
            f"no final norm in {type(model).__name__}: the weight files have {facts.final_norm_key or 'none'}",
            where=facts.path,
        )
    return norm


def _layers_name(model: nn.Module, facts: TargetFacts) -> str:
    """Name of the outermost list of `num_hidden_layers` blocks outside the towers of other modalities."""
    if facts.num_hidden_layers is None:
        raise TargetError("its configuration does not say how many decoder layers it has", where=facts.path)
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == facts.num_hidden_layers
        and not any(part in name for part in ("vision", "visual", "audio", "experts", "mtp"))
    ]
    if not found:
        raise TargetError(f"no list of {facts.num_hidden_layers} decoder layers in {type(model).__name__}")
    return min(found, key=lambda name: name.count("."))


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
        lm_head_bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding, requires_grad=False)  # [Vt, Ht]
        self.norm = norm
        self.lm_head = nn.Parameter(lm_head, requires_grad=False)  # [Vt, Ht]
        self.lm_head_bias = nn.Parameter(lm_head_bias, requires_grad=False) if lm_head_bias is not None else None
        self.logit_scale, self.softcap = logit_scale, softcap

    def logits(self, last: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the target from its state before the final norm.

        Args:
            last: [..., Ht], canonical id N.
            rows: token ids to compute, [R] int64; all if None.

        Returns:
            [..., R or Vt], in the dtype of `last`.
        """
        return self.project(self.norm(last), rows)

    def project(self, normed: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """`logits` for a state that the final norm was applied to."""
        chosen = slice(None) if rows is None else rows
        bias = None if self.lm_head_bias is None else self.lm_head_bias[chosen]
        logits = nn.functional.linear(normed, self.lm_head[chosen], bias)
        if self.logit_scale != 1.0:  # a pass over all logits, which most targets do not need
            logits = logits * self.logit_scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def take_long_factors(model: Any) -> None:
    """Make a model of transformers take the long factors of LongRoPE for every length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            beyond = module.config.rope_parameters["original_max_position_embeddings"] + 1
            module.inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, seq_len=beyond)
            module.original_inv_freq = module.inv_freq


def load_head(facts: TargetFacts, device: torch.device, dtype: torch.dtype) -> TargetHead:
    """Read embedding, final norm and lm_head from the target's weight files.

    Raises:
        TargetError: a tensor is not there or not dense; names it.
    """
    folder = Path(facts.path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config
    for key in facts.wrapper.split(".") if facts.wrapper else ():
        text = text[key]

    def read(key: str | None, what: str) -> torch.Tensor:
        if key is None:
            raise TargetError(f"has no dense {what} that the probe could find", where=facts.path)
        return read_tensor(folder, key).to(device=device, dtype=dtype)

    def read_bias(key: str | None) -> torch.Tensor | None:
        bias_key = f"{(key or '').removesuffix('.weight')}.bias"
        return read(bias_key, "bias") if weight_file(folder, bias_key) else None

    embedding = read(facts.embedding_key, "embedding")
    tied = facts.lm_head_key == facts.embedding_key
    return TargetHead(
        embedding=embedding,
        norm=_final_norm(facts, read(facts.final_norm_key, "final norm"), read_bias(facts.final_norm_key)),
        lm_head=embedding if tied else read(facts.lm_head_key, "lm_head"),
        logit_scale=_logit_scale(text, facts),
        softcap=text.get("final_logit_softcapping"),
        lm_head_bias=None if tied else read_bias(facts.lm_head_key),
    )


def _logit_scale(text: dict[str, Any], facts: TargetFacts) -> float:
    """What the logits are multiplied with, by the name that each family has for it (transformers, vLLM `models/`)."""
    family = facts.text_model_type or facts.model_type or ""
    if scaling := text.get("logits_scaling"):
        return scaling if family.startswith("hyperclovax") else 1.0 / scaling
    if family.startswith("minicpm") and (base := text.get("dim_model_base")):
        return base / text["hidden_size"]
    return text.get("logit_scale") or text.get("lm_head_multiplier") or 1.0


def _final_norm(facts: TargetFacts, weight: torch.Tensor, bias: torch.Tensor | None) -> FinalNorm:
    family = facts.text_model_type or facts.model_type
    if family in _LAYER_NORM_PLUS_ONE:
        weight = 1.0 + weight
    if bias is not None or family in _LAYER_NORM_WITHOUT_BIAS:
        return FinalNorm(weight, bias, facts.rms_norm_eps or 1e-5, "layer_norm")
    return FinalNorm(weight, None, facts.rms_norm_eps or 1e-6, "rms_plus_one" if family in _RMS_PLUS_ONE else "rms")


def weight_file(folder: Path, key: str) -> Path | None:
    """The file of a safetensors checkpoint, sharded or not, that holds a tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        name = json.loads(index.read_text(encoding="utf-8"))["weight_map"].get(key)
        return folder / name if name else None
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if key in tensors.keys():  # noqa: SIM118 - not a mapping
                return file
    return None


def read_tensor(folder: Path, key: str) -> torch.Tensor:
    """One tensor of a safetensors checkpoint. Raises TargetError if it is in none of the files."""
    file = weight_file(folder, key)
    if file is None:
        raise TargetError(f"tensor {key} is in none of its weight files", where=str(folder))
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(key)
