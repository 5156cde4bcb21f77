"""The engine's worker with our part added: it writes down what goes wrong, and captures at the layers where asked to.

Relied on (vLLM 0.24 and 0.32): the engine argument `worker_cls`, and the methods overridden here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform

from draftsmith.extract.vllm_worker.failures import describe, running_module, write_failure
from draftsmith.extract.vllm_worker.hooks import Joiner, LayerHooks, Ran, complete_states
from draftsmith.extract.vllm_worker.options import read_options, sample_number
from draftsmith.extract.vllm_worker.spool import Ended, SpoolWriter

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class CaptureWorker(PlatformWorker):  # type: ignore[misc]
    """Named to the engine as `worker_cls`."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._options = read_options(vllm_config)
        self._numbers: dict[str, int] = {}  # of the requests under way
        self._batch: list[int] = []
        self._hooks: HookedCapture | None = None

    def init_device(self) -> None:
        with self._reporting("init_device"):
            super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        with self._reporting("load_model"):
            super().load_model(**kwargs)
            if not self._options.hooked:
                complete_states(self.model_runner.get_model(), self._options.layer_ids)
            elif get_tensor_model_parallel_rank() == 0:
                self._hooks = HookedCapture(self.model_runner, self.model_config.get_hidden_size(), self._options)

    def determine_available_memory(self) -> int:
        with self._reporting("determine_available_memory"):
            return super().determine_available_memory()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with self._reporting("initialize_from_config"):
            super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        with self._reporting("compile_or_warm_up_model"):
            return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        self._follow(scheduler_output)
        with self._reporting("execute_model"):
            output = super().execute_model(scheduler_output)
            if self._hooks is not None:
                self._hooks.collect(scheduler_output)
            return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        with self._reporting("sample_tokens"):
            return super().sample_tokens(grammar_output)

    def captured_ids(self) -> tuple[int, ...]:
        """The layer ids whose states this worker writes."""
        writer = self._capture()
        return writer.layer_ids if writer is not None else ()

    def flush_capture(self) -> None:
        """Wait until everything is linked that was captured so far."""
        with self._reporting("flush_capture"):
            writer = self._capture()
            if writer is not None:
                writer.flush()

    def _capture(self) -> SpoolWriter | None:
        if self._hooks is not None:
            return self._hooks.writer
        return get_kv_transfer_group().writer if has_kv_transfer_group() else None

    def _follow(self, scheduler_output: Any) -> None:
        for id in scheduler_output.finished_req_ids:
            self._numbers.pop(id, None)
        for request in scheduler_output.scheduled_new_reqs:
            if (number := sample_number(request)) is not None:
                self._numbers[request.req_id] = number
        self._batch = [self._numbers[id] for id in scheduler_output.num_scheduled_tokens if id in self._numbers]

    @contextmanager
    def _reporting(self, during: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            model = getattr(self.model_runner, "model", None)
            module = running_module(model, error.__traceback__) if model is not None else None
            failure = describe(error, f"worker {self.rank}", during, module, self._batch)
            write_failure(self._options.failures, failure)
            raise


class HookedCapture:
    """From the hooks on the layers to the spool, step by step."""

    def __init__(self, runner: Any, hidden_size: int, options: Any) -> None:
        self._runner = runner
        self._hooks = LayerHooks(runner.get_model(), options.layer_ids, hidden_size)
        self._joiner = Joiner()
        ids = self._hooks.layer_ids
        self.writer = SpoolWriter(options.spool, ids, options.codec) if ids else None

    def collect(self, scheduler_output: Any) -> None:
        """Take what the hooks saw in this step, and write the prompts that end with it."""
        computed = self._joiner.follow(scheduler_output)
        tokens = scheduler_output.total_num_scheduled_tokens
        if self.writer is None or tokens == 0:
            return
        ran = Ran.by(self._runner, scheduler_output.num_scheduled_tokens)
        captured = self._joiner.add(computed, ran, self._hooks.take(tokens))
        if captured:
            starts = accumulate((len(input_ids) for _, input_ids, _ in captured), initial=0)
            ended = [Ended(number, ids, start) for (number, ids, _), start in zip(captured, starts, strict=False)]
            self.writer.put(ended, torch.cat([states for _, _, states in captured]))
