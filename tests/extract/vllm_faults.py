"""Workers with planted faults, named to the engine as `worker_cls`: they trip over one token, or over one sample."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from draftsmith.extract.vllm_worker.worker import CaptureWorker

POISON = 1  # token id
LAYER = 3
DROPPED = 5  # sample number
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
                self.trip()

        text.embed_tokens.register_forward_pre_hook(read)
        text.layers[LAYER].mlp.register_forward_pre_hook(fail)

    def trip(self) -> None:
        raise RuntimeError


class DyingWorker(RaisingWorker):
    """Dies without a word, the first time."""

    def trip(self) -> None:
        happened = Path(os.environ[HAPPENED])
        if not happened.exists():
            happened.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class PreemptedWorker(CaptureWorker):
    """Has no fault: tells that a request was preempted and begun again."""

    def execute_model(self, scheduler_output: Any) -> Any:
        if scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            Path(os.environ[HAPPENED]).touch()
        return super().execute_model(scheduler_output)


class UnloadableWorker(CaptureWorker):
    def load_model(self, **kwargs: Any) -> None:
        with self._reporting("load_model"):
            raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB, of which 3.00 GiB are free\nand more")


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
