"""Capture through the real engine, which most of these tests start once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.corpus import write_corpus
from draftsmith.errors import CaptureError, CheckFailed, EngineError
from draftsmith.extract import run
from draftsmith.extract.engine_errors import explain_death
from draftsmith.extract.engines import spool_folder
from draftsmith.extract.from_vllm import capture
from draftsmith.extract.quarantine import read_quarantine
from draftsmith.extract.vllm_worker.client import EngineDied, EngineProcess
from draftsmith.extract.vllm_worker.spool import take_sequence
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Recipe
from draftsmith.records import Sample
from draftsmith.rundir import RunPaths, write_json
from draftsmith.store.shards import Store
from tests.extract import scale
from tests.extract.vllm_faults import DROPPED, HAPPENED
from tests.extract.vllm_runs import (
    REPOSITORY,
    ROUNDING,
    captured,
    errors,
    mixed_samples,
    plan_for,
    poisoned,
    recipe_for,
    sample,
)

pytestmark = pytest.mark.vllm
FAULTS = "tests.extract.vllm_faults"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scale.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def workers_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def all_captured(model: Path, folder: Path, count: int = 200, vocabulary: int = 512, **extract: Any) -> Any:
    """States by sample id and the error of each token: of every sample, and in order."""
    samples = mixed_samples(count, vocabulary)
    states = captured(plan_for(model, folder, **extract), samples)
    assert list(states) == [one.id for one in samples]
    return states, errors(model, states, samples)


# ---- the states are the reference's -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def native(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With prefixes of three quarters of a third of the samples taken from the engine's cache."""
    cached = {"enable_prefix_caching": True, "block_size": 32}
    return all_captured(llama, tmp_path_factory.mktemp("native"), engine_args=cached)


def test_no_state_is_lost_or_swapped_whether_computed_or_taken_from_the_prefix_cache(native: Any) -> None:
    assert native[1].max() < ROUNDING


def test_hooks_give_the_states_that_the_engines_own_method_gives(llama: Path, native: Any, tmp_path: Path) -> None:
    hooked, error = all_captured(llama, tmp_path, capture="hooked")
    assert error.max() < ROUNDING
    for id, states in native[0].items():
        assert torch.allclose(hooked[id], states, rtol=1e-4, atol=1e-4), id


@pytest.mark.real_model
def test_a_real_model_has_the_references_states(smollm2: Path, tmp_path: Path) -> None:
    assert all_captured(smollm2, tmp_path, count=12, vocabulary=49_000)[1].max() < ROUNDING


def test_a_model_without_the_engines_interface_is_captured_by_hooks(tmp_path: Path) -> None:
    assert all_captured(scale.gpt2(tmp_path / "model"), tmp_path / "run")[1].max() < ROUNDING


def test_a_mixture_of_experts_has_the_references_states(tmp_path: Path) -> None:
    error = all_captured(scale.qwen3_moe(tmp_path / "model"), tmp_path / "run")[1]
    assert error.quantile(0.99) < ROUNDING  # a near-tie between experts may fall the other way


@pytest.mark.parametrize("way", ["native", "hooked"])
def test_multi_head_latent_attention_has_the_references_states(tmp_path: Path, way: str) -> None:
    model = scale.deepseek_v3(tmp_path / "model")
    error = all_captured(model, tmp_path / "run", capture=way, max_num_batched_tokens=512)[1]
    assert error.quantile(0.99) < ROUNDING


def test_a_preempted_request_is_captured_whole(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HAPPENED, str(tmp_path / "preempted"))
    samples = [sample(n, [(7 * n + i) % 500 + 3 for i in range(400)]) for n in range(12)]
    settings = {
        "enable_prefix_caching": False,
        "block_size": 32,
        "long_prefill_token_threshold": 16,
        "scheduler_reserve_full_isl": False,
        "worker_cls": f"{FAULTS}.PreemptedWorker",
    }
    states = captured(plan_for(llama, tmp_path, kv_cache_memory_bytes=6 << 20, engine_args=settings), samples)
    assert (tmp_path / "preempted").exists()
    assert errors(llama, states, samples).max() < ROUNDING


# ---- what goes wrong inside is told, once -----------------------------------------------------------------------


