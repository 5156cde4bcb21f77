"""Kills, full disks, and disks that go away: what was committed stays, and the rest can follow."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftsmith.errors import StoreError
from draftsmith.store import writer as writer_module
from draftsmith.store.shards import Store
from draftsmith.store.writer import StoreWriter
from tests.store.limits import largest_file
from tests.store.random_store import assert_same, features, manifest, some_features, write_store


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def assert_holds_whole_samples(folder: Path, tokens: int) -> int:
    found = list(Store.open(folder))
    for sample in found:
        assert_same(sample, features(int(sample.id.removeprefix("sample-")), tokens))
    return len(found)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own, in memory."""
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
        ).returncode
    ):
        pytest.skip("this machine does not let tests mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=False, capture_output=True)


def test_a_full_disk_leaves_what_was_committed_and_the_rest_can_follow(tmp_path: Path) -> None:
    samples = [features(number, tokens=200) for number in range(6)]
    write_store(tmp_path / "whole", samples)
    folder = tmp_path / "store"
    write_store(folder, samples[:2])
    with (
        largest_file(20_000),
        pytest.raises(StoreError, match=r"shard-00001.*too large.*2 samples in its ledger are safe"),
    ):
        write_store(folder, samples[2:4])
    assert Store.open(folder).sample_ids == ["sample-0", "sample-1"]
    assert not list(folder.glob(".*.partial"))
    write_store(folder, samples[2:])
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("step", [97, pytest.param(13, marks=pytest.mark.slow)])
def test_wherever_writing_stops_for_want_of_room_nothing_committed_is_lost(tmp_path: Path, step: int) -> None:
    samples = [features(number, tokens=20) for number in range(6)]
    write_store(tmp_path / "whole", samples)
    largest = max(path.stat().st_size for path in (tmp_path / "whole").iterdir())
    folder = tmp_path / "store"
    write_store(folder, samples[:2])
    before = contents(folder)
    for size in range(1, largest, step):
        with largest_file(size), pytest.raises(StoreError, match=r"too large.*2 samples in its ledger are safe"):
            write_store(folder, samples[2:])
        assert Store.open(folder).sample_ids == ["sample-0", "sample-1"]
        after = contents(folder)
        assert {name: after[name] for name in before if name != "ledger.jsonl"} == {
            name: data for name, data in before.items() if name != "ledger.jsonl"
        }
    write_store(folder, samples[2:])
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_disk_is_not_filled(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "24m"):
        folder = tmp_path / "small" / "store"
        samples = [features(number, tokens=10_000) for number in range(40)]  # 1.3 MiB each
        with pytest.raises(
            StoreError, match=r"nearly full.*to come; the \d+ samples in its ledger are safe\n.*make room"
        ):
            write_store(folder, samples)
        done = assert_holds_whole_samples(folder, 10_000)
        assert 0 < done < 8
        assert not list(folder.glob(".*.partial"))
        subprocess.run(["mount", "-o", "remount,size=128m", tmp_path / "small"], check=True)
        write_store(folder, samples[done:])
        assert assert_holds_whole_samples(folder, 10_000) == 40


def test_no_space_left_on_device_is_an_error_that_says_what_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "SPARE_BYTES", -(1 << 40))  # as if others took the room between look and write
    with small_disk(tmp_path / "small", "256k"):
        with pytest.raises(StoreError, match=r"No space left.*samples in its ledger are safe\n.*make room"):
            write_store(tmp_path / "small" / "store", [features(number, tokens=200) for number in range(40)])
        assert 0 < assert_holds_whole_samples(tmp_path / "small" / "store", 200) < 40


def test_a_disk_that_goes_away_is_not_written_around(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with (
        small_disk(disk, "64m"),
        pytest.raises(StoreError, match=r"samples in its ledger are safe\n.*mount"),
        StoreWriter.open(disk / "store", manifest(), 1) as writer,
    ):
        writer.add([features(0, 5)])
        writer.flush()
        subprocess.run(["umount", "--lazy", disk], check=True)
        writer.add([features(1, 5)])
        writer.flush()
    assert list(disk.iterdir()) == []


def test_a_disk_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m"):
        write_store(tmp_path / "disk" / "store", some_features(2))
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "disk"], check=True)
        assert len(list(Store.open(tmp_path / "disk" / "store"))) == 2
        with pytest.raises(StoreError, match=r"Read-only.*\n.*mount it for writing"):
            write_store(tmp_path / "disk" / "store", some_features(4)[2:])


