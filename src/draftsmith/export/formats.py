"""The folders that vLLM and SGLang take for a draft: what is in config.json and model.safetensors.

vLLM: the speculators format (vLLM 0.32 `configs/speculators/algos.py` and `models/llama_eagle3.py`). Norm flags and
layer ids are always written, for three readers assume three different things where they are absent. The flags stand at
the root and in `transformer_layer_config`: vLLM 0.24 does not forward all of those at the root. So does the number of
auxiliary states, which vLLM's Llama draft does not count from the ids at the root.

SGLang: the flat format of SafeAILab (SGLang 0.5.17 `models/llama_eagle3.py`, `model_executor/model_runner_components/
spec_aux_hidden_state.py`, and `set_eagle3_layers_to_capture` of each target's model; see `sglang_obstacles`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.draft.config import DraftConfig
from draftsmith.draft.files import write_tensors
from draftsmith.draft.model import Draft
from draftsmith.draft.names import rename_all, to_sglang
from draftsmith.errors import CheckpointError
from draftsmith.layers import to_sglang as sglang_ids
from draftsmith.records import TargetFacts
from draftsmith.rundir import write_json

CONFIG, WEIGHTS, EMBEDDING = "config.json", "model.safetensors", "embed_tokens.weight"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def write_vllm(
    folder: Path, draft: Draft, dtype: torch.dtype, verifier: str, facts: TargetFacts, num_speculative_tokens: int
) -> dict[str, torch.Tensor]:
    """Write a draft in the speculators format.

    Args:
        verifier: hub id or path of the target, which vLLM loads when it is given the draft's folder alone.
        num_speculative_tokens: K that vLLM then uses; the serve command says its own.

    Returns:
        The tensors as written, under our names.

    Raises:
        CheckpointError: a weight is not finite in `dtype`; names it.
    """
    tensors = tensors_to_ship(draft, dtype)
    config = vllm_config(draft.config, dtype, verifier, facts.architecture, num_speculative_tokens)
    write_folder(folder, config, tensors)
    return tensors


def write_sglang(folder: Path, draft: Draft, dtype: torch.dtype, facts: TargetFacts) -> dict[str, torch.Tensor]:
    """Write a draft in SGLang's format.

    Returns:
        The tensors as written, under our names.

    Raises:
        CheckpointError: SGLang would run another model than was trained, with the reasons; or a weight is not finite
            in `dtype`.
    """
    if obstacles := sglang_obstacles(draft.config, facts):
        raise CheckpointError(
            f"SGLang cannot hold this draft: {'; '.join(obstacles)}",
            where="export",
            hint="leave sglang out of export.formats, or train with other settings",
        )
    tensors = tensors_to_ship(draft, dtype)
    write_folder(folder, sglang_config(draft.config, dtype), rename_all(tensors, to_sglang))
    return tensors


def vllm_config(
    config: DraftConfig, dtype: torch.dtype, verifier: str, architecture: str | None, num_speculative_tokens: int
) -> dict[str, Any]:
    """config.json of the speculators format."""
    flags = {flag: getattr(config, flag) for flag in NORM_FLAGS}
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        **flags,
        "tie_word_embeddings": False,
        "dtype": _dtype_name(dtype),
        "transformer_layer_config": {
            **_llama_config(config, dtype),
            **flags,
            "num_aux_hidden_states": len(config.aux_layer_ids),
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": [architecture] if architecture else []},
        },
    }


def sglang_config(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the flat format. Ids at the root are canonical, for vLLM; those in `eagle_config` are SGLang's."""
    eagle = {
        "use_aux_hidden_state": True,
        "norm_before_fc": config.norm_before_fc,
        "eagle_aux_hidden_state_layer_ids": list(sglang_ids(config.aux_layer_ids)),
    }
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_llama_config(config, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(config.aux_layer_ids),
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        **{flag: getattr(config, flag) for flag in NORM_FLAGS},
        "eagle_config": eagle,
    }


def sglang_obstacles(config: DraftConfig, facts: TargetFacts) -> list[str]:
    """Why SGLang would run another model than was trained; empty if it would not.

    Explicit ids mean the layer whose output is read, but for two targets. DeepSeek-V2's family reads them as canonical
    unless the first is 1 (pull request 25454). gpt-oss does so where the largest is N, which none of ours is: canonical
    ids end at N, and are written one less.
    """
    obstacles = []
    if config.norm_before_residual:
        obstacles.append(
            "norm_before_residual: its residual stream starts from the state before hidden_norm, as that of a draft "
            "trained with train.draft.norm_before_residual=false"
        )
    if len(config.aux_layer_ids) * config.target_hidden_size == config.hidden_size:
        obstacles.append("fc: it is passed over where its input is as wide as its output")
    if facts.attention == "mla" and config.aux_layer_ids[0] != 2:
        obstacles.append(
            f"aux_layer_ids {list(config.aux_layer_ids)}: on DeepSeek's family, newer versions read ids one higher "
            "than older ones unless the first is 2"
        )
    return obstacles


def sglang_requirements(config: DraftConfig) -> list[str]:
    """What an SGLang must have to run the draft as it was trained; older ones pass over the setting without a word."""
    needed = []
    if config.fc_norm or config.norm_output or len(config.aux_layer_ids) != 3:
        needed.append("SGLang 0.5.12.post1 or newer, for fc_norm, norm_output or other than three states")
    if config.norm_before_fc:
        needed.append("SGLang 0.5.17 or newer, for norm_before_fc")
    return needed


def tensors_to_ship(draft: Draft, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The draft's tensors under our names, floats in `dtype`, on the CPU.

    The embedding is left out where engines can share the target's: it is frozen, and as wide as the draft.

    Raises:
        CheckpointError: a weight is not finite in `dtype`; names it.
    """
    tensors = {}
    for name, tensor in draft.state_dict().items():
        if name == EMBEDDING and not _ships_embedding(draft):
            continue
        shipped = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        if shipped.is_floating_point() and not shipped.isfinite().all():
            raise CheckpointError(
                f"{name} is not finite in {_dtype_name(dtype)}",
                where="export",
                hint="set export.dtype=float32 to see whether it was finite before the cast",
            )
        tensors[name] = shipped
    return tensors


def _ships_embedding(draft: Draft) -> bool:
    return draft.config.hidden_size != draft.config.target_hidden_size or draft.embed_tokens.weight.requires_grad


def _llama_config(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The decoder layer in transformers' terms. RoPE is there in the form of transformers 5 and of those before it."""
    scaling = config.rope_parameters()
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": scaling,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "tie_word_embeddings": False,
        "dtype": _dtype_name(dtype),
    }


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    write_json(folder / CONFIG, config)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
