"""What do several GPUs make of an optimizer step, and is it the step that one GPU would make?

torchrun --nproc-per-node 2 benchmarks/train_ranks.py
torchrun --nproc-per-node 2 benchmarks/train_ranks.py --workload small --tokens 4096 --steps 3

Each rank has its own `--tokens`, as in `train_step.py`: one GPU with as many is the same work without other ranks.
Three kinds: gradients all-reduced, with the step's backward pass in a graph where a draft is small; FSDP2; and each
rank alone with the shares of all as passes of one step, whose first loss and gradient norm the others must have.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_step import WORKLOADS, make_batch, make_learner

from draftsmith.records import Batch
from draftsmith.train.ranks import Ranks, device_of_rank
from draftsmith.train.step import Learner

RESULT = Path(__file__).parent / "results" / "train_ranks.json"


def milliseconds_of_steps(learner: Learner, shares: list[Batch], ids: Any, steps: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    before = None
    for event in events[1:]:
        passes = [learner.prepare(batch) for batch in shares]
        launched = learner.step(passes, 1e-5, exact=False, sample_ids=ids)
        event.record()
        if before is not None:
            before.figures()
        before = launched
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def milliseconds_of_sum(learner: Learner, repeats: int = 10) -> float:
    """Of summing the gradients that a step left."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        learner.weights.sum_gradients()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def measure(kind: str, name: str, tokens: int, steps: int, device: torch.device) -> dict[str, Any]:
    work, joined = WORKLOADS[name], Ranks.joined()
    ranks = Ranks() if kind == "alone" else joined
    torch.cuda.reset_peak_memory_stats()
    learner = make_learner(work, tokens, steps, "auto", False, device, ranks=ranks, shard=kind == "sharded")
    shares = []
    for rank in range(joined.count):
        torch.manual_seed(rank)
        shares.append(make_batch(work, tokens, device))
    mine = shares if kind == "alone" else [shares[ranks.rank]]
    ids = None if kind == "alone" else tuple(batch.sample_ids for batch in shares)
    first = learner.step([learner.prepare(b) for b in mine], 1e-5, exact=False, sample_ids=ids).figures()
    milliseconds_of_steps(learner, mine, ids, 4)
    times = milliseconds_of_steps(learner, mine, ids, 10)
    return {
        "kind": kind,
        "workload": name,
        "ranks": ranks.count,
        "tokens_of_each": tokens,
        "steps": steps,
        "milliseconds": round(statistics.median(times), 2),
        "gradient_sum_milliseconds": round(milliseconds_of_sum(learner), 2) if kind == "summed" else None,
        "graph": any(graph is not None for graph in learner.graphs.values()),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_loss": first["loss"],
        "first_gradient_norm": first["gradient_norm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["small", "full"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    device = device_of_rank("auto")
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    runs = []
    for name, kind in itertools.product(arguments.workload, ("summed", "sharded", "alone")):
        runs.append(measure(kind, name, arguments.tokens, arguments.steps, device))
        torch.cuda.empty_cache()
        dist.barrier()
        if dist.get_rank() == 0:
            print(runs[-1], flush=True)
    for summed, sharded, alone in zip(runs[0::3], runs[1::3], runs[2::3], strict=True):
        for run, figure in itertools.product((summed, sharded), ("first_loss", "first_gradient_norm")):
            assert abs(run[figure] / alone[figure] - 1) < 1e-3, (run, alone)
    if dist.get_rank() == 0:
        report = {
            "command": " ".join(
                ["torchrun", "--nproc-per-node", str(dist.get_world_size()), "benchmarks/train_ranks.py"]
            )
            + "".join(f" {word}" for word in sys.argv[1:]),
            "machine": {"gpu": torch.cuda.get_device_name(device), "gpus": dist.get_world_size()},
            "versions": {
                "torch": importlib.metadata.version("torch"),
                "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            },
            "runs": runs,
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
