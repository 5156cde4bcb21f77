"""The process that holds the engine: reads requests from its standard input, feeds vLLM, says what is done.

    driver → engine   one JSON line for the job (`Job`), then one for each sample: {"number", "input_ids"};
                      {"end": true} when there are no more. Input stays open; its end means that the driver is gone.
    engine → driver   one JSON line for each event, through a pipe of its own, since what vLLM prints goes to the log:
                      {"event": "ready", "capture", "parts"}; {"event": "done", "samples"}: the [number, next
                      token] of those whose links are in the spool; {"event": "refused", "number", "reason"}

An exception ends the process; what it was is in the folder of failures.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from draftsmith.extract.vllm_worker.failures import ENGINE, describe, write_failure
from draftsmith.extract.vllm_worker.internals import refuse_unknown_engine
from draftsmith.extract.vllm_worker.options import Options, sampling_extra_args
from draftsmith.extract.vllm_worker.spool import spool_link

HERE = "draftsmith.extract.vllm_worker"
Requests = queue.SimpleQueue[dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """What the driver asks of an engine."""

    engine_args: dict[str, Any]  # vLLM's `EngineArgs`
    capture: str  # native, hooked, auto
    layer_ids: list[int]  # canonical, ascending, N among them
    codec: str | None  # which the workers encode states with
    spool: str
    failures: str
    events: int  # file descriptor

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def main() -> None:
    job = Job(**json.loads(sys.stdin.readline()))
    with os.fdopen(job.events, "w", buffering=1) as events:
        requests = follow_input(sys.stdin, Path(job.spool))
        with reporting(job, "start"):
            engine, capture = start(job)
            parts = captured_parts(engine, job.layer_ids)
        emit(events, "ready", capture=capture, parts=parts)
        with reporting(job, "step"):
            Service(engine, Path(job.spool), parts, requests, events).run()
    engine.engine_core.shutdown()
    os._exit(0)  # taking the interpreter apart lasts seconds, and there is nothing left to lose


def start(job: Job) -> tuple[Any, str]:
    """The engine, and the way in which it captures."""
    import vllm

    refuse_unknown_engine(vllm.__version__)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    capture = choose_capture(job)
    gc.freeze()  # vLLM collects garbage nine times while it starts, each time through all that was imported
    options = Options(
        Path(job.spool), Path(job.failures), tuple(job.layer_ids), hooked=capture == "hooked", codec=job.codec
    )
    args = {
        "worker_cls": f"{HERE}.worker.CaptureWorker",
        **job.engine_args,
        "additional_config": options.to_additional_config(),
        **(HOOKED_ARGS if capture == "hooked" else native_args(job.layer_ids)),
    }
    config = EngineArgs(**args).create_engine_config()
    refuse_endless_wait(config)
    return LLMEngine.from_vllm_config(config, disable_log_stats=True), capture


def refuse_endless_wait(config: Any) -> None:
    """Some models and platforms turn chunked prefill off; a longer prompt than a step would then wait for ever."""
    scheduler, longest = config.scheduler_config, config.model_config.max_model_len
    step = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill and step < longest:
        raise ValueError(
            f"vLLM computes the prompts of this model in one piece, so that extract.max_num_batched_tokens must be "
            f"{longest} at the least, and a step has {step}"
        )


def choose_capture(job: Job) -> str:
    """Natively, where the model has the engine's EAGLE-3 interface and is in one piece; else by hooks.

    Told to take all models from transformers, vLLM does not find the drafter that its own capture is.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.interfaces import supports_eagle3

    if job.capture != "auto":
        return job.capture
    config = EngineArgs(**job.engine_args).create_model_config()
    model_class, _ = config.registry.resolve_model_cls(config.architectures, config)
    in_one_piece = job.engine_args.get("pipeline_parallel_size", 1) == 1
    finds_drafter = job.engine_args.get("model_impl") != "transformers"
    return "native" if in_one_piece and finds_drafter and supports_eagle3(model_class) else "hooked"


def captured_parts(engine: Any, layer_ids: list[int]) -> list[list[int]]:
    """The layer ids that each writing worker has: all that were asked for, none twice."""
    parts = sorted(list(ids) for ids in engine.collective_rpc("captured_ids") if ids)
    if [id for ids in parts for id in ids] != layer_ids:
        raise RuntimeError(f"the workers capture layer ids {parts}, and {layer_ids} were asked for")
    return parts


HOOKED_ARGS = {"enforce_eager": True, "enable_prefix_caching": False}


def native_args(layer_ids: list[int]) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": f"{HERE}.connector",
            "kv_role": "kv_producer",
        },
    }


class Service:
    """Runs every request that comes in, until there are no more."""

    def __init__(self, engine: Any, spool: Path, parts: list[list[int]], requests: Requests, events: TextIO) -> None:
        self.engine, self.spool, self.parts, self.requests, self.events = engine, spool, parts, requests, events
        self.finished: dict[int, Any] = {}  # outputs of the engine: the links to their states are on the way
        self.ended = False

    def run(self) -> None:
        while True:
            self.take_requests()
            if self.engine.get_num_unfinished_requests():
                for output in self.engine.step():
                    if output.finished:
                        self.finished[int(output.request_id)] = output.outputs[0]
                self.report_done()
            elif self.finished:
                self.engine.collective_rpc("flush_capture")
                self.report_done()
                for number, output in self.finished.items():
                    self.refuse(number, f"the engine ended it ({output.finish_reason}) without its states")
                self.finished.clear()
            elif self.ended:
                return

    def take_requests(self) -> None:
        """Add what has come in; wait for something only when there is nothing else to do."""
        while not self.ended and (not self.requests.empty() or self.idle()):
            request = self.requests.get()
            if "end" in request:
                self.ended = True
            else:
                self.add(request["number"], request["input_ids"])

    def idle(self) -> bool:
        return not self.finished and not self.engine.get_num_unfinished_requests()

    def add(self, number: int, input_ids: list[int]) -> None:
        """Hand a sample to the engine, which may not take it: too long, or a token that the model does not have."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError  # no ValueError since 0.32

        one_token = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, extra_args=sampling_extra_args(number)
        )
        try:
            self.engine.add_request(str(number), {"prompt_token_ids": input_ids}, one_token)
        except (ValueError, VLLMValidationError) as error:
            self.refuse(number, f"the engine refuses it: {error}")

    def report_done(self) -> None:
        if not self.finished:
            return
        there = set(os.listdir(self.spool))
        done = [
            number
            for number in self.finished
            if all(spool_link(self.spool, number, ids[0]).name in there for ids in self.parts)
        ]
        if done:
            emit(self.events, "done", samples=[(number, self.finished.pop(number).token_ids[0]) for number in done])

    def refuse(self, number: int, reason: str) -> None:
        emit(self.events, "refused", number=number, reason=reason)


def follow_input(stream: TextIO, spool: Path) -> Requests:
    """Requests as they come in, read by a thread, so that the driver never waits for a step of the engine."""
    requests: Requests = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            requests.put(json.loads(line))
        shutil.rmtree(spool, ignore_errors=True)  # the driver is gone, and nobody will read it
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    return requests


def emit(events: TextIO, event: str, **values: Any) -> None:
    events.write(json.dumps({"event": event, **values}) + "\n")


@contextmanager
def reporting(job: Job, during: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        write_failure(Path(job.failures), describe(error, ENGINE, during, None, []))
        raise


if __name__ == "__main__":
    main()