def test_a_ledger_that_another_changed_meanwhile_is_not_added_to(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with (
        pytest.raises(StoreError, match="the ledger is not as it was left"),
        StoreWriter.open(folder, manifest(), 1) as writer,
    ):
        writer.add([features(0, 5)])
        writer.flush()
        (folder / "ledger.jsonl").write_bytes(b"")
        writer.add([features(1, 5)])
        writer.flush()
    assert (folder / "ledger.jsonl").read_bytes() == b""


FAIL_AT_EACH_CALL = """
import errno, os, sys
from pathlib import Path
from draftsmith.errors import StoreError
from draftsmith.store.shards import Store
from tests.store.random_store import some_features, write_store

calls, at, folder, said = 0, -1, Path(), getattr(errno, sys.argv[2])
def refuse(event, arguments):
    global calls
    if event in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir") and str(folder) in str(arguments[0]):
        writes = event != "open" or "w" in str(arguments[1]) or "a" in str(arguments[1]) or "+" in str(arguments[1])
        calls += writes
        if writes and calls == at:
            raise OSError(said, os.strerror(said))
sys.addaudithook(refuse)

sync = os.fsync
def fsync(descriptor):  # where a network's file system says what became of earlier writes
    global calls
    calls += 1
    if calls == at:
        raise OSError(said, os.strerror(said))
    sync(descriptor)
os.fsync = fsync

for at_call in range(1, 1000):
    folder, calls, at = Path(sys.argv[1]) / f"failed-at-{at_call}", 0, -1
    write_store(folder, some_features(2))
    calls, at = 0, at_call
    try:
        write_store(folder, some_features(5)[2:])
    except StoreError as error:
        assert os.strerror(said) in str(error) and sys.argv[3] in error.hint, error
        failed = True
    else:
        failed = False
    reached, at = calls >= at_call, -1
    done = [sample.id for sample in Store.open(folder)]
    assert done[:2] == ["sample-0", "sample-1"], done
    write_store(folder, some_features(5)[len(done):])
    if not reached:
        break
"""


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("ENOSPC", "make room"),
        ("EDQUOT", "raise the quota"),
        ("ESTALE", "the network's mount"),
        ("ETIMEDOUT", "the network's mount"),
        ("EIO", "the disk"),
    ],
)
def test_a_refusal_at_any_call_loses_nothing_committed_and_the_rest_can_follow(
    tmp_path: Path, error: str, remedy: str
) -> None:
    write_store(tmp_path / "whole", some_features(2))
    write_store(tmp_path / "whole", some_features(5)[2:])
    run_in_a_process(FAIL_AT_EACH_CALL, tmp_path, error, remedy)
    failed = list(tmp_path.glob("failed-at-*"))
    assert len(failed) > 12
    for folder in failed:
        assert contents(folder) == contents(tmp_path / "whole"), folder.name


def run_in_a_process(program: str, *arguments: object) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program, *map(str, arguments)], env=environment, check=True)


KILL_AT_EACH_CALL = """
import os, signal, sys
from pathlib import Path
from draftsmith.store.shards import Store
from tests.store.limits import largest_file
from tests.store.random_store import some_features, write_store

def write(folder, calls):  # in a process of its own, killed at its `calls`-th call that changes the folder
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1]
    count = 0
    def count_calls(event, arguments):
        nonlocal count
        if event in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir") and str(folder) in str(arguments[0]):
            count += 1
            if count == calls:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count_calls)
    done = len(Store.open(folder)) if (folder / "manifest.json").exists() else 0
    write_store(folder, some_features(5)[done:])
    os._exit(0)

for calls in range(1, 1000):
    folder = Path(sys.argv[1]) / f"killed-at-{calls}"
    if write(folder, calls) == 0:
        break
    if (folder / "manifest.json").exists():
        list(Store.open(folder))
    write(folder, calls // 2 + 1)  # and killed again while it resumes
    assert write(folder, -1) == 0
"""


def test_a_writer_killed_at_any_call_to_the_file_system_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    write_store(tmp_path / "whole", some_features(5))
    run_in_a_process(KILL_AT_EACH_CALL, tmp_path)
    killed = list(tmp_path.glob("killed-at-*"))
    assert len(killed) > 20
    for folder in killed:
        assert contents(folder) == contents(tmp_path / "whole"), folder.name
