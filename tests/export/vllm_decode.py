"""`python vllm_decode.py REQUEST.json`: decodes prompts greedily in the real vLLM, with a draft or without one.

One engine in one process, in float32. Writes what was said and vLLM's counters to the request's `answer` file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

COUNTERS = {  # vLLM `v1/spec_decode/metrics.py`
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


def decode(request: dict[str, Any]) -> dict[str, Any]:
    speculative = {"method": "eagle3", "model": request["draft"]}
    speculative["num_speculative_tokens"] = request["num_speculative_tokens"]
    longest = max(len(ids) for ids in request["prompts"])
    llm = LLM(
        model=request["model"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=longest + request["max_new_tokens"] + 16,
        max_num_seqs=len(request["prompts"]),
        kv_cache_memory_bytes=512 * 2**20,
        speculative_config=speculative if request["draft"] else None,
        disable_log_stats=False,
        skip_tokenizer_init=True,
    )
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
    Path(asked["answer"]).write_text(json.dumps(decode(asked)), encoding="utf-8")
