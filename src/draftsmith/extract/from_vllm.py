"""Capture through vLLM: the driver, which feeds an engine in a process of its own and takes what it captures.

    corpus → driver → (pipe) → engine process → vLLM's workers → (spool) → driver → store

The spool is a folder in memory where there is one. Nothing in it counts: a sample is done when the store's ledger has
it. A sample that fails twice is set aside in `quarantine.jsonl`, and the run goes on; an engine that dies is started
again, with the samples that it died over one by one, as long as it gets anything done.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.corpus import read_corpus
from draftsmith.extract.engine_errors import explain_death, stalled
from draftsmith.extract.engine_settings import engine_args, environment
from draftsmith.extract.parity import expect, first_samples, measure
from draftsmith.extract.quarantine import read_quarantine, set_aside
from draftsmith.extract.vllm_worker.client import EngineDied, EngineProcess
from draftsmith.extract.vllm_worker.spool import take_sequence
from draftsmith.extract.work import Captured, Work
from draftsmith.recipe import Recipe
from draftsmith.records import Features, Sample, TargetFacts
from draftsmith.rundir import RunPaths, hash_json
from draftsmith.store.shards import StoreWriter
from draftsmith.target import DTYPES, pick_device

LOG = "engine.log"
LIVES_WITHOUT_A_SAMPLE = 3  # an engine that dies as often before it captured anything is given up
SPOOL_BYTES = 8 << 30  # at most, and a sixteenth of the machine's memory


def capture_corpus(
    recipe: Recipe, paths: RunPaths, facts: TargetFacts, writer: StoreWriter, lengths: dict[str, int]
) -> Generator[list[Features], None, None]:
    """What the store does not have yet of a corpus, the first samples proven before any is given out.

    Raises:
        CaptureError: the states are not the reference's, or not those that the engine's own tokens follow from.
        EngineError: of `capture`.
    """
    folder, manifest = paths.stage("extract"), writer.manifest
    done = writer.committed.keys() | read_quarantine(folder).keys()
    missing = {id: tokens for id, tokens in lengths.items() if id not in done}
    if not missing:
        return
    layer_ids, dtype = (*manifest.aux_layer_ids, manifest.num_hidden_layers), DTYPES[manifest.dtype]
    first = first_samples(_of_corpus(paths, missing))
    expected = expect(facts, recipe.target, layer_ids, pick_device(recipe.target.device), dtype, first)
    longest = max(missing.values())
    plan = Plan(
        engine_args=engine_args(recipe, facts, manifest.dtype, longest),
        environment=environment(facts, longest),
        capture=recipe.extract.capture,
        layer_ids=layer_ids,
        hidden_size=manifest.hidden_size,
        folder=folder,
        stall_seconds=recipe.extract.stall_seconds,
    )

    def prove(captured: list[Captured]) -> None:
        due = expected if isinstance(expected, str) else expected.of([one.features.id for one in captured])
        writer.record_parity(measure(captured, due, facts, layer_ids, dtype))

    with closing(capture(plan, _of_corpus(paths, missing))) as stream:
        for captured in _proven(stream, {sample.id for sample in first}, folder, prove):
            yield [one.features for one in captured]


def _of_corpus(paths: RunPaths, wanted: dict[str, int]) -> Iterator[Sample]:
    return (sample for sample in read_corpus(paths.corpus) if sample.id in wanted)


def _proven(
    stream: Iterator[list[Captured]], first_ids: set[str], folder: Path, prove: Callable[[list[Captured]], None]
) -> Iterator[list[Captured]]:
    """The stream, held back until its first samples are there, or set aside, and `prove` has seen them."""
    held: list[Captured] = []
    for captured in stream:
        held += captured
        first = [one for one in held if one.features.id in first_ids]
        if len(first) == len(first_ids) or len(first) == len(first_ids - read_quarantine(folder).keys()):
            prove(first)
            yield held
            break
        yield []
    yield from stream


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


def capture(plan: Plan, samples: Iterable[Sample]) -> Generator[list[Captured], None, None]:
    """Capture samples with vLLM, in order; a sample that fails twice is left out and entered in the quarantine.

    Yields:
        What was captured, as it comes in; an empty list once a second while there is nothing, so that one may stop.

    Raises:
        EngineError: the engine does not start, dies before it has got anything done, or does nothing for too long.
    """
    room = spool_bytes() // (plan.hidden_size * len(plan.layer_ids) * 4)
    work, lives_without_a_sample = Work(samples, room), 0
    spool = spool_folder(plan.folder)
    try:
        while not work.done:
            captured_before = work.captured
            life = Life(plan, spool, work)
            try:
                yield from life.run()
            except EngineDied as death:
                error = explain_death(death, plan.log, life.log_start, work.ids)
                lives_without_a_sample = 0 if work.captured > captured_before else lives_without_a_sample + 1
                if not life.ready or lives_without_a_sample == LIVES_WITHOUT_A_SAMPLE:
                    raise error from death
                suspects = death.failure.numbers if death.failure else ()
                for number, reasons in work.lose_engine(suspects, str(error)).items():
                    set_aside(plan.folder, work.sample(number), reasons)
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

    def run(self) -> Iterator[list[Captured]]:
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
                    raise stalled(self.plan.stall_seconds, self.plan.log, self.log_start)
                yield self.work.take_ready()
            engine.end()

    def take(self, event: dict[str, Any], parts: list[list[int]]) -> None:
        if event["event"] == "ready":
            self.ready = True
        elif event["event"] == "refused":
            self.fail(event["number"], event["reason"])
        else:
            for number, token in event["samples"]:
                features, problem = self.read(number, parts)
                if features is not None:
                    self.work.settle(number, Captured(features, token))
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
            set_aside(self.plan.folder, self.work.sample(number), reasons)


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


def spool_bytes() -> int:
    """Bytes of states that may be between engine and store."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(SPOOL_BYTES, memory // 16)


def spool_folder(folder: Path) -> Path:
    """A folder in memory where there is room, else in the stage's own. It is the same for every run in that folder,
    which begins by emptying it: a run that was killed leaves nothing for longer than until it goes on."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 2 * spool_bytes():
        return memory / f"draftsmith-{hash_json(str(folder.resolve()))[:16]}"
    return folder / "spool"
