"""A worker that fails on one token, with an exception that has no message: named to the engine as `worker_cls`."""

from __future__ import annotations

from typing import Any

from draftsmith.extract.vllm_worker.worker import CaptureWorker

POISON = 1  # token id
LAYER = 3


class PoisonedWorker(CaptureWorker):
    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        text = self.model_runner.get_model().model
        seen = []

        def read(module: Any, args: Any, kwargs: Any) -> None:
            seen[:] = [token for token in args[0].tolist() if token == POISON]

        def fail(module: Any, args: Any, kwargs: Any) -> None:
            if seen:
                raise RuntimeError

        text.embed_tokens.register_forward_pre_hook(read, with_kwargs=True)
        text.layers[LAYER].mlp.register_forward_pre_hook(fail, with_kwargs=True)
