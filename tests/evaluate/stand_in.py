"""A real HTTP server that streams, counts and lists its model as vLLM does, or SGLang, and says the foreseeable."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

K = 2
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="tiny"}} {drafts}
vllm:spec_decode_num_drafts_created{{engine="0",model_name="tiny"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="tiny"}} {draft_tokens}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="tiny"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="1"}} 0.0
vllm:num_requests_running{{engine="0",model_name="tiny"}} 0.0
vllm:request_decode_time_seconds_bucket{{engine="0",le="0.3",model_name="tiny"}} 2.0
vllm:request_decode_time_seconds_sum{{engine="0",model_name="tiny"}} {seconds}
vllm:request_decode_time_seconds_count{{engine="0",model_name="tiny"}} 2.0
"""


@dataclass
class Engine:
    """Counts on from the prompt's last number: with a draft in rounds of two tokens, one of which was drafted."""

    kind: str = "vllm"  # or "sglang"
    together: int = 1  # requests that it waits for before it answers
    drafting: bool = True
    slip: int | None = None  # place of an answer at which it says something else
    bodies: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    in_flight: int = 0
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        self.all_here = threading.Barrier(self.together)

    def rounds(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self.lock:
            self.bodies.append(body)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.all_here.wait(30)
        prompt, tokens = body.get("prompt"), body.get("max_tokens")
        if self.kind == "sglang":
            prompt, tokens = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        ids = [prompt[-1] + 1 + i + (i == self.slip) for i in range(tokens)]
        width = 2 if self.drafting else 1
        for start in range(0, len(ids), width):
            with self.lock:
                self.steps += 1
            if self.kind == "sglang":
                yield self.sglang_event(ids[: start + width], start // width + 1, start + width >= tokens)
            else:
                yield {"choices": [{"text": "x", "token_ids": ids[start : start + width]}]}
        if self.kind == "vllm":
            yield {"choices": [], "usage": {"completion_tokens": len(ids)}}
        with self.lock:
            self.in_flight -= 1

    def sglang_event(self, ids: list[int], rounds: int, ended: bool) -> dict[str, Any]:
        """All that was written so far; in the end also how, as SGLang 0.5.17 `_calculate_spec_decoding_metrics`."""
        meta: dict[str, Any] = {"finish_reason": None, "completion_tokens": len(ids)}
        if ended:
            meta |= {"finish_reason": {"type": "length"}, "decode_throughput": (len(ids) - 1) / (rounds / 4)}
        if ended and self.drafting:
            meta |= {"spec_verify_ct": rounds, "spec_num_proposed_drafts": K * rounds}
            meta |= {"spec_num_correct_drafts": rounds, "spec_correct_drafts_histogram": [0, rounds]}
        return {"text": "x", "output_ids": ids, "meta_info": meta}

    def metrics(self) -> str:
        n = self.steps
        text = METRICS.format(drafts=float(n), draft_tokens=float(K * n), accepted=float(n), seconds=n / 4)
        return text if self.drafting else "\n".join(line for line in text.splitlines() if "spec_decode" not in line)


@contextmanager
def serving(engine: Engine, rounds: Callable[[dict[str, Any]], Iterator[Any]] | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = json.dumps({"data": [{"id": "tiny", "owned_by": engine.kind}]})
            version = json.dumps({"version": f"of {engine.kind}"})
            answers = {"/v1/models": models, "/version": version, "/server_info": version}
            text = answers.get(self.path) or engine.metrics()
            self.send_response(404 if (engine.kind, self.path) == ("sglang", "/metrics") else 200)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            path = "/generate" if engine.kind == "sglang" else "/v1/completions"
            if self.path != path or body.get("model", "tiny") != "tiny":
                self.send_error(404, "no such model")
                return
            self.send_response(200)
            self.end_headers()
            if not body.get("stream"):
                answer: Any
                if engine.kind == "sglang":
                    answer = {"meta_info": {"output_top_logprobs": [[[-0.1, body["input_ids"][-1] + 1, None]]]}}
                else:
                    likely = {f"token_id:{body['prompt'][-1] + 1}": -0.1}
                    answer = {"choices": [{"logprobs": {"top_logprobs": [likely]}}]}
                self.wfile.write(json.dumps(answer).encode())
                return
            for event in (rounds or engine.rounds)(body):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