def test_an_exception_in_a_worker_process_is_reported_with_type_place_samples_and_traceback(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    plan = plan_for(llama, tmp_path, engine_args={"worker_cls": f"{FAULTS}.RaisingWorker"})
    good, bad = mixed_samples(8)[:5], poisoned(mixed_samples(8), [3])[3]
    job = {"engine_args": plan.engine_args, "capture": "auto", "layer_ids": list(plan.layer_ids)}
    spool, failures = tmp_path / "spool", tmp_path / "failures"
    spool.mkdir()
    failures.mkdir()
    with EngineProcess({**job, "spool": str(spool)}, failures, plan.log, plan.environment) as engine:
        for number, one in enumerate(good):
            engine.send(number, one.input_ids)
        done: set[int] = set()
        while len(done) < len(good):
            done |= {number for event in engine.receive() for number, _ in event.get("samples", ())}
        for number, one in enumerate(good):
            assert take_sequence(spool, number, engine.parts)[0].tolist() == one.input_ids
        engine.send(7, bad.input_ids)
        with pytest.raises(EngineDied) as death:
            while True:
                engine.receive()
    error = explain_death(death.value, plan.log, 0, lambda numbers: [f"s{number}" for number in numbers])
    text = str(error)
    assert error.what == "RuntimeError, with no message"
    assert error.where == "extract, worker 0, in execute_model, model.layers.3.mlp, samples s7"
    assert "in trip\n    raise RuntimeError" in text
    assert text.count("Traceback") == 1


def test_a_sample_that_kills_the_engine_twice_is_set_aside_and_the_others_are_captured(
    llama: Path, tmp_path: Path
) -> None:
    samples = poisoned(mixed_samples(30), [29])
    plan = plan_for(llama, tmp_path, engine_args={"worker_cls": f"{FAULTS}.RaisingWorker"})
    states = captured(plan, samples)
    assert list(states) == [one.id for one in samples[:-1]]
    assert errors(llama, states, samples[:-1]).max() < ROUNDING
    ((id, reasons),) = read_quarantine(tmp_path).items()
    assert id == "s29"
    assert len(reasons) == 2
    assert all("RuntimeError, with no message" in reason and "raise RuntimeError" in reason for reason in reasons)


def test_an_engine_that_does_not_start_says_by_how_much_memory_is_short_and_what_to_change(
    llama: Path, tmp_path: Path
) -> None:
    plan = plan_for(llama, tmp_path, engine_args={"worker_cls": f"{FAULTS}.UnloadableWorker"})
    with pytest.raises(EngineError) as raised:
        list(capture(plan, mixed_samples(8)))
    assert raised.value.what.endswith("Tried to allocate 20.00 GiB, of which 3.00 GiB are free")
    assert raised.value.where == "extract, worker 0, in load_model"
    assert "extract.tensor_parallel_size" in str(raised.value.hint)


def test_a_prompt_that_would_wait_for_ever_is_refused_before_the_weights_are_loaded(tmp_path: Path) -> None:
    model = scale.deepseek_v3(tmp_path / "model")
    (model / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"extract\.max_num_batched_tokens must be 502 at the least"):
        list(capture(plan_for(model, tmp_path), mixed_samples(8)))


# ---- the stage --------------------------------------------------------------------------------------------------


def prepared(folder: Path, model: Path, samples: list[Sample], worker: str, **extract: Any) -> tuple[Recipe, RunPaths]:
    recipe = recipe_for(model, engine_args={"worker_cls": f"{FAULTS}.{worker}"}, shard_mib=1, **extract)
    recipe, paths = recipe.model_copy(update={"run_dir": folder}), RunPaths(folder)
    write_json(paths.facts, read_facts(str(model)).to_json())
    write_corpus(paths.corpus, samples, {"template_sha256": "m0"})
    return recipe, paths


def states_of(paths: RunPaths) -> dict[str, torch.Tensor]:
    return {found.id: torch.cat([found.aux, found.last[:, None]], dim=1) for found in Store.open(paths.store)}


def test_what_the_engine_loses_is_set_aside_and_the_stage_says_no(llama: Path, tmp_path: Path) -> None:
    samples = mixed_samples(20)
    recipe, paths = prepared(tmp_path, llama, samples, "DroppingWorker")
    with pytest.raises(CheckFailed, match=rf"1 of 20 samples .* s{DROPPED}: the engine ended it .* without its states"):
        run(recipe, paths)
    allowed = recipe.model_copy(update={"extract": recipe.extract.model_copy(update={"max_quarantined": 0.05})})
    report = run(allowed, paths)
    assert report["samples"] == 19
    assert list(report["set_aside"]) == [f"s{DROPPED}"]
    assert "1 samples set aside" in "\n".join(report["summary"])
    parity = Store.open(paths.store).manifest.parity
    assert parity is not None
    assert max(figures["max"] for figures in parity["by_layer"].values()) < ROUNDING
    assert parity["next_token_agreement"] == 1.0
    assert errors(llama, states_of(paths), [one for one in samples if one.id != f"s{DROPPED}"]).max() < ROUNDING


def test_states_in_the_wrong_order_of_tokens_never_reach_the_store(llama: Path, tmp_path: Path) -> None:
    recipe, paths = prepared(tmp_path, llama, mixed_samples(20), "ShufflingWorker")
    with pytest.raises(CaptureError, match="differs from the reference's"):
        run(recipe, paths)
    assert len(Store.open(paths.store)) == 0


KILLED_DRIVER = """
import os, signal, sys
from draftsmith import extract
from draftsmith.recipe import load
from draftsmith.rundir import RunPaths

def kill_at_the_second_shard(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("shard-00001.safetensors"):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill_at_the_second_shard)
extract.run(load(sys.argv[1], [f"run_dir={sys.argv[2]}"]), RunPaths(__import__("pathlib").Path(sys.argv[2])))
"""


def test_a_killed_engine_and_a_killed_driver_lose_nothing_and_leave_nothing_behind(
    llama: Path, native: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HAPPENED, str(tmp_path / "died"))
    samples = poisoned(mixed_samples(200), [150])
    recipe, paths = prepared(tmp_path / "run", llama, samples, "DyingWorker")
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.model_dump_json(exclude={"run_dir"}))  # JSON is YAML
    driver = subprocess.run([sys.executable, "-c", KILLED_DRIVER, file, paths.root], env=os.environ, check=False)
    assert driver.returncode == -9
    assert 0 < len(Store.open(paths.store)) < 200
    report = run(recipe, paths)
    assert (tmp_path / "died").exists()
    assert report["samples"] == 200
    assert Store.open(paths.store).sample_ids == [one.id for one in samples]
    assert not read_quarantine(paths.stage("extract"))
    unbroken, found = native[0], states_of(paths)
    for one in samples:
        if one.id != "s150":
            assert torch.allclose(found[one.id], unbroken[one.id], rtol=1e-4, atol=1e-4), one.id
    assert not spool_folder(paths.stage("extract")).exists()
