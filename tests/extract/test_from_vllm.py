"""Capture through the real engine. Engines start slowly: most tests here share one, or start several at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import extract
from draftsmith.corpus import write_corpus
from draftsmith.errors import CaptureError, EngineError
from draftsmith.extract import RESTARTED
from draftsmith.extract.engine_errors import explain_death
from draftsmith.extract.engines import Engines, spool_folder
from draftsmith.extract.parity import SEQUENCES, TOKENS, Expected, compare, expect
from draftsmith.extract.quarantine import read_quarantine
from draftsmith.extract.vllm_worker.client import EngineDied
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Recipe, Target
from draftsmith.records import Features, Sample
from draftsmith.rundir import RunPaths, append_event, read_events, write_json
from draftsmith.store.codec import CODECS
from draftsmith.store.shard_file import taught
from draftsmith.store.shards import Store
from tests.extract import scale
from tests.extract.vllm_faults import (
    FLIPPED,
    HANGING,
    HAPPENED,
    NORMED,
    OTHER_EMBEDDINGS,
    POISON,
    REORDERED,
)
from tests.extract.vllm_runs import (
    PYTHONPATH,
    ROUNDING,
    beginning_with,
    captured,
    captured_at_once,
    errors,
    mixed_samples,
    plan_for,
    recipe_for,
    run_on,
    sample,
    states_of,
)
from tests.store.random_store import largest_error

pytestmark = pytest.mark.vllm
FAULTS = "tests.extract.vllm_faults"
CPU = torch.device("cpu")
EVERY_LAYER = (1, 2, 3, 4, 5, 6, 7, 8)
SMALL_CACHE = 8 << 20  # bytes


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scale.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def workers_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


# ---- the states are the reference's, and those that are not are found ---------------------------------------------


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("happened")


@pytest.fixture(scope="module")
def engines(llama: Path, happened: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engines, Engines]]:
    """One that captures every layer natively, and one by hooks, both started at once and used by many tests.

    The first takes prefixes from its cache, which is so small that requests are preempted; the second's worker is in
    a process of its own, as it is on a GPU.
    """
    small = {
        "enable_prefix_caching": True,
        "block_size": 32,
        "long_prefill_token_threshold": 16,
        "scheduler_reserve_full_isl": False,
        "worker_cls": f"{FAULTS}.WrongWorker",
    }
    folder = tmp_path_factory.mktemp("native")
    native = plan_for(llama, folder, stall_seconds=8.0, kv_cache_memory_bytes=SMALL_CACHE, engine_args=small)
    native = replace(native, layer_ids=EVERY_LAYER, environment={**native.environment, HAPPENED: str(happened)})
    hooked = plan_for(
        llama,
        tmp_path_factory.mktemp("hooked"),
        capture="hooked",
        engine_args={"worker_cls": f"{FAULTS}.WrongWorker"},
    )
    own_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    hooked = replace(hooked, environment={**hooked.environment, **own_process, HAPPENED: str(happened)})
    with Engines(native) as one, Engines(hooked) as other:
        yield one, other


@pytest.fixture(scope="module")
def native(engines: tuple[Engines, Engines]) -> dict[str, torch.Tensor]:
    return states_of(run_on(engines[0], mixed_samples(200)))


def test_no_state_is_lost_or_swapped_whatever_is_cut_preempted_and_taken_from_the_prefix_cache(
    llama: Path, native: dict[str, torch.Tensor], happened: Path
) -> None:
    samples = mixed_samples(200)
    assert list(native) == [one.id for one in samples]
    assert errors(llama, native, samples, EVERY_LAYER).max() < ROUNDING
    assert {path.name for path in happened.iterdir()} == {"cached", "preempted"}


def test_hooks_give_the_states_that_the_engines_own_method_gives(
    engines: tuple[Engines, Engines], native: dict[str, torch.Tensor]
) -> None:
    samples = mixed_samples(200)
    hooked = states_of(run_on(engines[1], samples))
    assert list(hooked) == [one.id for one in samples]
    columns = [EVERY_LAYER.index(id) for id in engines[1].plan.layer_ids]
    for id, states in hooked.items():
        assert torch.allclose(states, native[id][:, columns], rtol=1e-4, atol=1e-4), id


@pytest.fixture(scope="module")
def short() -> list[Sample]:
    """Of which the engine runs one in a step, or several that begin with the same token."""
    return [replace(one, input_ids=one.input_ids[:60], loss_mask=one.loss_mask[:60]) for one in mixed_samples(12)]


def expected_of(model: Path, samples: Sequence[Sample], layer_ids: Sequence[int]) -> Expected:
    found = expect(read_facts(str(model)), Target(model=str(model)), layer_ids, CPU, torch.float32, samples)
    assert isinstance(found, Expected)
    return found


def only(found: Sequence[Features], columns: Sequence[int]) -> list[Features]:
    """With the last of these columns of the auxiliary states and `last` for `last`."""
    return [replace(one, aux=one.aux[:, columns]) for one in found]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (FLIPPED, "layer id 1: .* differs from the reference's"),
        (NORMED, "layer id 8: .* nearer to the last state after the final norm"),
        (OTHER_EMBEDDINGS, "layer id 1: .* differs from the reference's"),
    ],
    ids=["rows in another order", "final norm applied", "wrong embedding lookup"],
)
def test_parity_finds_what_the_engine_captures_wrongly(
    engines: tuple[Engines, Engines], llama: Path, short: list[Sample], fault: int, message: str
) -> None:
    wrong = beginning_with(fault, short)
    found = run_on(engines[0], wrong)
    with pytest.raises(CaptureError, match=message):
        compare(found, expected_of(llama, wrong, EVERY_LAYER), EVERY_LAYER, torch.bfloat16, experts=False)


def test_parity_finds_layers_one_off_and_a_lost_request(
    engines: tuple[Engines, Engines], llama: Path, short: list[Sample]
) -> None:
    ids = (2, 4, 5, 8)
    found, expected = run_on(engines[0], short), expected_of(llama, short, ids)
    right = only(found, [EVERY_LAYER.index(id) for id in ids[:-1]])
    report = compare(right, expected, ids, torch.float32, experts=False)
    assert max(figures["max"] for figures in report["by_layer"].values()) < ROUNDING
    for shift, nearest in ((1, 3), (-1, 1)):
        shifted = only(found, [EVERY_LAYER.index(id + shift) for id in ids[:-1]])
        with pytest.raises(CaptureError, match=rf"layer id 2: .* nearer to layer id {nearest}"):
            compare(shifted, expected, ids, torch.bfloat16, experts=False)
    with pytest.raises(CaptureError, match="1 samples were not captured: s11"):
        compare(right[:-1], expected, ids, torch.float32, experts=False)


def test_parity_finds_a_layer_whose_arguments_were_taken_in_another_order(
    engines: tuple[Engines, Engines], llama: Path, short: list[Sample]
) -> None:
    wrong, ids = beginning_with(REORDERED, short), engines[1].plan.layer_ids
    with pytest.raises(CaptureError, match=r"layer id 2: .* differs from the reference's"):
        compare(run_on(engines[1], wrong), expected_of(llama, wrong, ids), ids, torch.bfloat16, experts=False)


def test_parity_finds_the_queries_that_vllm_leaves_unrotated_on_a_cpu(tmp_path: Path) -> None:
    model = scale.deepseek_v3(tmp_path / "model", rope="default")
    samples = mixed_samples(24)
    native_rotation = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
    plans = [
        plan_for(model, tmp_path / name, max_num_batched_tokens=512, engine_args=settings)
        for name, settings in (("wrong", {}), ("right", native_rotation))
    ]
    wrong, right = captured_at_once(samples, *plans)
    assert errors(model, right, samples).quantile(0.99) < ROUNDING
    ids = plans[0].layer_ids
    features = [
        Features(one.id, one.domain, one.split, torch.empty(0), torch.empty(0), states[:, :-1], states[:, -1])
        for one, states in zip(samples, wrong.values(), strict=True)
    ]
    with pytest.raises(CaptureError, match="differs from the reference's"):
        compare(features, expected_of(model, samples, ids), ids, torch.float32, experts=True)


# ---- what goes wrong inside is told, once -----------------------------------------------------------------------


def test_an_engine_that_hangs_is_ended_and_said_to_be_silent(
    engines: tuple[Engines, Engines], native: dict[str, torch.Tensor]
) -> None:
    """The last of those that use this engine."""
    hanging = beginning_with(HANGING, [sample(0, [20] * 10)])
    with pytest.raises(EngineError, match="has said nothing for 8 seconds") as raised:
        run_on(engines[0], hanging)
    assert "extract.stall_seconds" in str(raised.value.hint)
    assert "without --redo" in str(raised.value.hint)


def test_an_engine_that_hangs_while_it_starts_is_ended_with_what_it_wrote(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\nprint('asleep', flush=True)\ntime.sleep(600)\n")
    monkeypatch.setattr("draftsmith.extract.engines.START_STALL_SECONDS", 2.0)
    plan = plan_for(llama, tmp_path, stall_seconds=1.0)
    plan = replace(plan, environment={**plan.environment, "PYTHONPATH": str(tmp_path)})
    with pytest.raises(EngineError, match="nothing for 2 seconds, and is not ready yet") as raised:
        captured(plan, mixed_samples(8))
    assert raised.value.detail == "asleep"


def test_an_exception_in_a_worker_process_is_reported_with_type_place_samples_and_traceback(
    engines: tuple[Engines, Engines],
) -> None:
    """The last of those that use the other engine, whose worker is in a process of its own."""
    (engine,) = engines[1].engines
    engine.send(7, beginning_with(POISON, [sample(0, [20] * 10)])[0])
    with pytest.raises(EngineDied) as death:
        while True:
            engine.process.receive()
    error = explain_death(death.value, engine.log, engine.log_start, lambda numbers: [f"s{n}" for n in numbers])
    text = str(error)
    assert error.what == "RuntimeError, with no message"
    assert error.where == "extract, worker 0, in execute_model, model.layers.3.mlp, samples s7"
    assert "in fail\n    raise RuntimeError" in text
    assert text.count("Traceback") == 1


def test_a_sample_that_kills_its_engine_twice_is_set_aside_and_two_engines_lose_and_double_none_of_the_others(
    llama: Path, tmp_path: Path
) -> None:
    samples = beginning_with(POISON, mixed_samples(40), [10])
    plan = plan_for(llama, tmp_path, data_parallel_size=2, engine_args={"worker_cls": f"{FAULTS}.RaisingWorker"})
    with Engines(plan) as engines:
        states = states_of(run_on(engines, samples))
        assert all(engine.captured for engine in engines.engines)
        engines.end()
    others = [one for one in samples if one.id != "s10"]
    assert list(states) == [one.id for one in others]
    assert errors(llama, states, others).max() < ROUNDING
    ((id, reasons),) = read_quarantine(tmp_path).items()
    assert id == "s10"
    assert len(reasons) == 2
    assert all("RuntimeError, with no message" in reason and "raise RuntimeError" in reason for reason in reasons)
    assert not any(spool_folder(tmp_path, engine).exists() for engine in range(2))


def test_an_engine_that_does_not_start_says_by_how_much_memory_is_short_and_what_to_change(
    llama: Path, tmp_path: Path
) -> None:
    plan = plan_for(llama, tmp_path, kv_cache_memory_bytes=1 << 20)
    with pytest.raises(EngineError, match=r"(?s)needed.*available KV cache memory") as raised:
        captured(plan, mixed_samples(8))
    assert "extract.kv_cache_memory_bytes" in str(raised.value.hint)


# ---- the stage --------------------------------------------------------------------------------------------------


def prepared(folder: Path, model: Path, samples: list[Sample], **extract: Any) -> tuple[Recipe, RunPaths]:
    recipe, paths = recipe_for(model, shard_mib=1, **extract), RunPaths(folder)
    write_json(paths.facts, read_facts(str(model)).to_json())
    write_corpus(paths.corpus, samples, {"template_sha256": "m0"})
    return recipe.model_copy(update={"run_dir": folder}), paths


def test_each_restart_of_an_engine_is_told_at_once_and_stays_on_record(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty = {"worker_cls": f"{FAULTS}.FullWorker"}
    recipe, paths = prepared(tmp_path / "run", llama, mixed_samples(24), engine_args=faulty)
    append_event(paths, "extract", RESTARTED, what="in a run that was begun anew since")
    append_event(paths, "extract", "started")
    report = extract.run(recipe, paths)
    assert report["samples"] == 24
    told = [line for line in capsys.readouterr().err.splitlines() if "is started again" in line or "hint:" in line]
    (event,) = [event for event in read_events(paths) if event["event"] == RESTARTED][1:]
    assert event["where"].startswith("extract, worker 0, in execute_model, samples s")
    assert "extract.max_num_batched_tokens" in event["hint"]
    assert "raise torch.OutOfMemoryError" in event["detail"]
    what = "torch.OutOfMemoryError: CUDA out of memory"
    assert told == [f"{event['where']}: the engine died and is started again: {what}", f"  hint: {event['hint']}"]
    assert report["engine_restarts"] == 1
    assert report["summary"][-1] == f"  engines that died and were started again: 1, the last: {what}"


def test_where_all_that_the_reference_ran_is_set_aside_the_others_are_proven_by_the_engines_tokens(
    llama: Path, tmp_path: Path
) -> None:
    long = sample(99, [20 + position % 400 for position in range(TOKENS)])  # that nothing else is compared with
    recipe, paths = prepared(
        tmp_path / "run", llama, [long, *mixed_samples(24)], engine_args={"max_model_len": 600}, max_quarantined=0.05
    )
    report = extract.run(recipe, paths)
    assert list(report["set_aside"]) == ["s99"]
    assert report["engine_restarts"] == 0, "an engine refuses a sample that is too long, and does not die of it"
    assert report["samples"] == 24
    assert report["parity"]["reason"] == "each sample that the reference ran was set aside"
    assert report["parity"]["next_tokens"] == SEQUENCES
    assert report["parity"]["next_token_agreement"] > 0.9


KILLING = """
import os, random, signal, sys
from pathlib import Path
from draftsmith import extract
from draftsmith.extract.vllm_worker.client import EngineProcess
from draftsmith.recipe import load
from draftsmith.rundir import RunPaths

