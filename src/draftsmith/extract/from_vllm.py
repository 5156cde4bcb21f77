"""Capture through vLLM: the driver, which feeds an engine in a process of its own and takes what it captures.

    corpus → driver → (pipe) → engine process → vLLM's workers → (spool) → driver → store

The spool is a folder in memory where there is one. Nothing in it counts: a sample is done when the store's ledger has
it. A sample that fails twice is set aside in `quarantine.jsonl`, and the run goes on; an engine that dies is started
again, as long as it gets anything done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path

from draftsmith.corpus import read_corpus
from draftsmith.errors import EngineError
from draftsmith.extract import RESTARTED
from draftsmith.extract.engine_settings import device_shares, engine_args, environment
from draftsmith.extract.engines import Engines, Plan
from draftsmith.extract.parity import SEQUENCES, expect, first_samples, measure
from draftsmith.extract.quarantine import read_quarantine
from draftsmith.extract.work import Captured, Work
from draftsmith.recipe import Recipe
from draftsmith.records import EncodedFeatures, Features, Sample, TargetFacts
from draftsmith.rundir import RunPaths, append_event
from draftsmith.store.codec import CODECS
from draftsmith.store.writer import StoreWriter
from draftsmith.target import DTYPES, pick_device


def capture_corpus(
    recipe: Recipe, paths: RunPaths, facts: TargetFacts, writer: StoreWriter, lengths: dict[str, int],
    begin: Callable[[], None],
) -> Generator[list[Features | EncodedFeatures], None, None]:  # fmt: skip
    """What the store does not have yet of a corpus, the first samples proven before any is given out.

    Args:
        begin: called once, when all engines are ready.

    Raises:
        CaptureError: the states are not the reference's, or not those that the engine's own tokens follow from.
        EngineError: of `Engines.run`.
    """
    folder, manifest = paths.stage("extract"), writer.manifest
    done = writer.committed.keys() | read_quarantine(folder).keys()
    missing = {id: tokens for id, tokens in lengths.items() if id not in done}
    if not missing:
        return
    layer_ids, dtype = (*manifest.aux_layer_ids, manifest.num_hidden_layers), DTYPES[manifest.dtype]
    longest = max(missing.values())
    plan = Plan(
        engine_args=engine_args(recipe, facts, manifest.dtype, longest),
        environment=environment(facts, longest),
        capture=recipe.extract.capture,
        layer_ids=layer_ids,
        hidden_size=manifest.hidden_size,
        folder=folder,
        stall_seconds=recipe.extract.stall_seconds,
        devices=device_shares(recipe),
        codec=recipe.extract.codec if CODECS[recipe.extract.codec].error else None,
    )
    first = first_samples(_of_corpus(paths, missing), recipe.extract.max_num_batched_tokens)
    device = pick_device(recipe.target.device)
    expected = expect(facts, recipe.target, layer_ids, device, dtype, first, manifest.rope_factors)

    with Engines(plan, partial(_tell_of_restart, paths)) as engines:

        def prove(captured: list[Captured]) -> None:
            due = expected if isinstance(expected, str) else expected.of([one.features.id for one in captured])
            figures = measure(captured, due, facts, layer_ids, dtype, plan.codec)
            writer.record_parity({"capture": engines.capture, **figures})

        begun = False
        stream = engines.run(Work(_of_corpus(paths, missing), plan.room_tokens))
        for found in _proven(stream, {sample.id for sample in first}, folder, prove):
            if engines.begun and not begun:
                begin()
                begun = True
            yield [one.features for one in found]
        engines.end()


def _tell_of_restart(paths: RunPaths, error: EngineError) -> None:
    """At once, since a large target takes long to load; the next life of the engine deletes what the last one wrote."""
    said = {"what": error.what, "where": error.where, "hint": error.hint, "detail": error.detail}
    append_event(paths, "extract", RESTARTED, **said)
    hint = f"\n  hint: {error.hint}" if error.hint else ""
    print(f"{error.where}: the engine died and is started again: {error.what}{hint}", file=sys.stderr)


def _of_corpus(paths: RunPaths, wanted: dict[str, int]) -> Iterator[Sample]:
    return (sample for sample in read_corpus(paths.corpus) if sample.id in wanted)


def _proven(
    stream: Iterator[list[Captured]], first_ids: set[str], folder: Path, prove: Callable[[list[Captured]], None]
) -> Iterator[list[Captured]]:
    """The stream, held back until `prove` has seen its first samples: those that were not set aside, or, where all of
    them were, as many others."""
    held: list[Captured] = []
    for captured in stream:
        held += captured
        first, due = [one for one in held if one.features.id in first_ids], len(first_ids)
        if len(first) < due:
            due = len(first_ids - read_quarantine(folder).keys())
        if due == 0:
            first, due = held[:SEQUENCES], SEQUENCES
        if len(first) == due:
            break
        yield []
    if held:
        prove(first)
        yield held
    yield from stream
