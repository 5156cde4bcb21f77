import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith import progress, target
from draftsmith.corpus import write_corpus
from draftsmith.errors import CaptureError, Interrupted, RequestError, StoreError
from draftsmith.extract import run
from draftsmith.extract.from_transformers import Reference
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Recipe, Target, parse
from draftsmith.records import Sample
from draftsmith.rundir import RunPaths, read_events, write_json
from draftsmith.signals import graceful_stop
from draftsmith.store.manifest import identity
from draftsmith.store.shard_file import taught
from draftsmith.store.shards import Store
from draftsmith.target import load_target
from tests.store.random_store import assert_same, largest_error

LENGTHS = (12, 400, 3, 250, 500, 310, 77, 180, 330, 500, 290, 450, 410, 5, 390, 480, 500, 440, 370, 350, 260)


def some_samples(lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [
        Sample(
            id=f"s{number}",
            conversation_id=f"c{number}",
            domain="chat",
            split="validation" if number == 3 else "train",
            input_ids=torch.randint(3, 320, (length,), generator=generator).tolist(),
            loss_mask=[position % 2 for position in range(length)],
        )
        for number, length in enumerate(lengths)
    ]


def prepared(folder: Path, target: Path, **extract: Any) -> tuple[Recipe, RunPaths]:
    """A run whose probe and corpus are there, and whose store takes several batches a shard and several shards."""
    settings = {"codec": "fp32", "batch_tokens": 1000, "shard_mib": 1} | extract
    recipe = parse({"name": "t", "run_dir": str(folder), "target": {"model": str(target)}, "extract": settings})
    paths = RunPaths(folder)
    write_json(paths.facts, read_facts(str(target)).to_json())
    write_corpus(paths.corpus, some_samples(), {"template_sha256": "m0"})
    return recipe, paths


def contents(paths: RunPaths) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(paths.store.iterdir()) if path.name != ".lock"}


def test_every_sample_is_in_the_store_once_with_the_targets_states(tmp_path: Path, tiny_target: Path) -> None:
    recipe, paths = prepared(tmp_path, tiny_target)
    run(recipe, paths)
    store = Store.open(paths.store)
    facts = read_facts(str(tiny_target))
    model = load_target(facts, Target(model=str(tiny_target)), torch.device("cpu"), torch.float32)
    reference = Reference(model, facts, (2, 4, 5))
    by_id = {sample.id: sample for sample in some_samples()}
    assert sorted(store.sample_ids) == sorted(by_id)
    for found in store:
        (alone,) = reference.features([by_id[found.id]])
        assert found.input_ids.tolist() == by_id[found.id].input_ids
        assert found.loss_mask.tolist() == [bool(own) for own in by_id[found.id].loss_mask]
        assert found.split == by_id[found.id].split
        assert largest_error(found.aux, alone.aux) < 1e-5
        kept = taught(found.loss_mask)
        assert largest_error(found.last[kept], alone.last[kept]) < 1e-5
        assert not found.last[~kept].any()


def test_bf16_holds_the_same_states_rounded(tmp_path: Path, tiny_target: Path) -> None:
    stores = {}
    for codec in ("fp32", "bf16"):
        recipe, paths = prepared(tmp_path / codec, tiny_target, codec=codec)
        run(recipe, paths)
        stores[codec] = Store.open(paths.store)
    for exact, rounded in zip(stores["fp32"], stores["bf16"], strict=True):
        assert torch.equal(rounded.aux, exact.aux.bfloat16())
        assert torch.equal(rounded.last, exact.last.bfloat16())


def test_the_report_and_the_manifest_say_what_was_done(tmp_path: Path, tiny_target: Path) -> None:
    recipe, paths = prepared(tmp_path, tiny_target)
    report = run(recipe, paths)
    assert (report["samples"], report["tokens"]) == (len(LENGTHS), sum(LENGTHS))
    assert report["bytes"] == sum(path.stat().st_size for path in paths.store.glob("shard-*"))
    assert report["tokens_per_second"] > 0
    assert report["parity"]["head_error"] < 1e-5
    manifest = Store.open(paths.store, expect=identity(read_facts(str(tiny_target)))).manifest
    assert manifest.aux_layer_ids == (2, 4, 5)
    assert manifest.template_sha256 == "m0"
    assert manifest.parity == report["parity"]
    assert not manifest.final_norm_applied


