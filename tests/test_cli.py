from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def draftsmith(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "draftsmith", *arguments], capture_output=True, text=True)


def test_help_names_every_stage():
    text = draftsmith("--help").stdout
    for word in ("run", "probe", "prepare", "extract", "train", "evaluate", "export", "serve", "report"):
        assert word in text


@pytest.mark.parametrize("arguments", [[], ["store"]])
def test_nothing_asked_gets_the_help_and_no_error(arguments):
    done = draftsmith(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage:")
    assert "hint" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frobnicate"], "No such command"),
        (["train"], "RECIPE"),
        (["train", "absent.yaml"], "there is no such recipe"),
        (["train", "--nonsense", "a.yaml"], "--nonsense"),
        (["probe", "/no/such/folder"], "/no/such/folder"),
        (["evaluate", "absent.yaml", "--why", "--draft", "/no/such/folder"], "'/no/such/folder' does not exist"),
        (["evaluate", "absent.yaml", "--draft", "."], "--draft: is for --why alone"),
        (["report", "/no/such/folder"], "/no/such/folder: is not the folder of a run"),
        (["store", "info", "/no/such/folder"], "'/no/such/folder' does not exist"),
        (["store", "verify", "/no/such/folder"], "'/no/such/folder' does not exist"),
        (["store", "repair", "/no/such/folder"], "'/no/such/folder' does not exist"),
        (["store", "merge", "/no/such/folder", "--into", "x"], "'/no/such/folder' does not exist"),
        (["store", "convert", "/no/such/folder", "--into", "x", "--codec", "fp8"], "'/no/such/folder' does not exist"),
        (["store", "copy", "/no/such/folder", "file:///no/such/other"], "/no/such/folder: there is no such folder"),
        (["store", "copy", "tests", "docs"], "`store merge FOLDER --into OTHER` copies between folders"),
        (["store", "copy", "s3://a/b", "s3://a/c"], "copy to a folder first"),
    ],
)
def test_a_wrong_request_is_one_clear_line_and_exit_code_2(arguments, says):
    done = draftsmith(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_probe_prints_one_json_document_and_nothing_else(tiny_target):
    done = draftsmith("probe", str(tiny_target), "--json")
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["verdict"] == "fail" else 0)
    assert set(report) >= {"verdict", "facts", "missing", "checks"}
    assert report["facts"]["scoring_func"] is None
    assert "scoring_func" in report["missing"]
    assert {"name", "status", "detail", "hint"} <= set(report["checks"][0])


def test_probe_for_people_says_not_found_where_the_configuration_is_silent(tiny_target):
    done = draftsmith("probe", str(tiny_target))
    assert any("scoring_func" in line and "NOT FOUND" in line for line in done.stdout.splitlines())


@pytest.mark.parametrize("arguments", [["recipe"], ["--help"], ["--version"], ["store", "--help"]])
def test_a_reader_that_goes_away_is_no_fault(arguments):
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as pipe:
        command = [sys.executable, "-m", "draftsmith", *arguments]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, env=BUFFERED)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_disk_behind_the_output_is_no_fault_of_ours():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "draftsmith", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=BUFFERED,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: [Errno 28] No space left on device\n  hint: make room")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_says_what_becomes_of_the_work(tiny_target, tmp_path, stop):
    command = [sys.executable, "-m", "draftsmith", "rehearse", str(tiny_target), "extract.engine=transformers"]
    process = subprocess.Popen(
        [*command, "--dir", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    assert "build" in process.stderr.readline()
    process.send_signal(stop)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped at once" in said


def test_what_the_file_system_refuses_is_no_fault_of_ours(tiny_target, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    recipe = tmp_path / "recipe.yaml"
    for run_dir in (tmp_path / "file" / "x", tmp_path / "loop" / "x", tmp_path / ("a" * 300)):
        recipe.write_text(json.dumps({"name": "t", "run_dir": str(run_dir), "target": {"model": str(tiny_target)}}))
        for arguments in (["probe", str(recipe)], ["report", str(run_dir)]):
            done = draftsmith(*arguments)
            assert done.returncode in (1, 2)
            assert "Traceback" not in done.stderr
            assert str(run_dir)[:60] in done.stderr
            assert "hint" in done.stderr


def test_closed_streams_are_no_fault_of_ours():
    done = subprocess.run(f"{sys.executable} -m draftsmith recipe >&-", shell=True, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
