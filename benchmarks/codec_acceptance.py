"""What does training on states that a codec rounded do to the acceptance length of the draft?

python benchmarks/codec_acceptance.py RUN [--codecs fp8] [--seeds 0 1 2] [--epochs 2] [--threads 1]

RUN is the folder of a finished run, and is not written to. For each seed a draft is trained on RUN's store as it is,
and one on the same store in each codec: same settings, first weights and batches. All are measured on the held-out
states as they are: by the trainer's validation, by offline estimate of decoding (`rounds`), and by the same at every
held-out slot (`slots`). Differences are of drafts of one seed, in percent of the one trained on the store as it is.
Writes results/codec_acceptance.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from draftsmith import evaluate, train
from draftsmith.recipe import Evaluate, Recipe
from draftsmith.rundir import RunPaths, write_json
from draftsmith.store.copies import convert
from draftsmith.store.shards import Store
from store import machine, versions  # beside this script

RESULT = Path(__file__).parent / "results" / "codec_acceptance.json"


def recipe_of(run: Path, seed: int, epochs: float | None) -> Recipe:
    """The settings that a run was trained with, but for the seed, and the epochs if they are given."""
    stage = json.loads(RunPaths(run).stage_file("train").read_text(encoding="utf-8"))
    settings = stage["fingerprint"]["settings"]
    trained = settings["train"] | ({"epochs": epochs} if epochs else {})
    measured = Evaluate(num_speculative_tokens=trained["unroll_steps"], prompts=0, compare_untrained=False)
    return Recipe(name="codec", seed=seed, target=settings["target"], train=trained, evaluate=measured)


def run_on(store: Path, run: Path, folder: Path) -> RunPaths:
    """A run's folder with the inputs of another and the given store, by links."""
    paths = RunPaths(folder)
    paths.store.parent.mkdir(parents=True, exist_ok=True)
    for link, to in ((paths.store, store), *((folder / name, run / name) for name in ("probe", "prepare"))):
        link.unlink(missing_ok=True)
        link.symlink_to(to.resolve())
    return paths


def trained_on(store: Path, run: Path, folder: Path, recipe: Recipe) -> dict[str, float]:
    """Train on a store, and measure on that of the run: training goes on from its last step there, and so validates."""
    start = time.perf_counter()
    train.run(recipe, run_on(store, run, folder))
    seconds = time.perf_counter() - start
    exact = run_on(RunPaths(run).store, run, folder)
    validation = train.run(recipe, exact)["validation"]
    (recorded,) = evaluate.run(recipe, exact)["prompt_sets"]
    return {
        "validation_acceptance_length": validation["acceptance_length"],
        "validation_loss": validation["loss"],
        "rounds_acceptance_length": recorded["mean_acceptance_length"],
        "slots_acceptance_length": recorded["all_slots"]["mean_acceptance_length"],
        "slots": recorded["all_slots"]["slots"],
        "seconds": round(seconds, 1),
    }


def differences(ours: list[dict[str, float]], exact: list[dict[str, float]]) -> dict[str, Any]:
    """In percent, by seed."""
    found = {}
    for name in ("validation_acceptance_length", "rounds_acceptance_length", "slots_acceptance_length"):
        percent = [100 * (one[name] / of[name] - 1) for one, of in zip(ours, exact, strict=True)]
        found[name] = {
            "percent_by_seed": [round(value, 3) for value in percent],
            "mean": round(statistics.fmean(percent), 3),
            "standard_deviation": round(statistics.stdev(percent), 3) if len(percent) > 1 else None,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--codecs", nargs="+", default=["fp8"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=float, help="instead of the run's own")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    whole = Store.open(RunPaths(options.run).store)
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/codec_acceptance.py", options.run.name, *sys.argv[2:]]),
        "machine": machine(),
        "versions": versions(),
        "target": Path(whole.manifest.model).name,
        "stored": whole.manifest.codec,
        "train": recipe_of(options.run, 0, options.epochs).train.identity(),
        "samples": {split: whole.splits.count(split) for split in sorted(set(whole.splits))},
        "tokens": sum(whole.lengths),
    }
    with tempfile.TemporaryDirectory() as temporary:
        stores = {whole.manifest.codec: whole.folder} | {name: Path(temporary) / name for name in options.codecs}
        sizes = {name: convert(whole.folder, stores[name], name)["size_ratio"] for name in options.codecs}
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in stores}
        result |= {"bytes_by_stored_byte": sizes, "figures": figures}
        for seed in options.seeds:
            recipe = recipe_of(options.run, seed, options.epochs)
            for name, store in stores.items():
                found = trained_on(store, options.run, Path(temporary) / f"run-{name}-{seed}", recipe)
                figures[name].append({"seed": seed, **found})
                print(name, json.dumps(figures[name][-1]), flush=True)
            exact = figures[whole.manifest.codec]
            result["differences"] = {name: differences(figures[name], exact) for name in options.codecs}
            write_json(RESULT, result)
    print(json.dumps(result["differences"], indent=2))


if __name__ == "__main__":
    main()
