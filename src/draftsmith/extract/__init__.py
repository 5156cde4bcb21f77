"""Corpus + target → hidden states in the store."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from draftsmith import __version__
from draftsmith.errors import RequestError, StoreError
from draftsmith.layers import validate_layer_ids
from draftsmith.recipe import Recipe
from draftsmith.records import EncodedFeatures, Features, TargetFacts
from draftsmith.rundir import RunPaths, append_event, read_events

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from draftsmith.extract.from_transformers import Reference
    from draftsmith.store.manifest import Manifest
    from draftsmith.store.writer import StoreWriter

_GIB, _MIB = 1 << 30, 1 << 20
RESTARTED = "engine_restarted"  # the event
CAPTURED = {"native": "by vLLM's own method", "hooked": "by hooks on the layers"}


def run(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Capture the states of every sample of the corpus that the store does not have yet.

    Raises:
        RequestError: the layer ids do not fit the target.
        StoreError: the store there is of something else, is being written, or does not fit on the disk.
        TargetError: the target cannot be loaded.
        CaptureError: its states cannot be captured, or are not those that its logits come from; or a sample got lost.
        EngineError: the engine failed, and starting it again did not help.
        CheckFailed: more samples were set aside than `extract.max_quarantined` allows.
    """
    from draftsmith.corpus import corpus_lengths
    from draftsmith.extract.quarantine import refuse_lost, refuse_many_set_aside
    from draftsmith.store.writer import StoreWriter
    from draftsmith.target import read_facts_of_run

    facts = read_facts_of_run(paths)
    lengths = corpus_lengths(paths.require(paths.corpus, "prepare"))
    manifest = _manifest(recipe, paths, facts)
    _refuse_store_gone(paths)
    with StoreWriter.open(paths.store, manifest, recipe.extract.shard_mib * _MIB) as writer:
        if writer.lost:
            append_event(paths, "extract", "shards_lost", shards=writer.lost)
        _refuse_another_corpus(paths, writer.committed, lengths)
        missing = {id: tokens for id, tokens in lengths.items() if id not in writer.committed}
        _refuse_small_disk(paths, manifest, missing)
        rate = _capture(recipe, paths, facts, writer, lengths) if missing else None
    refuse_lost(paths.stage("extract"), writer.committed, lengths)
    refuse_many_set_aside(paths.stage("extract"), len(lengths), recipe.extract.max_quarantined)
    return _report(paths, rate)


def _manifest(recipe: Recipe, paths: RunPaths, facts: TargetFacts) -> Manifest:
    from importlib.metadata import version

    from draftsmith.corpus import corpus_metadata
    from draftsmith.extract.engine_settings import engine_version
    from draftsmith.extract.longrope import served_factors
    from draftsmith.store.manifest import Manifest, identity
    from draftsmith.target import pick_device, pick_dtype

    engine = recipe.extract.engine
    chosen = recipe.extract.aux_layer_ids or facts.aux_layer_ids
    if chosen is None or facts.num_hidden_layers is None:
        raise RequestError(
            "the target's configuration does not say how many layers it has", where="extract.aux_layer_ids"
        )
    return Manifest(
        **identity(facts),
        model=recipe.target.model,
        template_sha256=corpus_metadata(paths.corpus).get("template_sha256"),
        aux_layer_ids=validate_layer_ids(chosen, facts.num_hidden_layers),
        dtype=str(pick_dtype(recipe.target.dtype, facts, pick_device(recipe.target.device))).removeprefix("torch."),
        codec=recipe.extract.codec,
        engine=engine,
        engine_version=engine_version() if engine == "vllm" else version("transformers"),
        draftsmith_version=__version__,
        rope_factors=served_factors(recipe, facts),
    )


def _refuse_store_gone(paths: RunPaths) -> None:
    """A store that was begun and is not there is on a disk that is not there: a new one must not take its place."""
    begun = any(event["event"] == "predicted" for event in _events(paths))
    if begun and not (paths.store / "manifest.json").exists():
        raise StoreError(
            "was begun, and is not there now",
            where=str(paths.store),
            hint="mount the disk that it is on; or give --redo to extract all again",
        )


