"""What this package relies on inside vLLM, looked for before anything is loaded: a later version may have moved it."""

from __future__ import annotations

import importlib
from typing import Any, get_args

SEEN = "0.24 and 0.32"  # versions in which all of this is as expected
METHOD = "extract_hidden_states"
RELIED_ON = {
    "vllm.engine.arg_utils:EngineArgs": ("create_engine_config", "create_model_config", "worker_cls"),
    "vllm.v1.engine.llm_engine:LLMEngine": ("from_vllm_config", "add_request", "step", "collective_rpc"),
    "vllm.v1.worker.gpu_worker:Worker": ("load_model", "initialize_from_config", "execute_model", "sample_tokens"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("get_model", "finalize_kv_connector"),
    "vllm.distributed.kv_transfer:get_kv_transfer_group": (),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": (),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
        "build_connector_meta",
        "register_kv_caches",
        "save_kv_layer",
        "wait_for_save",
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "finished_req_ids",
    ),
    "vllm.v1.core.sched.output:NewRequestData": (
        "req_id",
        "prompt_token_ids",
        "sampling_params",
        "block_ids",
        "num_computed_tokens",
    ),
    "vllm.v1.core.sched.output:CachedRequestData": (
        "req_ids",
        "resumed_req_ids",
        "new_block_ids",
        "num_computed_tokens",
    ),
    "vllm.exceptions:VLLMValidationError": (),
    "vllm.model_executor.models.interfaces:supports_eagle3": (),
    "vllm.model_executor.models.utils:PPMissingLayer": (),
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": (),
}


def refuse_unknown_engine(version: str) -> None:
    """Raises RuntimeError naming what the installed vLLM lacks."""
    lacking = [name for where, members in RELIED_ON.items() for name in _lacking(where, members)]
    if not lacking and METHOD not in _speculative_methods():
        lacking = [f"the speculative method {METHOD}"]
    if lacking:
        raise RuntimeError(
            f"vLLM {version} lacks what capturing relies on, which is in {SEEN}: {', '.join(lacking)}; "
            "extract.engine=transformers needs no vLLM"
        )


def _lacking(where: str, members: tuple[str, ...]) -> list[str]:
    module, _, name = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return [f"{module}.{name}"]
    there = {*dir(found), *getattr(found, "__dataclass_fields__", ())}
    return [f"{module}.{name}.{member}" for member in members if member not in there]


def _speculative_methods() -> set[Any]:
    """Every method that vLLM's configuration takes, from the nested literals that name them."""

    def flat(literal: Any) -> set[Any]:
        return set().union(*(flat(part) if get_args(part) else {part} for part in get_args(literal)))

    return flat(importlib.import_module("vllm.config.speculative").SpeculativeMethod)
