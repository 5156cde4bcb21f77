"""How long does an optimizer step of EAGLE-3 training take, and how near is it to what the matrix products alone take?

python benchmarks/train_step.py --workload full --tokens 8192 --steps 7
python benchmarks/train_step.py --workload full small --tokens 4096 8192 16384 --steps 3 7

One process on one GPU: forward, loss, backward, gradient clipping and AdamW in bf16 over float32 masters, on random
states and documents of 1,024 tokens, by device events; median of 10 steps after warm-up. `--profile FOLDER` also
writes the device's time by kernel. Without `--top1` the teacher is the draft vocabulary's rows alone, as in the peers
(`train.mask_out_of_vocab=false` at a step that is not logged); with it, the target's whole vocabulary is asked at every
position, which the floor does not count.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import platform
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as record

from draftsmith import recipe
from draftsmith.draft.config import DraftConfig
from draftsmith.draft.model import Draft
from draftsmith.records import Batch
from draftsmith.target import FinalNorm, TargetHead
from draftsmith.train.ranks import Ranks
from draftsmith.train.step import Learner

RESULT = Path(__file__).parent / "results" / "train_step.json"
MATRIX_FLOPS = 790e12  # a large bf16 product on an H200, measured
DOCUMENT_TOKENS, AUX = 1024, 3
KINDS_OF_WORK = {
    "matrix products": "nvjet|gemm|cutlass|splitK",
    "attention": "_attend|_own_backward|_query_backward|_key_backward",
    "loss": "_loss_rows|_teacher_rows|_copy_rows",
    "norms, activation, rotation": "_rms_norm|_swiglu|_rotate",
    "optimizer and gradient norm": "multi_tensor_apply",
}


@dataclass(frozen=True)
class Workload:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int


WORKLOADS = {
    "full": Workload(4096, 32, 8, 128, 14336, 128256, 32000),
    "small": Workload(576, 9, 3, 64, 1536, 49152, 16384),
}


def floor_seconds(work: Workload, tokens: int, steps: int) -> float:
    """What the matrix products alone take: every weight of the layer and of lm_head thrice a step (forward, input
    gradient, weight gradient), attention within documents at 3.5 times its forward pass, fc twice, the teacher's rows
    once."""
    size = work.hidden
    attention = 2 * size * (work.heads + 2 * work.kv_heads) * work.head_dim + work.heads * work.head_dim * size
    layer = attention + 3 * size * work.intermediate + size * work.draft_vocab
    causal = 4 * (min(DOCUMENT_TOKENS, tokens) / 2) * work.heads * work.head_dim
    once = 4 * AUX * size * size + 2 * size * work.draft_vocab
    return tokens * (steps * (6 * layer + 3.5 * causal) + once) / MATRIX_FLOPS


def make_learner(
    work: Workload,
    tokens: int,
    steps: int,
    kernels: str,
    top1: bool,
    device: torch.device,
    *,
    ranks: Ranks | None = None,
    shard: bool = False,
) -> Learner:
    config = DraftConfig(
        vocab_size=work.vocab,
        draft_vocab_size=work.draft_vocab,
        hidden_size=work.hidden,
        target_hidden_size=work.hidden,
        aux_layer_ids=(2, 16, 29),
        intermediate_size=work.intermediate,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        head_dim=work.head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=None,
        norm_before_residual=True,
        norm_before_fc=True,
        fc_norm=False,
        norm_output=True,
    )
    torch.manual_seed(0)
    with device:
        norm = FinalNorm(torch.ones(work.hidden, dtype=torch.bfloat16), None, 1e-5, "rms")
        embedding, lm_head = (0.02 * torch.randn(work.vocab, work.hidden, dtype=torch.bfloat16) for _ in range(2))
        head = TargetHead(embedding, norm, lm_head)
        draft = Draft(config)
        ids = torch.randperm(work.vocab)[: work.draft_vocab].sort().values
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith("_proj.weight") or name == "fc.weight":
                parameter.normal_(0, 0.02)
        draft.lm_head.weight.copy_(head.lm_head[ids])
        draft.d2t.copy_(ids - torch.arange(len(ids), device=device))
        draft.t2d[ids] = True
    settings = recipe.Train(
        unroll_steps=steps,
        kernels=kernels,
        mask_out_of_vocab=top1,
        autocast="bfloat16",
        learning_rate=1e-5,
        batch_tokens=tokens,
        shard=shard,
    )
    return Learner(draft, head, settings, device, ranks or Ranks())


def make_batch(work: Workload, tokens: int, device: torch.device) -> Batch:
    """Random states already on the device, every token the target's own."""
    position = torch.arange(tokens)
    return Batch(
        sample_ids=tuple(str(i) for i in range(tokens // DOCUMENT_TOKENS)),
        input_ids=torch.randint(0, work.vocab, (tokens,)),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        document=position // DOCUMENT_TOKENS,
        position=position % DOCUMENT_TOKENS,
        aux=torch.randn(tokens, AUX, work.hidden, device=device, dtype=torch.bfloat16),
        last=torch.randn(tokens, work.hidden, device=device, dtype=torch.bfloat16),
    )


def milliseconds_of_steps(learner: Learner, batch: Batch, steps: int) -> list[float]:
    """Each step is prepared and launched while the device works on the one before, as in training."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    before = None
    for event in events[1:]:
        launched = learner.step([learner.prepare(batch)], 1e-5, exact=learner.settings.mask_out_of_vocab)
        event.record()
        if before is not None:
            before.figures()
        before = launched
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def measure(name: str, tokens: int, steps: int, arguments: argparse.Namespace) -> dict[str, Any]:
    work, device = WORKLOADS[name], torch.device("cuda")
    learner = make_learner(work, tokens, steps, arguments.kernels, arguments.top1, device)
    batch = make_batch(work, tokens, device)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    first = learner.step([learner.prepare(batch)], 1e-5).figures()
    first_step_seconds = time.perf_counter() - start
    milliseconds_of_steps(learner, batch, arguments.warmup)
    times = milliseconds_of_steps(learner, batch, arguments.repeats)
    floor = floor_seconds(work, tokens, steps) * 1000
    median = statistics.median(times)
    table = Path(arguments.profile) / f"{name}-{tokens}-{steps}.txt" if arguments.profile else None
    return {
        "workload": name,
        "tokens": tokens,
        "steps": steps,
        "kernels": arguments.kernels,
        "top1": arguments.top1,
        "milliseconds": round(median, 2),
        "milliseconds_of_each": [round(x, 2) for x in times],
        "floor_milliseconds": round(floor, 2),
        "times_floor": round(median / floor, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "tokens_per_second": round(tokens / median * 1000),
        "device_milliseconds": profile(learner, batch, table),
        "first_step_seconds": round(first_step_seconds, 1),
        "first_loss": first["loss"],
        "last_loss": learner.step([learner.prepare(batch)], 1e-5).figures()["loss"],
    }


def profile(learner: Learner, batch: Batch, file: Path | None) -> dict[str, float]:
    """Milliseconds of a step that the device spends on each kind of work; each kernel's go to `file`."""
    steps = 3
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        milliseconds_of_steps(learner, batch, steps)
    kernels = [
        (event.self_device_time_total / 1000 / steps, event.count // steps, event.key)
        for event in recorded.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{spent:9.3f} ms {count:6} x  {name}" for spent, count, name in sorted(kernels, reverse=True)]
        file.write_text("\n".join(lines) + "\n")
    by_kind = dict.fromkeys([*KINDS_OF_WORK, "other"], 0.0)
    for spent, _, name in kernels:
        by_kind[next((kind for kind, names in KINDS_OF_WORK.items() if re.search(names, name)), "other")] += spent
    return {kind: round(time, 2) for kind, time in by_kind.items()} | {"all": round(sum(by_kind.values()), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["full"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--steps", nargs="+", type=int, default=[7])
    parser.add_argument("--kernels", choices=["auto", "plain"], default="auto")
    parser.add_argument("--top1", action="store_true", help="ask the whole vocabulary, as train.mask_out_of_vocab does")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--profile", metavar="FOLDER", help="write a table of kernels for each run")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    runs = []
    for name, tokens, steps in itertools.product(arguments.workload, arguments.tokens, arguments.steps):
        runs.append(measure(name, tokens, steps, arguments))
        print({k: v for k, v in runs[-1].items() if k != "milliseconds_of_each"}, flush=True)
        torch.cuda.empty_cache()
    machine = torch.cuda.get_device_properties(0)
    where = ("--output", "--profile")
    command = [word for before, word in itertools.pairwise(sys.argv) if before not in where and word not in where]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "command": " ".join(["python", "benchmarks/train_step.py", *command]),
        "machine": {"gpu": machine.name, "processors": machine.multi_processor_count, "host": platform.machine()},
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda}
        | {name: importlib.metadata.version(name) for name in ("torch", "triton")},
        "matrix_flops": MATRIX_FLOPS,
        "runs": runs,
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
