"""SGLang: its command line and its native /generate, which says of each request how it was drafted for.

Read in SGLang 0.5.17. Its /metrics have no accepted tokens by position, and /v1/completions has no counters at all; the
last event of /generate has them (`managers/tokenizer_manager.py`, `_calculate_spec_decoding_metrics`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.engine_api import EngineCounters, Reply, Sampling
from draftsmith.engine_commands import flag, port_args, target_flags
from draftsmith.engine_server import ask
from draftsmith.errors import EngineError
from draftsmith.recipe import Recipe
from draftsmith.records import TargetFacts

NAME, TITLE = "sglang", "SGLang"
DISTRIBUTIONS: tuple[str, ...] = ("sglang",)
INSTALL = (
    "pip install 'sglang>=0.5.17' beside draftsmith, in an environment of its own: it pins its torch; or name two "
    "running engines in evaluate.served.url and baseline_url"
)
HOLDS_NORM_BEFORE_RESIDUAL = False
PORT = 30000
STREAM_PATH = "/generate"

_MODULE = ("-m", "sglang.launch_server")
_OF_VLLM = {  # name there: name here
    "max_model_len": "context_length",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
}


def command(
    recipe: Recipe, facts: TargetFacts | None, draft: Path | None, num_speculative_tokens: int, **engine_args: Any
) -> list[str]:
    """With a draft a chain, as in vLLM: of one token more than is drafted."""
    arguments = ["python", *_MODULE, "--model-path", recipe.target.name_for_engines, *target_flags(recipe, facts)]
    if recipe.serve.tensor_parallel_size > 1:
        arguments += ["--tp-size", str(recipe.serve.tensor_parallel_size)]
    arguments += _flags({**translated(recipe.serve.engine_args), **port_args(recipe), **translated(engine_args)})
    if draft is None:
        return arguments
    arguments += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft.resolve())]
    arguments += ["--speculative-num-steps", str(num_speculative_tokens), "--speculative-eagle-topk", "1"]
    return [*arguments, "--speculative-num-draft-tokens", str(num_speculative_tokens + 1)]


def translated(engine_args: dict[str, Any]) -> dict[str, Any]:
    """With SGLang's names in the place of four of vLLM's, of which it knows none. The later of two settings counts."""
    found: dict[str, Any] = {}
    for name, value in engine_args.items():
        if name == "enable_prefix_caching":
            found["disable_radix_cache"] = not value
        else:
            found[_OF_VLLM.get(name, name)] = value
    return found


def _flags(engine_args: dict[str, Any]) -> list[str]:
    """true as `--name`, and false as nothing, for there is no `--no-name`; lists as words, mappings as JSON."""
    flags = []
    for name, value in engine_args.items():
        if value is True:
            flags.append(flag(name))
        elif isinstance(value, list):
            flags += [flag(name), *map(str, value)]
        elif value is not None and value is not False:
            flags += [flag(name), json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def version_at(url: str) -> str:
    return str(ask(url, "GET", "/server_info").json()["version"])


def command_notes(command: Sequence[str]) -> list[str]:
    """SGLang cuts down the requests that run at once, with a draft (`arg_groups/speculative_hook.py`)."""
    if flag("max_running_requests") in command:
        return []
    return ["SGLang runs 48 requests at once with a draft, unless serve.engine_args.max_running_requests is set"]


def own_command(command: Sequence[str]) -> list[str]:
    return [sys.executable, *command[1:]]


def measuring_args(sequences: int) -> dict[str, Any]:
    """Not 48 with the draft and more without it; with times; and what is new streamed alone, where each event would
    repeat all of a text."""
    return {
        "enable_metrics": True,
        "disable_radix_cache": True,
        "max_running_requests": sequences,
        "incremental_streaming_output": True,
    }


def stream_request(model: str, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
    """The seed is heeded under `enable_deterministic_inference` alone."""
    parameters = {"max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": {**parameters, "sampling_seed": sampling.seed}, "stream": True}


def new_token_ids(event: dict[str, Any], seen: int, url: str) -> list[int]:
    """Events have what is new (`incremental_streaming_output`) or all so far, which is no less than they count."""
    try:
        ids, written = event["output_ids"], event["meta_info"]["completion_tokens"]
    except KeyError as error:
        raise EngineError(f"streams no {error}", where=url, hint="SGLang 0.5.17 does") from error
    return ids[seen:] if len(ids) >= written else ids


def counting(url: str) -> Callable[[Sequence[Reply]], EngineCounters]:
    """By what each reply says of itself."""
    return lambda replies: _total(
        [counters_of(reply.last_event["meta_info"], _decode_seconds(reply), url) for reply in replies], url
    )


def _decode_seconds(reply: Reply) -> float:
    """By SGLang's clock where it runs with `enable_metrics`, else by ours."""
    tokens_per_second = reply.last_event["meta_info"].get("decode_throughput")  # of those after the first
    return (len(reply.token_ids) - 1) / tokens_per_second if tokens_per_second else reply.decode_seconds


def _total(found: Sequence[EngineCounters], url: str) -> EngineCounters:
    lengths = {len(one.accepted_per_position) for one in found}
    if len(lengths) > 1:
        raise EngineError(f"drafts {sorted(lengths)} tokens in a round for one request and another", where=url)
    return EngineCounters(
        sum(one.drafts for one in found),
        sum(one.draft_tokens for one in found),
        sum(one.accepted_tokens for one in found),
        tuple(map(sum, zip(*(one.accepted_per_position for one in found), strict=True))),
        sum(one.decode_seconds for one in found),
    )


def counters_of(meta: dict[str, Any], decode_seconds: float, url: str) -> EngineCounters:
    """From the `meta_info` of a request that has ended; no rounds where the server does not draft.

    `spec_correct_drafts_histogram[n]` counts the rounds in which n draft tokens were accepted, up to the largest n that
    occurred: the k-th token of a round was accepted where n ≥ k.
    """
    rounds = meta.get("spec_verify_ct", 0)
    if not rounds:
        return EngineCounters(decode_seconds=decode_seconds)
    try:
        proposed, accepted = meta["spec_num_proposed_drafts"], meta["spec_num_correct_drafts"]
        histogram = meta["spec_correct_drafts_histogram"]
    except KeyError as error:
        raise EngineError(f"reports rounds, and no {error}", where=url, hint="SGLang 0.5.17 does") from error
    at_position = tuple(sum(histogram[k:]) for k in range(1, proposed // rounds + 1))
    if sum(at_position) != accepted:
        raise EngineError(
            f"reports {accepted} accepted draft tokens in {rounds} rounds, whose histogram {histogram} makes "
            f"{sum(at_position)}",
            where=url,
        )
    return EngineCounters(rounds, proposed, accepted, at_position, decode_seconds)


def likeliest(url: str, model: str, ids: list[int]) -> dict[int, float]:
    parameters = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True, "top_logprobs_num": 20}
    found = ask(url, "POST", STREAM_PATH, body).json()["meta_info"]["output_top_logprobs"][0]
    return {token: logprob for logprob, token, _ in found}


def complete(
    url: str, model: str, text: str, max_tokens: int, api_key: str | None = None
) -> tuple[str, EngineCounters]:
    parameters = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = ask(url, "POST", STREAM_PATH, {"text": text, "sampling_params": parameters}, api_key).json()
    return answer["text"], counters_of(answer["meta_info"], 0.0, url)