def test_the_rate_is_that_of_the_capture_and_told_off_a_terminal(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = 0
    load, features = target.load_target, Reference.features

    def load_long(*args: Any) -> Any:
        nonlocal seconds
        seconds += 1000
        return load(*args)

    def capture(self: Reference, samples: Any) -> Any:
        nonlocal seconds
        seconds += 30
        return features(self, samples)

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: seconds))
    monkeypatch.setattr(target, "load_target", load_long)
    monkeypatch.setattr(Reference, "features", capture)
    report = run(*prepared(tmp_path, tiny_target))
    rate = sum(LENGTHS) / (seconds - 1000)
    assert report["tokens_per_second"] == round(rate, 1)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("extract: ")]
    assert len(told) == 1 + (seconds - 1000) // 60, "at once after so long, and then once a minute"
    assert re.fullmatch(r"extract: [\d,]+ of 6,507 tokens, [\d.]+ tokens/s, 0:\d\d:\d\d left", told[0])


def test_the_predicted_bytes_are_those_of_the_tensors_written(tmp_path: Path, tiny_target: Path) -> None:
    recipe, paths = prepared(tmp_path, tiny_target)
    report = run(recipe, paths)
    (predicted,) = [event["bytes"] for event in read_events(paths) if event["event"] == "predicted"]
    header = 700 * report["shards"]
    assert predicted <= report["bytes"] <= predicted + header


def test_batches_of_another_size_make_the_same_states(tmp_path: Path, tiny_target: Path) -> None:
    stores = []
    for batch_tokens in (1, 4000):
        recipe, paths = prepared(tmp_path / str(batch_tokens), tiny_target, batch_tokens=batch_tokens)
        run(recipe, paths)
        stores.append({found.id: found for found in Store.open(paths.store)})
    for id, found in stores[0].items():
        kept = taught(found.loss_mask)
        assert largest_error(found.last[kept], stores[1][id].last[kept]) < 1e-5


# ---- stopping and going on --------------------------------------------------------------------------------------

KILL_AT_EACH_CALL = """
import os, signal, sys
from pathlib import Path
import torch
from draftsmith import extract
from draftsmith.recipe import load
from draftsmith.rundir import RunPaths
import draftsmith.extract.from_transformers, transformers.models.llama.modeling_llama
torch.set_num_threads(1)

def work(folder, calls):  # in a process of its own, killed at its `calls`-th call that changes the store
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1]
    count = 0
    def count_calls(event, arguments):
        nonlocal count
        if event in ("open", "os.rename", "os.remove", "os.truncate") and "store" in str(arguments[0]):
            count += 1
            if count == calls:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count_calls)
    extract.run(load(sys.argv[1], [f"run_dir={folder}"]), RunPaths(folder))
    os._exit(0)

for folder, calls in zip(map(Path, sys.argv[2:]), (5, 20, 25), strict=True):
    assert work(folder, calls) != 0
    assert work(folder, -1) == 0
"""


def test_a_run_killed_anywhere_resumes_to_the_same_bytes(tmp_path: Path, tiny_target: Path) -> None:
    recipe, whole = prepared(tmp_path / "whole", tiny_target)
    run(recipe, whole)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.model_dump_json(exclude={"run_dir"}))  # JSON is YAML
    killed = [prepared(tmp_path / f"killed-{number}", tiny_target)[1] for number in range(3)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    arguments = [file, *(paths.root for paths in killed)]
    subprocess.run([sys.executable, "-c", KILL_AT_EACH_CALL, *arguments], env=environment, check=True)
    for paths in killed:
        assert contents(paths) == contents(whole), paths.root.name


def test_a_stop_on_request_keeps_what_was_captured_and_goes_on_to_the_same_states(
    tmp_path: Path, tiny_target: Path
) -> None:
    recipe, whole = prepared(tmp_path / "whole", tiny_target)
    run(recipe, whole)
    recipe, paths = prepared(tmp_path / "stopped", tiny_target, shard_mib=64)
    with graceful_stop():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="nothing is lost"):
            run(recipe, paths)
    assert 0 < len(Store.open(paths.store)) < len(LENGTHS)
    run(recipe, paths)
    unbroken = {found.id: found for found in Store.open(whole.store)}
    resumed = Store.open(paths.store)
    assert sorted(resumed.sample_ids) == sorted(unbroken)
    for found in resumed:
        assert_same(found, unbroken[found.id])


