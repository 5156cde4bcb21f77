"""How fast is the store written and read, against the disk itself, and what does it cost the processor?

python benchmarks/store.py [--mib 1024] [--shard-mib 64] [--tokens 512] [--hidden 4096] [--batch-tokens 8192] …

`--folder` is on the disk to measure; `--note` becomes part of the result's name; `--codecs` and `--repeats` say what
else they do.

Captured states as extraction hands them over: bfloat16, three auxiliary layers and the last, views of one tensor.
What is written is synced.

Reading is what the trainer does, with nothing done with the batches: whole epochs, shuffled, fetched ahead, laid out in
memory that was used before. `first_epoch` checks every shard; `second_epoch` does not again. Both, and the same files
read from front to back, in any order: `cold`, dropped from the page cache, and `warm`. `raw` reads into 8 MiB that stay
in the processor's cache, `raw_into_batches` into memory as large as a batch. Figures are medians, of bytes of the
files; `ratio` is to `raw`, `ratio_into_batches` to the other. Writes results/store.json, or results/store_N.json.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import itertools
import json
import mmap
import os
import platform
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from draftsmith.train.batches import BatchMemory, fetched_ahead, plan_epoch, read_ahead, read_batch
from draftsmith.train.loop import FETCH_STEPS

RESULTS = Path(__file__).parent / "results"
DEFAULTS = {"mib": 1024, "shard-mib": 64, "tokens": 512, "hidden": 4096, "batch-tokens": 8192, "repeats": 3}
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


def disk_read(folder: Path, buffer: memoryview) -> None:
    """Every shard from front to back, into one buffer."""
    for path in sorted(folder.glob("shard-*")):
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


def read_epoch(store: Store, memories: list[BatchMemory], batch_tokens: int, epoch: int) -> None:
    """As the trainer does."""
    plan = plan_epoch(store.lengths, batch_tokens, 0, epoch, store.shards)
    coming = zip(fetched_ahead(plan, store.prefetch, FETCH_STEPS), itertools.cycle(memories), strict=False)
    for _ in read_ahead(partial(read_batch, store, rows, memory, store.dtype) for rows, memory in coming):
        pass


def unmap(store: Store) -> None:
    """Let go of the pages of a store's shards, which the page cache would keep for as long as they are mapped."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    states = [states for shard in store._shards.values() for states in (shard.aux, shard.last)]
    for tensor in (tensor for one in states for tensor in one.parts.values()):
        first, end = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE, tensor.data_ptr() + tensor.nbytes
        advise(first, max(0, end - first), mmap.MADV_DONTNEED)


def measure_reading(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in folder.glob("shard-*"))
    batch_bytes = LAYERS * options.hidden * 2 * options.batch_tokens
    small, large = (memoryview(bytearray(count)) for count in (8 * MIB, batch_bytes))
    memories = [BatchMemory(), BatchMemory()]
    read_epoch(Store.open(folder), memories, options.batch_tokens, 0)  # which have been used before, then
    found: dict[str, list[dict[str, float]]] = {}
    order = random.Random(0)
    for _, state in itertools.product(range(options.repeats), ("cold", "warm")):
        store = Store.open(folder)
        works: dict[str, Callable[[], None]] = {
            "raw": lambda: disk_read(folder, small),
            "first_epoch": lambda store=store: read_epoch(store, memories, options.batch_tokens, 0),
            "second_epoch": lambda store=store: read_epoch(store, memories, options.batch_tokens, 1),
            "raw_into_batches": lambda: disk_read(folder, large),
        }
        names = order.sample(list(works), len(works))  # what was dropped before decides what new pages cost
        first, second = sorted(names.index(name) for name in ("first_epoch", "second_epoch"))
        names[first], names[second] = "first_epoch", "second_epoch"
        for name, work in ((name, works[name]) for name in names):
            if state == "cold":
                unmap(store)
                drop_from_cache(folder)
            found.setdefault(f"{name}_{state}", []).append(rates(size, *timed(work)))
        unmap(store)
    figures: dict[str, dict[str, Any]] = {
        name: {key: statistics.median(one[key] for one in of) for key in of[0]} for name, of in found.items()
    }
    for name, of in found.items():
        figures[name]["gb_per_second_each"] = [one["gb_per_second"] for one in of]
    for name, state in itertools.product(("first_epoch", "second_epoch"), ("cold", "warm")):
        ours = figures[f"{name}_{state}"]
        for raw, ratio in (("raw", "ratio"), ("raw_into_batches", "ratio_into_batches")):
            ours[ratio] = round(ours["gb_per_second"] / figures[f"{raw}_{state}"]["gb_per_second"], 3)
    return figures


def measure_disk(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    file_bytes = options.shard_mib * MIB
    files = max(1, options.mib // options.shard_mib)
    folder.mkdir()
    written = timed(lambda: disk_write(folder, files, file_bytes, THREADS))
    shutil.rmtree(folder)
    return {"write": rates(files * file_bytes, *written)}


def measure_store(folder: Path, options: argparse.Namespace, codec: str, samples: list[Features]) -> dict[str, Any]:
    captured_bytes = sum(sample.aux.nbytes + sample.last.nbytes for sample in samples)
    waited: list[float] = []
    write = lambda: waited.append(store_write(folder, samples, codec, options.hidden, options.shard_mib * MIB))
    written = timed(write)
    size = sum(path.stat().st_size for path in folder.glob("shard-*"))
    reading = measure_reading(folder, options)
    shutil.rmtree(folder)
    return {
        "bytes_per_captured_byte": round(size / captured_bytes, 4),
        "write": rates(captured_bytes, *written) | {"seconds_in_add": round(waited[0], 3)},
        **reading,
    }


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cpus": os.cpu_count(),
        "load_average": load_average(),
        "system": platform.system(),
    }


def load_average() -> list[float]:
    return [round(load, 1) for load in os.getloadavg()]


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
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), help="to measure; all if not given")
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
        for codec in options.codecs:
            result["figures"][codec] = measure_store(Path(folder) / codec, options, codec, samples)
    result["machine"]["load_average_after"] = load_average()
    print(json.dumps(result["figures"], indent=2))
    RESULTS.mkdir(exist_ok=True)
    name = f"store_{options.note}.json" if options.note else "store.json"
    (RESULTS / name).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
