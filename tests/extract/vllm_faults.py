"""Workers with planted faults, named to the engine as `worker_cls`: a sample's first token or number sets one off."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch

from draftsmith.extract.vllm_worker import hooks
from draftsmith.extract.vllm_worker.worker import CaptureWorker

# First tokens.
POISON, FLIPPED, NORMED, OTHER_EMBEDDINGS, REORDERED, HANGING = range(1, 7)
FREE = 16  # from here on, a token sets nothing off
DROPPED, FULL = 39, 12  # sample numbers
LAYER = 3
HAPPENED = "VLLM_FAULT_HAPPENED"  # variable of the environment: a file that is there once it has happened


class RaisingWorker(CaptureWorker):
    """Raises an exception without a message in the middle of the model."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        text = self.model_runner.get_model().model
        poisoned = False

        def read(module: Any, args: Any) -> None:
            nonlocal poisoned
            poisoned = POISON in args[0].tolist()

        def fail(module: Any, args: Any) -> None:
            if poisoned:
                raise RuntimeError

        text.embed_tokens.register_forward_pre_hook(read)
        text.layers[LAYER].mlp.register_forward_pre_hook(fail)


class OldWorker(CaptureWorker):
    """Its Llama does not hand out the state after the last layer, as DeepSeek-V2 does not in vLLM 0.24."""

    def init_device(self) -> None:
        from vllm.model_executor.models.llama import LlamaModel

        forward = LlamaModel.forward

        def without_last(*args: Any, **kwargs: Any) -> Any:
            hidden, states = forward(*args, **kwargs)
            return hidden, states[:-1]

        LlamaModel.forward = without_last
        super().init_device()


class WrongWorker(RaisingWorker):
    """Captures wrongly, or not at all, what begins with a fault's token; tells of preemptions and cached prefixes."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        self._first = 0  # token of the step's first request
        text = self.model_runner.get_model().model

        def look_up(module: Any, args: Any) -> Any:
            return (args[0].flip(0),) if self._first == OTHER_EMBEDDINGS else None

        text.embed_tokens.register_forward_pre_hook(look_up)
        stream = hooks.Convention.stream

        def reordered(convention: Any, args: Any, kwargs: Any) -> torch.Tensor:
            """As if a layer were called with its residual first, and the positions for a residual."""
            if self._first != REORDERED:
                return stream(convention, args, kwargs)
            return args[1] + args[0][:, None]

        hooks.Convention.stream = reordered  # type: ignore[method-assign]

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        writer = self._capture()
        assert writer is not None
        put, norm = writer.put, self.model_runner.get_model().model.norm

        def put_wrongly(ended: Any, states: torch.Tensor) -> None:
            states = states.clone()
            for one in ended:
                rows = states[one.start : one.start + len(one.input_ids)]
                if one.input_ids[0] == FLIPPED:
                    rows.copy_(rows.flip(0))
                if one.input_ids[0] == NORMED:
                    rows[:, -1] = norm(rows[:, -1].contiguous())
                if one.input_ids[0] == HANGING:
                    threading.Event().wait()
            put(ended, states)

        writer.put = put_wrongly  # type: ignore[method-assign]

    def execute_model(self, scheduler_output: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            self._first = request.prompt_token_ids[0]
            if request.num_computed_tokens:
                happened("cached")
        if scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            happened("preempted")
        return super().execute_model(scheduler_output)


class FullWorker(CaptureWorker):
    """Runs out of memory over one sample the first time that it meets it, and in its next life not again."""

    def execute_model(self, scheduler_output: Any) -> Any:
        self._follow(scheduler_output)
        with self._reporting("execute_model"):
            met = self._options.failures.parent / "met"
            if FULL in self._batch and not met.exists():
                met.touch()
                raise torch.OutOfMemoryError("CUDA out of memory")
        return super().execute_model(scheduler_output)


class DroppingWorker(CaptureWorker):
    """Never writes one sample's states."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        writer = self._capture()
        assert writer is not None
        put = writer.put
        writer.put = lambda ended, states: put([one for one in ended if one.number != DROPPED], states)  # type: ignore[method-assign]


class ShufflingWorker(CaptureWorker):
    """Writes the states of each step in the wrong order of its tokens."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        writer = self._capture()
        assert writer is not None
        put = writer.put
        writer.put = lambda ended, states: put(ended, states.flip(0))  # type: ignore[method-assign]


def happened(what: str) -> None:
    Path(os.environ[HAPPENED], what).touch()