chance, victims = random.Random(int(sys.argv[3])), sys.argv[4:]
left = chance.randrange(40)  # things done to files before the next victim dies

def kill(event, arguments):
    global left
    if not victims or not engines or event not in ("os.rename", "os.remove", "open"):
        return
    if not any(part in str(arguments[0]) for part in ("/store/", "/draftsmith-", "/spool-")):
        return
    left -= 1
    if left < 0:
        left = chance.randrange(40)
        os.kill(os.getpid() if victims.pop(0) == "driver" else engines[-1], signal.SIGKILL)

engines, start = [], EngineProcess.__init__

def note(process, *arguments):
    start(process, *arguments)
    engines.append(process._process.pid)

EngineProcess.__init__ = note
sys.addaudithook(kill)
extract.run(load(sys.argv[1], [f"run_dir={sys.argv[2]}"]), RunPaths(Path(sys.argv[2])))
"""


def run_with_kills(recipe: Recipe, paths: RunPaths, seed: int, kills: Sequence[str]) -> None:
    """Extract in processes that are killed with signal 9, until one is not."""
    file = paths.root.with_suffix(".yaml")
    file.write_text(recipe.model_dump_json(exclude={"run_dir"}))  # JSON is YAML
    left = list(kills)
    while True:
        lives = left[: left.index("driver") + 1] if "driver" in left else left
        driver = subprocess.run(
            [sys.executable, "-c", KILLING, file, paths.root, str(seed + len(left)), *lives],
            env=os.environ,
            check=False,
            capture_output=True,
            text=True,
        )
        left = left[len(lives) :]
        if driver.returncode != -9:
            assert driver.returncode == 0, driver.stderr
            assert not left
            return


def assert_unbroken(paths: RunPaths, samples: list[Sample], native: dict[str, torch.Tensor]) -> None:
    store = Store.open(paths.store)
    assert store.sample_ids == [one.id for one in samples]
    assert not read_quarantine(paths.stage("extract"))
    columns = [EVERY_LAYER.index(id) for id in (*store.manifest.aux_layer_ids, 8)]
    for one, found in zip(samples, store, strict=True):
        assert found.input_ids.tolist() == one.input_ids
        states, due = torch.cat([found.aux, found.last[:, None]], dim=1), native[one.id][:, columns].clone()
        due[~taught(found.loss_mask), -1] = 0
        assert torch.allclose(states, due, rtol=1e-4, atol=1e-4), one.id
    assert not spool_folder(paths.stage("extract")).exists()


def test_a_model_that_does_not_hand_out_the_last_state_is_helped(
    llama: Path, native: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    plan = plan_for(llama, tmp_path, engine_args={"worker_cls": f"{FAULTS}.OldWorker"})
    samples = mixed_samples(200)[:40]
    columns = [EVERY_LAYER.index(id) for id in plan.layer_ids]
    assert plan.layer_ids[-1] == 8
    with Engines(plan) as engines:
        for id, states in states_of(run_on(engines, samples)).items():
            assert torch.allclose(states, native[id][:, columns], rtol=1e-4, atol=1e-4), id


def test_a_model_that_the_engine_takes_from_transformers_is_captured_by_hooks(llama: Path, tmp_path: Path) -> None:
    recipe, paths = prepared(tmp_path / "run", llama, mixed_samples(12), engine_args={"model_impl": "transformers"})
    report = extract.run(recipe, paths)
    assert report["samples"] == 12
    assert report["parity"]["capture"] == "hooked"
    assert max(figures["max"] for figures in report["parity"]["by_layer"].values()) < ROUNDING
    since = {event["event"]: event["time"] for event in read_events(paths)}
    waited = time.time() - since["predicted"]
    assert report["tokens"] / report["tokens_per_second"] < waited / 2, "the engine's start is in the rate"


def test_a_run_that_goes_on_keeps_what_was_measured_of_the_earlier_samples(llama: Path, tmp_path: Path) -> None:
    samples = mixed_samples(24)
    first = extract.run(*prepared(tmp_path / "run", llama, samples[:10]))["parity"]
    report = extract.run(*prepared(tmp_path / "run", llama, samples))
    parity = dict(report["parity"])
    (later,) = parity.pop("later").values()
    assert parity == first
    assert later["against"] == "transformers"
    assert (first["sequences"], later["sequences"]) == (10, 14)
    assert "compared in 2 of 2 runs" in report["summary"][1]


@pytest.mark.parametrize(("codec", "capture"), [("int8", "native"), ("fp8", "hooked")])
def test_states_that_the_workers_encode_are_those_of_the_engine(
    llama: Path, native: dict[str, torch.Tensor], tmp_path: Path, codec: str, capture: str
) -> None:
    samples = mixed_samples(200)[:60]
    recipe, paths = prepared(tmp_path / "run", llama, samples, codec=codec, capture=capture)
    report = extract.run(recipe, paths)
    assert report["parity"]["capture"] == capture
    assert report["parity"]["tolerance"] < 2 * CODECS[codec].error
    store = Store.open(paths.store)
    assert store.manifest.codec == codec
    assert store.sample_ids == [one.id for one in samples]
    columns = [EVERY_LAYER.index(id) for id in (*store.manifest.aux_layer_ids, 8)]
    for one in store:
        theirs, kept = native[one.id][:, columns], taught(one.loss_mask)
        assert largest_error(one.aux.float(), theirs[:, :-1]) < 2 * CODECS[codec].error, one.id
        if kept.any():
            assert largest_error(one.last[kept].float(), theirs[kept, -1]) < 2 * CODECS[codec].error, one.id


def test_a_run_whose_engine_and_driver_are_killed_resumes_to_what_an_unbroken_run_gives(
    llama: Path, native: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    recipe, paths = prepared(tmp_path / "run", llama, mixed_samples(200))
    run_with_kills(recipe, paths, seed=0, kills=["engine", "driver", "engine"])
    assert_unbroken(paths, mixed_samples(200), native)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(1, 9))
def test_a_run_killed_often_resumes_to_what_an_unbroken_run_gives(
    llama: Path, native: dict[str, torch.Tensor], tmp_path: Path, seed: int
) -> None:
    recipe, paths = prepared(tmp_path / "run", llama, mixed_samples(200))
    kills = ["driver", "engine", "driver", "driver", "engine", "engine", "driver"]
    run_with_kills(recipe, paths, seed=100 * seed, kills=kills[: 2 + seed % 6])
    assert_unbroken(paths, mixed_samples(200), native)
