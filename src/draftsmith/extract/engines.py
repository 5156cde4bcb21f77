"""The engines of a capture: which has which samples, what comes back from them, and what becomes of one that dies.

Each has devices of its own, and all of them share one queue. One that dies loses nothing but what it had
under way: it is started again while the others go on, and the samples that it died over are tried one by one.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any, Self

import torch

from draftsmith.errors import EngineError
from draftsmith.extract.engine_errors import explain_death, stalled
from draftsmith.extract.quarantine import set_aside
from draftsmith.extract.vllm_worker.client import EngineDied, EngineProcess
from draftsmith.extract.vllm_worker.spool import take_sequence
from draftsmith.extract.work import Captured, Work
from draftsmith.records import EncodedFeatures, Features, Sample
from draftsmith.rundir import hash_json
from draftsmith.store.codec import Parts
from draftsmith.store.threads import one_core_threads

LIVES_WITHOUT_A_SAMPLE = 3  # an engine that dies as often before it captured anything is given up
START_STALL_SECONDS = 900.0  # at the least, without a line in its log: compiling kernels takes minutes
SPOOL_BYTES = 8 << 30  # at most, and a sixteenth of the machine's memory


@dataclass(frozen=True)
class Plan:
    """What is to be captured, and with what.

    Attributes:
        engine_args: of `engine_args`.
        layer_ids: canonical, ascending, N among them.
        folder: the stage's own, for the log, the quarantine and, where memory is short, the spool.
        devices: of each engine, as `device_shares` says; None: all that there are.
        codec: which its workers encode states with; None: they come as they are computed.
    """

    engine_args: dict[str, Any]
    environment: dict[str, str]
    capture: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    folder: Path
    stall_seconds: float
    devices: tuple[str | None, ...] = (None,)
    codec: str | None = None

    @property
    def log(self) -> Path:
        """Of the first engine."""
        return self.log_of(0)

    def log_of(self, engine: int) -> Path:
        return self.folder / (f"engine-{engine}.log" if engine else "engine.log")

    @property
    def room_tokens(self) -> int:
        """Of samples that may be between engines and store at once."""
        return spool_bytes() // (self.hidden_size * len(self.layer_ids) * 4)


class Engine:
    """One of the engines, through all its lives."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan, self.log = plan, plan.log_of(number)
        self.failures, self.spool = plan.folder / f"failures-{number}", spool_folder(plan.folder, number)
        device = plan.devices[number]
        self.environment = plan.environment if device is None else plan.environment | {"CUDA_VISIBLE_DEVICES": device}
        self.under_way: dict[int, int] = {}  # sample number → tokens
        self.captured = self.captured_before = self.fruitless_lives = 0  # before: by its earlier lives

    def start(self) -> None:
        for folder in (self.failures, self.spool):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        job = {
            "engine_args": self.plan.engine_args,
            "capture": self.plan.capture,
            "layer_ids": list(self.plan.layer_ids),
            "codec": self.plan.codec,
            "spool": str(self.spool),
        }
        self.captured_before, self.under_way = self.captured, {}
        self.heard, self.logged_bytes = time.monotonic(), self.log_start
        self.process = EngineProcess(job, self.failures, self.log, self.environment)

    @property
    def ready(self) -> bool:
        return self.process.capture is not None

    @property
    def silent_seconds(self) -> float:
        """Since it answered, or, while it starts, which may take long, since its log grew; 0 with nothing to do."""
        if not self.ready and (size := self.log.stat().st_size) != self.logged_bytes:
            self.heard, self.logged_bytes = time.monotonic(), size
        return time.monotonic() - self.heard if self.under_way or not self.ready else 0.0

    @property
    def patience_seconds(self) -> float:
        return self.plan.stall_seconds if self.ready else max(self.plan.stall_seconds, START_STALL_SECONDS)

    @property
    def load_tokens(self) -> int:
        return sum(self.under_way.values())

    def fileno(self) -> int:
        """For `select`: readable when the engine has said something."""
        return self.process.fileno()

    def send(self, number: int, sample: Sample) -> None:
        self.heard = self.heard if self.under_way else time.monotonic()
        self.under_way[number] = len(sample.input_ids)
        self.process.send(number, sample.input_ids)

    def read(self, number: int, sample: Sample) -> tuple[Features | EncodedFeatures | None, str]:
        """A captured sample from the spool, or what is wrong with it."""
        ids = self.plan.layer_ids
        input_ids, parts = take_sequence(self.spool, number, self.process.parts)
        if input_ids.tolist() != sample.input_ids:
            return None, f"the engine read {len(input_ids)} tokens that are not the {len(sample.input_ids)} sent to it"
        due = [len(sample.input_ids), len(ids), self.plan.hidden_size]
        if list(parts[""].shape) != due:
            return None, f"the engine gave states of shape {list(parts[''].shape)}, where {due} is due"
        told_by = parts["scale"] if self.plan.codec else parts[""]  # a state that is not finite has no scale
        if not torch.stack(told_by.aminmax()).isfinite().all():  # at the speed of memory, and a NaN shows in both
            token, place, *_ = (~told_by.isfinite()).nonzero()[0].tolist()
            return None, f"the state of layer id {ids[place]} is not finite at token {token}"
        return _features(sample, input_ids, parts, encoded=self.plan.codec is not None), ""