def _events(paths: RunPaths) -> list[dict[str, Any]]:
    """Of this stage, since it was begun anew."""
    own = [event for event in read_events(paths) if event.get("stage") == "extract"]
    anew = max((i for i, event in enumerate(own) if event["event"] in ("started", "redo")), default=-1)
    return own[anew + 1 :]


def _refuse_another_corpus(paths: RunPaths, committed: dict[str, int], lengths: dict[str, int]) -> None:
    foreign = [id for id, tokens in committed.items() if lengths.get(id) != tokens]
    if foreign:
        raise StoreError(
            f"has {len(foreign):,} samples, such as {foreign[0]}, that the corpus does not have in that length",
            where=str(paths.store),
            hint="give --redo to extract this corpus anew",
        )


def _refuse_small_disk(paths: RunPaths, manifest: Manifest, missing: dict[str, int]) -> None:
    from draftsmith.corpus import corpus_taught
    from draftsmith.redo import bytes_aside
    from draftsmith.store.sizes import predict_bytes

    taught = corpus_taught(paths.corpus)
    needed = predict_bytes(
        ((tokens, taught[id]) for id, tokens in missing.items()),
        aux_layers=len(manifest.aux_layer_ids),
        hidden_size=manifest.hidden_size,
        codec=manifest.codec,
    )
    free = shutil.disk_usage(paths.store).free + bytes_aside(paths, "extract")
    append_event(paths, "extract", "predicted", samples=len(missing), tokens=sum(missing.values()), bytes=needed)
    if needed > free:
        raise StoreError(
            f"{len(missing):,} samples take {needed / _GIB:,.1f} GiB, and {free / _GIB:,.1f} GiB are free",
            where=str(paths.store),
            hint="make room, set run_dir to a larger disk, extract.codec=int8 for half of bf16's bytes, or take fewer "
            "samples (prepare.sources.0.limit)",
        )


def _capture(
    recipe: Recipe, paths: RunPaths, facts: TargetFacts, writer: StoreWriter, lengths: dict[str, int]
) -> float:
    """Work through the corpus; returns tokens per second, once the target was loaded."""
    from contextlib import closing

    from draftsmith.progress import progress
    from draftsmith.redo import delete_aside
    from draftsmith.signals import check_stop, stop_requested

    done = sum(writer.committed.values())
    with (
        progress("extract", sum(lengths.values()), "tokens", done=done) as bar,
        closing(_source(recipe, paths, facts, writer, lengths, bar.restart)) as source,
    ):
        for found in source:
            delete_aside(paths, "extract")  # the target is loaded and proven, and the new store may need the room
            committed = writer.add(found)
            bar.advance(sum(len(f.input_ids) for f in found))
            if stop_requested():
                writer.flush()
                check_stop("extract")
            if committed:
                tokens = sum(writer.committed.values())
                append_event(paths, "extract", "shard", samples=len(writer.committed), tokens=tokens)
        writer.flush()
        return bar.rate


def _source(
    recipe: Recipe, paths: RunPaths, facts: TargetFacts, writer: StoreWriter, lengths: dict[str, int],
    begin: Callable[[], None],
) -> Generator[Sequence[Features | EncodedFeatures], None, None]:  # fmt: skip
    """What the store does not have yet; `begin` is called once the target is ready."""
    if recipe.extract.engine == "vllm":
        from draftsmith.extract.from_vllm import capture_corpus

        return capture_corpus(recipe, paths, facts, writer, lengths, begin)
    return _capture_with_transformers(recipe, paths, facts, writer, begin)