def test_a_shard_cut_short_is_extracted_again_and_no_other(tmp_path: Path, tiny_target: Path) -> None:
    recipe, paths = prepared(tmp_path, tiny_target)
    run(recipe, paths)
    before = contents(paths)
    assert len(before) > 4
    os.truncate(paths.store / "shard-00001.safetensors", 1000)
    run(recipe, paths)
    after = contents(paths)
    (name,) = after.keys() - before.keys()
    assert after[name] == before["shard-00001.safetensors"]
    assert all(after[kept] == before[kept] for kept in before if kept.startswith("shard") and kept in after)
    assert [event["shards"] for event in read_events(paths) if event["event"] == "shards_lost"] == [
        ["shard-00001.safetensors"]
    ]


def test_a_finished_store_is_reported_without_the_targets_weights(tmp_path: Path, tiny_target: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    recipe, paths = prepared(tmp_path / "run", target)
    first = run(recipe, paths)
    (target / "model.safetensors").unlink()
    second = run(recipe, paths)
    assert second["tokens_per_second"] is None
    assert {**first, "tokens_per_second": None, "summary": None} == {**second, "summary": None}


def test_a_sample_that_got_lost_on_the_way_is_named_and_captured_by_the_next_run(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, paths = prepared(tmp_path, tiny_target)
    features = Reference.features
    with monkeypatch.context() as planted:
        planted.setattr(Reference, "features", lambda self, of: [f for f in features(self, of) if f.id != "s7"])
        with pytest.raises(CaptureError, match="1 of 21 samples, such as s7, are neither in the store nor set aside"):
            run(recipe, paths)
    assert run(recipe, paths)["samples"] == len(LENGTHS)


# ---- what is refused --------------------------------------------------------------------------------------------


def test_other_layer_ids_than_the_stores_are_refused_by_name(tmp_path: Path, tiny_target: Path) -> None:
    run(*prepared(tmp_path, tiny_target))
    with pytest.raises(StoreError, match=r"aux_layer_ids is \[2, 4, 5\], and \[1, 4, 5\] is needed"):
        run(*prepared(tmp_path, tiny_target, aux_layer_ids=[1, 4, 5]))


def test_layer_ids_that_the_target_does_not_have_are_refused(tmp_path: Path, tiny_target: Path) -> None:
    with pytest.raises(RequestError, match="layer id 8"):
        run(*prepared(tmp_path, tiny_target, aux_layer_ids=[1, 4, 8]))


def test_another_corpus_than_the_stores_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    recipe, paths = prepared(tmp_path, tiny_target)
    run(recipe, paths)
    write_corpus(paths.corpus, some_samples((12, 401, *LENGTHS[2:])), {"template_sha256": "m0"})
    with pytest.raises(StoreError, match="1 samples, such as s1"):
        run(recipe, paths)


def test_a_disk_that_cannot_hold_the_states_is_refused_before_the_target_is_loaded(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    recipe, paths = prepared(tmp_path, target)
    (target / "model.safetensors").unlink()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StoreError, match=r"21 samples take .* GiB are free"):
        run(recipe, paths)
    assert not list(paths.store.glob("shard-*"))


def test_a_store_whose_disk_is_not_there_is_not_begun_anew(tmp_path: Path, tiny_target: Path) -> None:
    recipe, paths = prepared(tmp_path / "run", tiny_target)
    run(recipe, paths)
    paths.store.rename(tmp_path / "elsewhere")
    for left in (None, paths.store):  # nothing, or the empty folder that a disk is mounted on
        if left:
            left.mkdir()
        with pytest.raises(StoreError, match=r"was begun, and is not there now\n.*mount the disk.*--redo"):
            run(recipe, paths)
    assert list(paths.store.iterdir()) == []
    paths.store.rmdir()
    (tmp_path / "elsewhere").rename(paths.store)
    assert run(recipe, paths)["samples"] == len(LENGTHS)
