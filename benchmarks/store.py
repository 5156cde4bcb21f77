"""How fast is the store written and read, against the disk itself, and what does it cost the processor?

python benchmarks/store.py [--mib 512] [--shard-mib 64] [--tokens 512] [--hidden 4096] [--batch 8] …

`--folder` is on the disk to measure; `--note` becomes part of the result's name.

Captured states as extraction hands them over: bfloat16, three auxiliary layers and the last, views of one tensor.
Everything goes through the disk: written files are synced, and before reading they are dropped from the page cache.
Writes results/store.json, or results/store_N.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash

from draftsmith.records import Features
from draftsmith.store.codec import CODECS
from draftsmith.store.manifest import Manifest
from draftsmith.store.shards import Store
from draftsmith.store.threads import THREADS
from draftsmith.store.writer import StoreWriter

RESULTS = Path(__file__).parent / "results"
DEFAULTS = {"mib": 512, "shard-mib": 64, "tokens": 512, "hidden": 4096, "batch": 8}
AHEAD = 4  # batches
LAYERS, MIB, GB = 4, 1 << 20, 1e9
PACKAGES = ("draftsmith", "torch", "safetensors", "numpy", "pyarrow", "xxhash")


def captured(tokens: int, hidden: int, total_bytes: int) -> list[Features]:
    """Samples of residual-stream size; a few different ones, each used many times, so that memory is not the limit."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-1, 1, hidden).bfloat16()
    states = [(torch.randn(tokens, LAYERS, hidden, generator=generator).bfloat16() * scales) for _ in range(4)]
    input_ids = torch.randint(0, 128_000, (tokens,), generator=generator)
    mask = torch.ones(tokens, dtype=torch.bool)
    count = max(1, total_bytes // states[0].nbytes)
    return [
        Features(f"sample-{number}", "chat", "train", input_ids, mask, state[:, :-1], state[:, -1])
        for number, state in ((number, states[number % len(states)]) for number in range(count))
    ]


def manifest(codec: str, hidden: int) -> Manifest:
    return Manifest(
        model="benchmark",
        revision=None,
        config_sha256=None,
        weights_sha256=None,
        quantization=None,
        tokenizer_sha256=None,
        template_sha256=None,
        num_hidden_layers=32,
        hidden_size=hidden,
        aux_layer_ids=(2, 16, 29),
        dtype="bfloat16",
        codec=codec,
        engine="transformers",
        engine_version="5",
        draftsmith_version="0",
    )


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock and processor seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def rates(moved_bytes: int, wall: float, processor: float) -> dict[str, float]:
    return {
        "gb_per_second": round(moved_bytes / wall / GB, 3),
        "cpu_seconds_per_gb": round(processor * GB / moved_bytes, 3),
    }


def drop_from_cache(folder: Path) -> None:
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_write(folder: Path, files: int, file_bytes: int, threads: int) -> None:
    """Plain files of noise, each synced, by as many threads as the store's."""
    data = memoryview(os.urandom(MIB) * (file_bytes // MIB))

    def write(number: int) -> None:
        with open(folder / f"{number}", "wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(files)))


def disk_read(folder: Path) -> None:
    """Every file from front to back, into one buffer."""
    buffer = bytearray(8 * MIB)
    for path in sorted(folder.iterdir()):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def store_write(folder: Path, samples: list[Features], codec: str, hidden: int, shard_bytes: int) -> float:
    """Returns the seconds spent in `add`: what capture would wait for."""
    waited = 0.0
    with StoreWriter.open(folder, manifest(codec, hidden), shard_bytes) as writer:
        for sample in samples:
            start = time.perf_counter()
            writer.add([sample])
            waited += time.perf_counter() - start
    return waited


def store_read(folder: Path, batch: int, anew: bool) -> None:
    """Every sequence, batch after batch, copied into the same memory, or into new memory for each batch, as the disk's
    files are; the next batches are brought in meanwhile."""
    store = Store.open(folder)
    batches = [range(first, min(first + batch, len(store))) for first in range(0, len(store), batch)]
    memory: dict[str, torch.Tensor] = {}
    store.prefetch(index for indexes in batches[:AHEAD] for index in indexes)
    for number, indexes in enumerate(batches):
        for ahead in batches[number + AHEAD :][:1]:
            store.prefetch(ahead)
        found = store.read(indexes)
        for name in ("aux", "last"):
            states = [getattr(sample, name) for sample in found]
            if anew or name not in memory:
                memory[name] = torch.cat(states)
            else:
                torch.cat(states, out=memory[name][: sum(map(len, states))])


def disk_read_and_lay_out(folder: Path) -> None:
    """Every file from front to back, into memory that is new each time."""
    for path in sorted(folder.iterdir()):
        path.read_bytes()


def measure_disk(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    file_bytes = options.shard_mib * MIB
    files = max(1, options.mib // options.shard_mib)
    folder.mkdir()
    written = timed(lambda: disk_write(folder, files, file_bytes, THREADS))
    drop_from_cache(folder)
    read = timed(lambda: disk_read(folder))
    drop_from_cache(folder)
    anew = timed(lambda: disk_read_and_lay_out(folder))
    shutil.rmtree(folder)
    size = files * file_bytes
    return {"write": rates(size, *written), "read": rates(size, *read), "read_anew": rates(size, *anew)}


def measure_store(folder: Path, options: argparse.Namespace, codec: str, samples: list[Features]) -> dict[str, Any]:
    captured_bytes = sum(sample.aux.nbytes + sample.last.nbytes for sample in samples)
    waited: list[float] = []
    write = lambda: waited.append(store_write(folder, samples, codec, options.hidden, options.shard_mib * MIB))
    written = timed(write)
    size = sum(path.stat().st_size for path in folder.glob("shard-*"))
    drop_from_cache(folder)
    read = timed(lambda: store_read(folder, options.batch, anew=False))
    drop_from_cache(folder)
    anew = timed(lambda: store_read(folder, options.batch, anew=True))
    shutil.rmtree(folder)
    return {
        "bytes_per_captured_byte": round(size / captured_bytes, 4),
        "write": rates(captured_bytes, *written) | {"seconds_in_add": round(waited[0], 3)},
        "read": rates(captured_bytes, *read) | {"stored_gb_per_second": round(size / read[0] / GB, 3)},
        "read_anew": rates(captured_bytes, *anew),
    }


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cpus": os.cpu_count(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help="on the disk to measure; the system's temporary folder if not given")
    parser.add_argument("--note", help="part of the result's name")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/store.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "threads": THREADS,
        "hash_gb_per_second": round(256 * MIB / GB / timed(lambda: xxhash.xxh3_128(bytes(256 * MIB)))[0], 2),
        "figures": {},
    }
    samples = captured(options.tokens, options.hidden, options.mib * MIB)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result["figures"]["disk"] = measure_disk(Path(folder) / "disk", options)
        for codec in CODECS:
            result["figures"][codec] = measure_store(Path(folder) / codec, options, codec, samples)
    for name, figures in result["figures"].items():
        print(name, json.dumps(figures))
    RESULTS.mkdir(exist_ok=True)
    name = f"store_{options.note}.json" if options.note else "store.json"
    (RESULTS / name).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