class Engines:
    """All of them. Use it as a context: they end with the block.

    Args:
        on_restart: told why an engine died, each time that one is started again.
    """

    def __init__(self, plan: Plan, on_restart: Callable[[EngineError], None] = lambda error: None) -> None:
        self.plan, self._on_restart = plan, on_restart
        self.engines = [Engine(plan, number) for number in range(len(plan.devices))]
        self._readers = one_core_threads("take")  # the engine's own threads need the other cores
        self.begun = False  # once all have been ready; from there on, one that starts again is not waited for

    def __enter__(self) -> Self:
        for engine in self.engines:
            engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.shutdown(cancel_futures=True)
        for engine in self.engines:
            engine.process.close()
            shutil.rmtree(engine.spool, ignore_errors=True)

    @property
    def capture(self) -> str | None:
        """How they capture, native or hooked, which is the same in all; known once one is ready."""
        return next((engine.process.capture for engine in self.engines if engine.ready), None)

    def run(self, work: Work) -> Iterator[list[Captured]]:
        """Work until it is done. The engines stay as they are, ready for more.

        A sample that fails twice is left out, and entered in the quarantine.

        Yields:
            What was captured, in order; an empty list once a second while there is nothing.

        Raises:
            EngineError: an engine does not start, dies too often before it has got anything done, or is silent too
                long.
        """
        while not work.done:
            self._send(work)
            for engine in select(self.engines, [], [], 1.0)[0]:
                self._hear(engine, work)
            for engine in self.engines:
                if engine.silent_seconds > engine.patience_seconds:
                    raise stalled(engine.patience_seconds, engine.ready, engine.log, engine.log_start)
            yield work.take_ready()

    def end(self) -> None:
        """Say that no more samples come, so that the engines end by themselves; one that is starting need not."""
        for engine in self.engines:
            if engine.ready:
                engine.process.end()

    def _send(self, work: Work) -> None:
        ready = [engine for engine in self.engines if engine.ready]
        self.begun = self.begun or len(ready) == len(self.engines)
        while self.begun and ready and (next_one := work.next_to_send()):
            min(ready, key=lambda engine: engine.load_tokens).send(*next_one)

    def _hear(self, engine: Engine, work: Work) -> None:
        try:
            events = engine.process.receive()
        except EngineDied as death:
            self._replace(engine, death, work)
            return
        engine.heard = time.monotonic()
        for event in events:
            if event["event"] == "refused":
                self._fail(engine, work, event["number"], event["reason"])
            elif event["event"] == "done":
                self._take(engine, work, event["samples"])

    def _take(self, engine: Engine, work: Work, done: list[tuple[int, int]]) -> None:
        numbers = [number for number, _ in done]
        found = self._readers.map(engine.read, numbers, [work.sample(number) for number in numbers])
        for (number, token), (features, problem) in zip(done, found, strict=True):
            if features is None:
                self._fail(engine, work, number, problem)
                continue
            del engine.under_way[number]
            engine.captured += 1
            work.settle(number, Captured(features, token))

    def _fail(self, engine: Engine, work: Work, number: int, reason: str) -> None:
        del engine.under_way[number]
        if reasons := work.fail(number, reason):
            set_aside(self.plan.folder, work.sample(number), reasons)

    def _replace(self, engine: Engine, death: EngineDied, work: Work) -> None:
        """Start an engine again; what it had under way is to be sent again."""
        error = explain_death(death, engine.log, engine.log_start, work.ids)
        engine.fruitless_lives = 0 if engine.captured > engine.captured_before else engine.fruitless_lives + 1
        if not engine.ready or engine.fruitless_lives == LIVES_WITHOUT_A_SAMPLE:
            raise error from death
        self._on_restart(error)
        suspects = death.failure.numbers if death.failure else ()
        for number, reasons in work.lose_engine(engine.under_way, suspects, str(error)).items():
            set_aside(self.plan.folder, work.sample(number), reasons)
        engine.process.close()
        engine.start()


def _features(sample: Sample, input_ids: torch.Tensor, parts: Parts, encoded: bool) -> Features | EncodedFeatures:
    aux, last = ({name: part[:, of] for name, part in parts.items()} for of in (slice(0, -1), -1))
    told = (sample.id, sample.domain, sample.split, input_ids.long(), torch.tensor(sample.loss_mask, dtype=torch.bool))
    return EncodedFeatures(*told, aux, last) if encoded else Features(*told, aux[""], last[""])


def spool_bytes() -> int:
    """Bytes of states that may be between engines and store."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(SPOOL_BYTES, memory // 16)


def spool_folder(folder: Path, engine: int = 0) -> Path:
    """A folder in memory where there is room, else in the stage's own. It is the same for every run in that folder,
    which begins by emptying it: a run that was killed leaves nothing for longer than until it goes on."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 2 * spool_bytes():
        return memory / f"draftsmith-{hash_json(str(folder.resolve()))[:16]}-{engine}"
    return folder / f"spool-{engine}"
