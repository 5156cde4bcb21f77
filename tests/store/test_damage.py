"""Flipped bits, and kills at random moments. The long forms are marked slow."""

import random
from pathlib import Path

import pytest

from draftsmith.errors import StoreError
from draftsmith.store.check import verify
from draftsmith.store.shards import Store
from tests.store.random_store import features, in_bf16, write_store
from tests.store.test_faults import run_in_a_process

KILL_AT_RANDOM = """
import os, random, shutil, signal, sys, time
from pathlib import Path
from draftsmith.store.writer import StoreWriter
from tests.store.random_store import features, in_bf16, manifest
from tests.store.test_faults import contents

root, kills = Path(sys.argv[1]), int(sys.argv[2])
samples = [in_bf16(features(number, 20 + 37 * number % 90)) for number in range(60)]

def write(folder):
    with StoreWriter.open(folder, manifest(dtype="bfloat16", codec="lossless"), 10_000) as writer:
        for sample in samples:
            if sample.id not in writer.committed:
                writer.add([sample])

def begin(folder):
    process = os.fork()
    if not process:
        write(folder)
        os._exit(0)
    return process

start = time.monotonic()
os.waitpid(begin(root / "whole"), 0)
seconds = time.monotonic() - start
for number in range(kills):
    folder = root / f"killed-{number}"
    for _ in range(3):
        process = begin(folder)
        time.sleep(random.Random(number).random() * seconds)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert os.waitpid(begin(folder), 0)[1] == 0
    assert contents(folder) == contents(root / "whole"), number
    shutil.rmtree(folder)
"""


@pytest.mark.parametrize("codec", ["bf16", "fp32", "fp8", "int8", "lossless"])
@pytest.mark.parametrize("bits", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_noticed_by_who_reads_it_and_by_who_looks(tmp_path: Path, codec: str, bits: int) -> None:
    samples = [in_bf16(features(number, tokens)) for number, tokens in enumerate([5, 1, 9, 0, 3])]
    folder = write_store(tmp_path / "store", samples, codec=codec, dtype="bfloat16")
    files = [path for path in sorted(folder.iterdir()) if path.name != ".lock"]
    chance = random.Random(f"{codec} {bits}")
    for _ in range(bits):
        file = chance.choice(files)
        whole = file.read_bytes()
        damaged = bytearray(whole)
        place = chance.randrange(len(whole) * 8)
        damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(StoreError, match=file.name):
            list(Store.open(folder))
        if file.name == "manifest.json":
            with pytest.raises(StoreError, match=file.name):
                verify(folder)
        else:
            assert not verify(folder)["sound"]
        file.write_bytes(whole)
    assert verify(folder)["sound"]


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_a_writer_killed_at_random_moments_resumes_to_the_same_bytes(tmp_path: Path, kills: int) -> None:
    run_in_a_process(KILL_AT_RANDOM, tmp_path, kills)