def _capture_with_transformers(
    recipe: Recipe, paths: RunPaths, facts: TargetFacts, writer: StoreWriter, begin: Callable[[], None]
) -> Generator[list[Features], None, None]:
    from draftsmith.corpus import read_corpus
    from draftsmith.extract.from_transformers import batches

    reference = _proven_reference(recipe, paths, facts, writer)
    begin()
    for batch in batches(read_corpus(paths.corpus), recipe.extract.batch_tokens):
        if not all(sample.id in writer.committed for sample in batch):
            yield [f for f in reference.features(batch) if f.id not in writer.committed]


def _proven_reference(recipe: Recipe, paths: RunPaths, facts: TargetFacts, writer: StoreWriter) -> Reference:
    """The target, ready to capture from, and its parity entered in the manifest."""
    from itertools import islice

    from draftsmith.corpus import corpus_lengths, read_corpus
    from draftsmith.extract.from_transformers import Reference, measure_parity
    from draftsmith.extract.longrope import model_tokens
    from draftsmith.target import load_head, load_target, pick_device, pick_dtype, take_long_factors

    device = pick_device(recipe.target.device)
    dtype = pick_dtype(recipe.target.dtype, facts, device)
    model_tokens(recipe, facts, max(corpus_lengths(paths.corpus).values()))
    model = load_target(facts, recipe.target, device, dtype)
    if writer.manifest.rope_factors == "long":
        take_long_factors(model)
    reference = Reference(model, facts, writer.manifest.aux_layer_ids)
    parity = measure_parity(reference, load_head(facts, device, dtype), list(islice(read_corpus(paths.corpus), 4)))
    writer.record_parity(parity)
    return reference


def _report(paths: RunPaths, tokens_per_second: float | None) -> dict[str, Any]:
    from draftsmith.extract.quarantine import read_quarantine
    from draftsmith.store.shards import Store

    store, set_aside = Store.open(paths.store), read_quarantine(paths.stage("extract"))
    restarts = [event["what"] for event in _events(paths) if event["event"] == RESTARTED]
    tokens, size = sum(store.lengths), sum(entry.bytes for entry in store.entries)
    parity = store.manifest.parity or {}
    rate = "" if tokens_per_second is None else f", {tokens_per_second:,.0f} tokens/s"
    return {
        "samples": len(store),
        "tokens": tokens,
        "bytes": size,
        "shards": len(store.entries),
        "tokens_per_second": None if tokens_per_second is None else round(tokens_per_second, 1),
        "aux_layer_ids": list(store.manifest.aux_layer_ids),
        "parity": parity,
        "set_aside": {id: reasons[-1].splitlines()[0] for id, reasons in set_aside.items()},
        "engine_restarts": len(restarts),
        "summary": [
            f"extract: {len(store):,} samples, {tokens:,} tokens, {size / _GIB:,.2f} GiB{rate}",
            f"  layer ids {', '.join(map(str, store.manifest.aux_layer_ids))} and {store.manifest.num_hidden_layers}; "
            + _say_parity(parity),
            *([f"  {len(set_aside):,} samples set aside, which failed twice"] if set_aside else []),
            *(
                [f"  engines that died and were started again: {len(restarts)}, the last: {restarts[-1]}"]
                if restarts
                else []
            ),
        ],
    }


def _say_parity(parity: dict[str, Any]) -> str:
    if "head_error" in parity:
        return f"the target's own logits follow from the last to {parity['head_error']:.1e}"
    said, records = f"not compared with the reference: {parity.get('reason', 'not measured')}", [parity]
    records += parity.get("later", {}).values()
    compared = [record["by_layer"] for record in records if "by_layer" in record]
    if compared:
        worst = max(figures["median"] for by_layer in compared for figures in by_layer.values())
        said = f"the reference's to {worst:.1e}"
    if len(records) > 1:
        said += f", compared in {len(compared)} of {len(records)} runs"
    if parity.get("capture"):
        said = f"captured {CAPTURED[parity['capture']]}; {said}"
    if parity.get("next_tokens"):
        said += f"; {parity['next_token_agreement']:.0%} of the engine's next tokens follow from the last"
    return said
