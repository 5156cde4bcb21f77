"""`python -m draftsmith.rehearse.decode REQUEST.json`: decodes prompts greedily in the real vLLM, with a draft or not.

One engine in a process of its own, which gives its memory back. The request is a JSON object: `engine_args` of vLLM's
`LLM`, `prompts` (lists of token ids), `max_new_tokens`, `stop_ids`, and `answer`, the file in which what was said is
left with vLLM's counters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COUNTERS = {  # vLLM `v1/spec_decode/metrics.py`
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


class EngineFailed(Exception):
    """The engine's process ended without an answer; its output is in the log."""


def decode_in_vllm(
    engine_args: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    *,
    folder: Path,
    environment: dict[str, str],
) -> dict[str, Any]:
    """Decode in a process of its own. Leaves request, answer and `decode.log` in the folder.

    Returns:
        `token_ids` by prompt, and the counters of `COUNTERS`.

    Raises:
        EngineFailed: there is no answer.
    """
    request, answer, log = folder / "request.json", folder / "answer.json", folder / "decode.log"
    asked = {
        "engine_args": engine_args,
        "prompts": [list(ids) for ids in prompts],
        "max_new_tokens": max_new_tokens,
        "stop_ids": list(stop_ids),
        "answer": str(answer),
    }
    request.write_text(json.dumps(asked), encoding="utf-8")
    answer.unlink(missing_ok=True)
    with open(log, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "draftsmith.rehearse.decode", str(request)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode or not answer.exists():
        raise EngineFailed(f"exit status {done.returncode}")
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def _decode(request: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(**request["engine_args"], disable_log_stats=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"], stop_token_ids=request["stop_ids"])
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], sampling, use_tqdm=False)
    counts = {
        COUNTERS[metric.name]: getattr(metric, "value", None) or getattr(metric, "values", 0)
        for metric in llm.get_metrics()
        if metric.name in COUNTERS
    }
    return {"token_ids": [list(output.outputs[0].token_ids) for output in outputs], **counts}


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(asked["answer"]).write_text(json.dumps(_decode(asked)), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # taking the interpreter apart lasts seconds
