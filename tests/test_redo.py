"""What was done is not lost to a `--redo` that cannot be done."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.errors import RequestError
from draftsmith.probe.budget import room_for_store
from draftsmith.redo import set_aside, settle
from draftsmith.report.record import read_run
from draftsmith.rundir import RunPaths, read_events, sole_process, write_json
from tests.test_pipeline import draftsmith, write_recipe

RUN = Path("runs/tiny")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_target) -> Path:
    """A folder with a recipe that was run to the end, and the target beside it."""
    folder = tmp_path_factory.mktemp("run")
    write_recipe(folder, shutil.copytree(tiny_target, folder / "target"))
    done = draftsmith("run", "recipe.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("stage", "damaged", "overrides"),
    [
        ("prepare", None, ["prepare.sources=[{path: /nowhere.jsonl}]"]),
        ("extract", "target/model.safetensors", []),
        ("train", "runs/tiny/extract/store/shard-00000.safetensors", []),
        ("evaluate", "runs/tiny/train/checkpoints/final/model.safetensors", []),
    ],
)
def test_results_are_back_in_place_where_nothing_came_of_redo(finished, stage, damaged, overrides):
    before = contents(finished / RUN / stage)
    told = read_run(finished / RUN).stages[stage]
    whole = (finished / damaged).read_bytes() if damaged else b""
    if damaged:
        (finished / damaged).write_bytes(whole[:64] + bytes(byte ^ 255 for byte in whole[64:]))
    try:
        refused = draftsmith(stage, "recipe.yaml", *overrides, "--redo", cwd=finished)
    finally:
        if damaged:
            (finished / damaged).write_bytes(whole)
    assert refused.returncode in (1, 2), refused.stderr
    assert f"{stage}: nothing came of --redo; the results before it are back in place" in refused.stderr
    assert contents(finished / RUN / stage) == before
    assert read_run(finished / RUN).stages[stage] == told, "of the results that are there"


@pytest.mark.parametrize("stage", ["extract", "train"])
def test_a_redo_that_was_killed_leaves_the_old_results_or_goes_on_to_new_ones(finished, tmp_path, stage):
    copy = shutil.copytree(finished, tmp_path / "copy")
    command = [sys.executable, "-m", "draftsmith", stage, "recipe.yaml", "--redo"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, cwd=copy, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    aside = copy / RUN / f".{stage}.before-redo"
    while not aside.exists() and process.poll() is None:
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert contents(aside) == contents(finished / RUN / stage)
    assert f"{stage}: done already" in draftsmith(stage, "recipe.yaml", cwd=copy).stderr
    assert contents(copy / RUN / stage) == contents(finished / RUN / stage)
    again = draftsmith(stage, "recipe.yaml", "--redo", cwd=copy)
    assert (again.returncode, aside.exists()) == (0, False), again.stderr
    happened = [event["event"] for event in read_events(RunPaths(copy / RUN)) if event["stage"] == stage]
    assert happened[-happened[::-1].index("redo")] == "started"


def test_old_results_are_kept_beside_new_ones_that_are_half_done(tmp_path, capsys):
    paths = RunPaths(tmp_path)
    aside = tmp_path / ".train.before-redo"
    write_json(paths.stage_file("train"), {"status": "done", "of": "old"})
    set_aside(paths, "train")
    write_json(paths.stage_file("train"), {"status": "running"})
    write_json(paths.checkpoints / "step-00000002" / "state.json", {})
    settle(paths, "train")
    assert str(aside) in capsys.readouterr().err
    assert (paths.checkpoints / "step-00000002").exists()
    set_aside(paths, "train")  # a second --redo is one of the half done work
    assert '"of": "old"' in (aside / "stage.json").read_text()
    (aside / "stage.json").unlink()  # so far came a kill while it was deleted
    settle(paths, "train")
    assert not aside.exists()
    assert not paths.stage("train").exists()


def test_what_is_there_without_a_record_is_not_taken_for_done(finished, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy")
    record = copy / RUN / "train/stage.json"
    before = record.read_bytes()
    record.unlink()
    refused = draftsmith("train", "recipe.yaml", "train.max_steps=2", cwd=copy)
    assert refused.returncode == 2
    assert f"no {record.relative_to(copy)} that says of which settings and inputs it is" in refused.stderr
    record.write_bytes(before)
    assert "train: done already" in draftsmith("train", "recipe.yaml", cwd=copy).stderr
    record.unlink()
    again = draftsmith("train", "recipe.yaml", "train.max_steps=2", "--redo", "--json", cwd=copy)
    assert json.loads(again.stdout)["steps"] == 2, again.stderr


def test_a_store_that_was_brought_from_elsewhere_is_taken(finished, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy")
    (copy / RUN / "extract/stage.json").unlink()
    written = [file.stat().st_ino for file in sorted((copy / RUN / "extract/store").glob("shard*"))]
    taken = draftsmith("extract", "recipe.yaml", cwd=copy)
    assert taken.returncode == 0, taken.stderr
    assert [file.stat().st_ino for file in sorted((copy / RUN / "extract/store").glob("shard*"))] == written


@pytest.mark.parametrize("stage", ["prepare", "extract"])
def test_what_another_process_reads_is_not_deleted_under_it(finished, stage):
    before = contents(finished / RUN / stage)
    with sole_process(RunPaths(finished / RUN), "train"):
        refused = draftsmith(stage, "recipe.yaml", "--redo", cwd=finished)
    assert refused.returncode == 2
    assert f"{stage}: --redo would delete what `train` reads, and process {os.getpid()} is at work on it" in (
        refused.stderr
    )
    assert contents(finished / RUN / stage) == before


def test_a_store_that_is_on_another_disk_by_a_link_is_left_there(tmp_path):
    paths, disk = RunPaths(tmp_path / "run"), tmp_path / "disk"
    write_json(paths.stage_file("extract"), {"status": "done"})
    write_json(disk / "manifest.json", {})
    paths.store.symlink_to(disk)
    with pytest.raises(RequestError, match="extract/store is a link"):
        set_aside(paths, "extract")
    assert (paths.store / "manifest.json").exists()


def test_what_was_set_aside_is_room_for_the_new_store(tmp_path):
    paths = RunPaths(tmp_path)
    write_json(paths.stage_file("extract"), {"status": "done"})
    paths.store.mkdir()
    with open(paths.store / "shard-00000.safetensors", "wb") as shard:
        shard.truncate(1 << 42)  # which takes no room on the disk
    set_aside(paths, "extract")
    assert room_for_store(paths) >= 1 << 42
