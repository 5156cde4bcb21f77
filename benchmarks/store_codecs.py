"""What does each codec of the store make of a target's states: how many bytes, how far off, and what does it cost?

python benchmarks/store_codecs.py MODEL TEXT [--tokens 1024] [--window 256]

Captures the states of a text in bfloat16, and encodes and decodes them. Of the last states, the target's own
predictions are compared before and after: the share of equal first choices, and the overlap of the distributions,
sum(min(p, q)), which is the acceptance rate that one would have as the other's draft. Writes results/store_codecs.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.extract.from_transformers import Reference
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Target
from draftsmith.records import Features, Sample
from draftsmith.store.codec import CODECS, Parts
from draftsmith.target import TargetHead, load_head, load_target, load_tokenizer
from store import machine, versions  # beside this script

RESULT = Path(__file__).parent / "results" / "store_codecs.json"
GB = 1e9


def capture(model: str, text: str, tokens: int, window: int) -> tuple[list[Features], TargetHead]:
    facts, target = read_facts(model), Target(model=model, dtype="bfloat16", device="cpu")
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    ids = load_tokenizer(facts, target)(text, add_special_tokens=False).input_ids[:tokens]
    parts = [ids[start : start + window] for start in range(0, len(ids), window)]
    samples = [Sample(str(n), str(n), "text", "train", part, [1] * len(part)) for n, part in enumerate(parts)]
    reference = Reference(load_target(facts, target, cpu, dtype), facts, facts.aux_layer_ids or ())
    found = [one for sample in samples for one in reference.features([sample])]
    return found, load_head(facts, cpu, dtype)


def cpu_seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    return work(), time.process_time() - start


def measure(name: str, samples: list[Features], head: TargetHead) -> dict[str, Any]:
    codec = CODECS[name]
    states = [state for sample in samples for state in (sample.aux.contiguous(), sample.last.contiguous())]
    raw = sum(state.nbytes for state in states)
    encoded: list[Parts]
    encoded, encoding = cpu_seconds(lambda: [codec.encode(state) for state in states])
    decoded, decoding = cpu_seconds(lambda: [codec.decode(parts) for parts in encoded])
    ours, exact = (torch.cat(lasts) for lasts in (decoded[1::2], states[1::2]))
    before, after = (head.logits(last).float().softmax(-1) for last in (exact, ours.to(exact.dtype)))
    errors = torch.cat([relative_errors(a, b) for a, b in zip(decoded, states, strict=True)])
    return {
        "bytes_per_bf16_byte": round(sum(v.nbytes for parts in encoded for v in parts.values()) / raw, 4),
        "median_relative_error": round(float(errors.median()), 5),
        "largest_relative_error": round(float(errors.max()), 5),
        "same_first_choice": round(float((before.argmax(-1) == after.argmax(-1)).float().mean()), 4),
        "overlap_of_predictions": round(float(torch.minimum(before, after).sum(-1).mean()), 4),
        "encode_cpu_seconds_per_gb": round(encoding * GB / raw, 2),
        "decode_cpu_seconds_per_gb": round(decoding * GB / raw, 2),
    }


def relative_errors(ours: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of each vector, the distance relative to its length."""
    return ((ours.float() - exact.float()).norm(dim=-1) / exact.float().norm(dim=-1)).flatten()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("text", type=Path, help="file")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--window", type=int, default=256, help="tokens of a sequence")
    options = parser.parse_args()
    torch.set_num_threads(1)
    samples, head = capture(options.model, options.text.read_text(), options.tokens, options.window)
    result = {
        "command": shlex.join(["python", "benchmarks/store_codecs.py", Path(options.model).name, *sys.argv[2:]]),
        "machine": machine(),
        "versions": versions(),
        "codecs": {name: measure(name, samples, head) for name in CODECS},
    }
    for name, figures in result["codecs"].items():
        print(name, json.dumps(figures))
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
