"""`draftsmith train` as torchrun starts it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from draftsmith import recipe, train
from draftsmith.engine_server import free_port
from draftsmith.errors import RequestError, StoreError
from draftsmith.pipeline import run_stage
from draftsmith.rundir import RunPaths, read_events
from draftsmith.store.manifest import read_manifest, write_manifest
from draftsmith.train.checkpoint import checkpoints_in
from draftsmith.train.metrics import read_metrics
from tests.test_pipeline import write_recipe


@pytest.fixture(scope="module")
def extracted(tmp_path_factory, tiny_target):
    """A folder with a recipe whose stages before `train` are done."""
    folder = tmp_path_factory.mktemp("torchrun")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        loaded = recipe.load(write_recipe(folder, tiny_target))
        for stage in ("probe", "prepare", "extract"):
            run_stage(stage, loaded)
    return folder


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "draftsmith"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def torchrun(folder, *arguments):
    command = [*TORCHRUN, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)


def copy_without_train(extracted, folder):
    shutil.copytree(extracted, folder, ignore=lambda at, names: {"train"} & {*names} if at.endswith("tiny") else set())
    return folder


def test_torchrun_trains_on_all_ranks_and_the_first_alone_records_and_prints(extracted):
    paths = RunPaths(extracted / "runs/tiny")
    done = torchrun(extracted, "train", "recipe.yaml", "--json", "train.log_every_steps=2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ranks"] == 2
    recorded = json.loads(paths.stage_file("train").read_text())["report"]
    assert {name: value for name, value in recorded.items() if name != "summary"} == report
    events = [event["event"] for event in read_events(paths) if event["stage"] == "train"]
    assert [event for event in events if event != "checkpoint"] == ["started", "done"]
    assert (paths.checkpoints / "final/config.json").exists()
    again = torchrun(extracted, "train", "recipe.yaml", "train.log_every_steps=2")
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines() == recorded["summary"]
    assert read_events(paths)[-1]["event"] == "skipped"


def two_machines(folders, command):
    """Exit codes and words of two agents of torchrun, each with a rank of its own in its folder."""
    place = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    agents = [
        subprocess.Popen(
            [*TORCHRUN[:3], *place, "--node-rank", str(node), "--nproc-per-node", "1", "-m", "draftsmith", *command],
            cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node, folder in enumerate(folders)
    ]  # fmt: skip
    said = [agent.communicate(timeout=300)[0] for agent in agents]
    return [agent.returncode for agent in agents], said


def test_two_machines_make_the_draft_of_one_with_as_many_ranks(extracted, tmp_path):
    """Each an agent of torchrun with a rank of its own, on a folder that both reach."""
    folders = [copy_without_train(extracted, tmp_path / name) for name in ("one", "two")]
    command = ["train", "recipe.yaml", "train.max_steps=4"]
    done = torchrun(folders[0], *command)
    assert done.returncode == 0, done.stderr
    codes, said = two_machines([folders[1]] * 2, command)
    assert codes == [0, 0], said
    assert [text.count("held out:") for text in said] == [1, 0], "the first machine alone reports"
    one, two = (RunPaths(folder / "runs/tiny").checkpoints / "final/model.safetensors" for folder in folders)
    assert one.read_bytes() == two.read_bytes()


def test_a_machine_without_the_store_says_so_and_the_first_points_to_it(extracted, tmp_path):
    folders = [copy_without_train(extracted, tmp_path / name) for name in ("one", "two")]
    shutil.rmtree(folders[1] / "runs/tiny/extract")
    codes, (first, second) = two_machines(folders, ["train", "recipe.yaml", "train.max_steps=4"])
    assert codes == [1, 1]
    assert "error: runs/tiny/extract/store is not there" in second
    assert "error: train: rank 1 failed, and its own message says why" in first
    assert "fault of draftsmith" not in first + second


def test_torchrun_that_is_told_to_stop_leaves_a_checkpoint_and_goes_on_from_it(extracted, tmp_path):
    folder = copy_without_train(extracted, tmp_path / "copy")
    paths = RunPaths(folder / "runs/tiny")
    command = ["train", "recipe.yaml", "train.max_steps=120", "train.log_every_steps=1"]
    command += ["train.checkpoint_every_steps=1000"]
    before = len(read_events(paths))
    process = subprocess.Popen([*TORCHRUN, *command], cwd=folder, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    while process.poll() is None and not read_metrics(paths.stage("train")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) != 0
    (left,) = checkpoints_in(paths.checkpoints)
    assert 0 < int(left.name.removeprefix("step-")) < 120
    done = torchrun(folder, *command)
    assert done.returncode == 0, done.stderr
    events = [event["event"] for event in read_events(paths)[before:] if event["event"] != "checkpoint"]
    assert events == ["started", "interrupted", "resumed", "done"]
    steps = [line["step"] for line in read_metrics(paths.stage("train")) if line["split"] == "train"]
    assert steps == [*range(1, 121)]


def test_states_that_the_final_norm_was_applied_to_are_refused(extracted):
    store = RunPaths(extracted / "runs/tiny").store
    manifest = read_manifest(store)
    write_manifest(store, dataclasses.replace(manifest, final_norm_applied=True))
    with pytest.raises(StoreError, match="final_norm_applied is true, and false is needed"):
        train.run(recipe.load(extracted / "recipe.yaml"), RunPaths(extracted / "runs/tiny"))
    write_manifest(store, manifest)


def test_no_other_stage_runs_on_several_ranks(extracted, monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match="`extract` is not for several processes"):
        run_stage("extract", recipe.load(extracted / "recipe.yaml"))
