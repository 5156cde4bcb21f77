"""What the tests of capture through vLLM share: samples, plans, and how far what was captured is from the reference."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.extract.engine_settings import device_shares, engine_args, environment
from draftsmith.extract.engines import Engines, Plan
from draftsmith.extract.from_transformers import Reference
from draftsmith.extract.work import Work
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Recipe, Target, parse
from draftsmith.records import Features, Sample
from draftsmith.target import load_target
from tests.extract.vllm_faults import FREE

ROUNDING = 3e-5  # in float32
LONGEST = 500
SMALL = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
REPOSITORY = Path(__file__).parents[2]
PYTHONPATH = f"{REPOSITORY / 'src'}:{REPOSITORY}"  # an engine process runs this checkout, and its tests' workers


def mixed_samples(count: int, vocabulary: int = 512, seed: int = 0) -> list[Sample]:
    """Sequences of 1 to 500 tokens, most of them short; a third begin alike, and two are the same."""
    chance = random.Random(seed)
    lengths = [1, 2, LONGEST, *(int(LONGEST ** chance.random()) for _ in range(count - 4))]

    def tokens(length: int) -> list[int]:
        return [chance.randrange(FREE, vocabulary) for _ in range(length)]

    prefix = tokens(LONGEST)
    sequences = []
    for number, length in enumerate(lengths):
        shared = length * 3 // 4 if number % 3 == 0 else 0
        sequences.append([*prefix[:shared], *tokens(length - shared)])
    return [sample(number, ids) for number, ids in enumerate([*sequences, sequences[2]])]


def sample(number: int, input_ids: list[int]) -> Sample:
    mask = [position % 2 for position in range(len(input_ids))]
    return Sample(f"s{number}", f"c{number}", "chat", "train", input_ids, mask)


def beginning_with(token: int, samples: Sequence[Sample], numbers: Sequence[int] | None = None) -> list[Sample]:
    """The same samples; those of these numbers, or all, begin with a token that a worker of `vllm_faults` knows."""
    return [
        replace(one, input_ids=[token, *one.input_ids[1:]]) if numbers is None or number in numbers else one
        for number, one in enumerate(samples)
    ]


def recipe_for(model: Path, **extract: Any) -> Recipe:
    settings = {"engine": "vllm", "codec": "fp32", **SMALL, **extract}
    return parse({"name": "t", "target": {"model": str(model), "dtype": "float32"}, "extract": settings})


def plan_for(model: Path, folder: Path, longest: int = LONGEST, **extract: Any) -> Plan:
    facts, recipe = read_facts(str(model)), recipe_for(model, **extract)
    assert facts.aux_layer_ids is not None
    assert facts.num_hidden_layers is not None
    assert facts.hidden_size is not None
    return Plan(
        engine_args=engine_args(recipe, facts, "float32", longest),
        environment={**environment(facts, longest), "PYTHONPATH": PYTHONPATH},
        capture=recipe.extract.capture,
        layer_ids=(*facts.aux_layer_ids, facts.num_hidden_layers),
        hidden_size=facts.hidden_size,
        folder=folder,
        stall_seconds=recipe.extract.stall_seconds,
        devices=device_shares(recipe),
    )


def run_on(engines: Engines, samples: Sequence[Sample]) -> list[Features]:
    """What engines capture of samples, in the order in which it came out, with what belongs to it."""
    found = [one.features for batch in engines.run(Work(samples, engines.plan.room_tokens)) for one in batch]
    by_id = {one.id: one for one in samples}
    assert all(one.input_ids.tolist() == by_id[one.id].input_ids for one in found)
    assert all(one.loss_mask.tolist() == [bool(own) for own in by_id[one.id].loss_mask] for one in found)
    return found


def states_of(found: Iterable[Features]) -> dict[str, torch.Tensor]:
    """States [T, L, Ht] by sample id, in order."""
    return {one.id: torch.cat([one.aux, one.last[:, None]], dim=1) for one in found}


def captured(plan: Plan, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """By an engine of its own; states by sample id, in the order in which they came out."""
    with Engines(plan) as engines:
        found = run_on(engines, samples)
        engines.end()
        return states_of(found)


def captured_at_once(samples: Sequence[Sample], *plans: Plan) -> list[dict[str, torch.Tensor]]:
    """By each of several engines, which start at the same time; every sample, in order."""
    with ExitStack() as stack:
        started = [stack.enter_context(Engines(plan)) for plan in plans]
        found = []
        for engines in started:
            found.append(states_of(run_on(engines, samples)))
            assert list(found[-1]) == [one.id for one in samples]
            engines.end()
        return found


def errors(
    model: Path, states: dict[str, torch.Tensor], samples: Sequence[Sample], layer_ids: Sequence[int] | None = None
) -> torch.Tensor:
    """[S]: the relative error of each token's state, in its worst layer, against transformers in float32."""
    facts = read_facts(str(model))
    assert facts.aux_layer_ids is not None
    target = load_target(facts, Target(model=str(model)), torch.device("cpu"), torch.float32)
    reference = Reference(target, facts, facts.aux_layer_ids if layer_ids is None else layer_ids[:-1])
    found = []
    for one in samples:
        (theirs,) = reference.states([one.input_ids])
        assert states[one.id].shape == theirs.shape
        found.append(((states[one.id] - theirs).norm(dim=-1) / theirs.norm(dim=-1)).amax(dim=-1))
    return torch.cat(found)
