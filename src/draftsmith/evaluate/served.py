"""Speed in serving: the target in the engine alone, then with its exported draft, under the same load.

One engine after the other, each with the whole machine: first without the draft, then once for each K. At every engine
a warm-up, the bursts that step costs are measured by, and every prompt set at every concurrency, as often as wanted.
Each is on disk, in served.jsonl, before the next begins.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from draftsmith.engine_api import Engine, Sampling
from draftsmith.engine_server import engine_server, free_port, require_installed
from draftsmith.engines import exported_draft, measured_engine, served_model, version_of
from draftsmith.errors import RequestError
from draftsmith.evaluate.busy import busy_cores, warning
from draftsmith.evaluate.journal import work_through
from draftsmith.evaluate.served_figures import STEPS, Measurements, differences, make_served, refuse_more_than_evaluated
from draftsmith.evaluate.served_load import Burst, Running, ask_all, figures_of
from draftsmith.evaluate.served_prompts import PromptSet, check_prompt_sets, read_prompt_sets
from draftsmith.evaluate.step_costs import seconds_per_step, sizes_of_target_steps
from draftsmith.recipe import Recipe, Served
from draftsmith.records import TargetFacts
from draftsmith.rundir import RunPaths, append_event, digest_draft, hash_json, write_json
from draftsmith.target import read_facts_of_run

WARM_UP_TOKENS = 16
STEP_SECONDS, MOST_TURNS = 3.0, 30  # of bursts that one step is measured by
REPEAT_SECONDS = 3.0  # that a repeat lasts at the least: a machine's speed drifts


@dataclass(frozen=True)
class Plan:
    """What is the same with the draft and without."""

    engine: Engine
    engine_version: str | None
    recipe: Recipe
    folder: Path  # of the stage
    facts: TargetFacts
    draft: Path
    draft_sha256: str
    sets: list[PromptSet]
    most_draft_tokens: int  # of which a forecast may be wanted

    @property
    def target_sizes(self) -> list[int]:
        return sizes_of_target_steps(self.recipe.evaluate.served.concurrency, self.most_draft_tokens)


@dataclass(frozen=True)
class Side:
    """With the draft or without: a running engine, or what to start."""

    name: str
    k: int  # draft tokens in a round; 0: the target alone
    command: list[str]  # empty where it runs already
    url: str | None


def measure_served(recipe: Recipe, paths: RunPaths, offline: dict[str, Any]) -> dict[str, Any]:
    """Measure, set the forecast beside it, and leave evaluate/served.json.

    Args:
        offline: the report of the other figures, whose acceptance the forecast is made of.

    Returns:
        what served.json holds; `prompt_sets` as DESIGN's contract has them.

    Raises:
        RequestError: there is no exported draft, or the settings contradict one another.
        EngineError: an engine does not come up, breaks off, or does not draft.
    """
    plan = make_plan(recipe, paths)
    sides = [_side(plan, k) for k in (0, *_ks(recipe))]
    alone = _work(plan, sides[0], plan.target_sizes, None)
    drafted = {side.k: _work(plan, side, recipe.evaluate.served.concurrency, alone) for side in sides[1:]}
    measured = zip(sides, (alone, *drafted.values()), strict=True)
    busy = {side.name: cores for side, found in measured if (cores := _most_busy(found)) is not None}
    report = {
        "engine": plan.engine.NAME,
        "engine_version": plan.engine_version,
        "draft_sha256": plan.draft_sha256,
        "settings": recipe.evaluate.served.model_dump(mode="json"),
        "commands": {side.name: shlex.join(side.command) for side in sides if side.command},
        "prompts_too_long": {found.name: found.too_long for found in plan.sets},
        "busy_cores": busy,
        "busy_note": warning(busy),
        **make_served(recipe, alone, drafted, offline),
    }
    write_json(paths.served, report)
    return report


def check_served(recipe: Recipe) -> None:
    """Raises RequestError, DataError or MissingExtraError where serving could not be measured, however good a draft."""
    settings, engine = recipe.evaluate.served, measured_engine(recipe)
    refuse_more_than_evaluated(recipe)
    _refuse_contradictions(settings)
    if settings.url is None:
        require_installed(engine, "evaluate.served")
    if recipe.export.formats is not None and engine.NAME not in recipe.export.formats:
        raise RequestError(
            f"{engine.TITLE} is to be measured, and no draft exported for it",
            where="export.formats",
            hint=f"name {engine.NAME} there too, or leave it null for every format that can hold the draft",
        )
    draft = recipe.train.draft
    if draft.norm_before_residual and draft.initial is None and not engine.HOLDS_NORM_BEFORE_RESIDUAL:
        raise RequestError(
            f"{engine.TITLE} is to be measured, and cannot hold a draft with norm_before_residual",
            where="evaluate.served",
            hint="train.draft.norm_before_residual=false",
        )
    _refuse_too_few_sequences(recipe)
    check_prompt_sets(settings.prompt_sets)


def _refuse_too_few_sequences(recipe: Recipe) -> None:
    """A step of so many tokens is measured as one of so many sequences: an engine that runs fewer would do two."""
    needed = max(sizes_of_target_steps(recipe.evaluate.served.concurrency, _most_draft_tokens(recipe)))
    for name in ("max_num_seqs", "max_running_requests"):
        given = recipe.serve.engine_args.get(name)
        if isinstance(given, int) and recipe.evaluate.served.url is None and given < needed:
            raise RequestError(
                f"lets {given} sequences run at once, and a round of {_most_draft_tokens(recipe)} draft tokens at "
                f"{max(recipe.evaluate.served.concurrency)} at once is measured by {needed}",
                where=f"serve.engine_args.{name}",
                hint="leave it out for the measurement, or lower evaluate.served.concurrency",
            )


def _refuse_contradictions(settings: Served) -> None:
    if (settings.url is None) != (settings.baseline_url is None):
        raise RequestError(
            "of two running engines, both must be named: one with the draft, one without it",
            where="evaluate.served.url, evaluate.served.baseline_url",
        )
    if settings.url is not None and len(settings.num_speculative_tokens) > 1:
        raise RequestError(
            "a running engine has one number of draft tokens", where="evaluate.served.num_speculative_tokens"
        )


def make_plan(recipe: Recipe, paths: RunPaths) -> Plan:
    settings = recipe.evaluate.served
    _refuse_contradictions(settings)
    _refuse_too_few_sequences(recipe)
    engine = measured_engine(recipe)
    draft = exported_draft(paths, engine, "evaluate.served")
    facts = read_facts_of_run(paths)
    given = recipe.serve.engine_args
    longest = given.get("max_model_len") or given.get("context_length") or facts.max_position_embeddings
    room = None if longest is None else int(longest) - settings.max_tokens - _most_draft_tokens(recipe) - 1
    return Plan(
        engine=engine,
        engine_version=version_of(engine, _without_path(settings.url)),
        recipe=recipe,
        folder=paths.stage("evaluate"),
        facts=facts,
        draft=draft,
        draft_sha256=digest_draft(draft),
        sets=read_prompt_sets(recipe, paths, facts, room),
        most_draft_tokens=_most_draft_tokens(recipe),
    )


def _ks(recipe: Recipe) -> list[int]:
    return recipe.evaluate.served.num_speculative_tokens or [recipe.evaluate.num_speculative_tokens]


def _most_draft_tokens(recipe: Recipe) -> int:
    return max(recipe.evaluate.num_speculative_tokens, *_ks(recipe))


def _without_path(url: str | None) -> str | None:
    return url and url.rstrip("/").removesuffix("/v1")


def _side(plan: Plan, k: int) -> Side:
    settings, serve = plan.recipe.evaluate.served, plan.recipe.serve
    name = f"with the draft, K = {k}" if k else "without the draft"
    running = settings.url if k else settings.baseline_url
    if running is not None:
        return Side(name, k, [], _without_path(running))
    # Prompts are asked again at every concurrency and repeat: a cache of them would answer in the target's place.
    ours = plan.engine.measuring_args(max(plan.target_sizes))
    here = {"host": "127.0.0.1", "port": None, "api_key": None}  # a port that is free when it starts
    flags = {**ours, **serve.engine_args, **here}
    return Side(name, k, plan.engine.command(plan.recipe, plan.facts, plan.draft if k else None, k, **flags), None)


def _work(plan: Plan, side: Side, step_sizes: list[int], alone: Measurements | None) -> Measurements:
    """All measurements at one engine, which is started only if one of them is not on record."""
    settings = plan.recipe.evaluate.served
    sets = {found.name: found for found in plan.sets}
    wanted = [(STEPS, size) for size in step_sizes]
    wanted += [(name, concurrency) for name in sets for concurrency in settings.concurrency]
    names = {f"{_identity(plan, side, name)} {side.name} {name} {size}": (name, size) for name, size in wanted}
    with ExitStack() as stack:
        started: list[tuple[Running, float | None]] = []

        def work(id: str) -> dict[str, Any]:
            if not started:
                busy = busy_cores() if side.url is None else None
                started.append((stack.enter_context(_up(plan, side, max(step_sizes))), busy))
            (running, busy), (name, size) = started[0], names[id]
            if name == STEPS:
                return {"busy_cores": busy, "seconds": _measure_step(plan, running, size)}
            before = alone[name, size] if alone else None
            return {"busy_cores": busy, **_measure(plan, side, running, sets[name], size, before)}

        results = work_through(plan.folder / "served.jsonl", f"serve {side.name}", "figures", list(names), work)
    return dict(zip(names.values(), results, strict=True))


def _most_busy(found: Measurements) -> float | None:
    """Cores that something else used before the engine was started, the most; None of one that ran already."""
    return max((one["busy_cores"] for one in found.values() if one.get("busy_cores") is not None), default=None)


def _measure_step(plan: Plan, running: Running, sequences: int) -> float:
    """Seconds of a step, or of a round, of so many sequences.

    Short and long bursts take turns, until there were enough of both by the engine's clock: a machine's speed drifts,
    and a small model's burst is over in a quarter of a second.
    """
    settings = plan.recipe.evaluate.served
    prompts = list(islice(cycle(plan.sets[0].prompts), sequences))
    few = max(2, settings.max_tokens // 4)
    short: list[Burst] = []
    long: list[Burst] = []
    spent = 0.0
    while len(long) < settings.repeats or (spent < STEP_SECONDS and len(long) < MOST_TURNS):
        for bursts, tokens in ((short, few), (long, settings.max_tokens)):
            bursts.append(_ask(plan, running, prompts, sequences, tokens))
            spent += bursts[-1].counters.decode_seconds / sequences
    return seconds_per_step(short, long)


def _measure(
    plan: Plan, side: Side, running: Running, asked: PromptSet, concurrency: int, alone: dict[str, Any] | None
) -> dict[str, Any]:
    """One set at one concurrency, in whole waves, as often as wanted; and where its texts are not those of `alone`.

    A repeat that would be over too soon asks the prompts several times, with the draft as often as without it.
    """
    settings = plan.recipe.evaluate.served
    waves = -(-len(asked.prompts) // concurrency)
    prompts = list(islice(cycle(asked.prompts), waves * concurrency))
    times = alone.get("times", 1) if alone else 1
    bursts = [_ask(plan, running, prompts * times, concurrency, settings.max_tokens)]
    if alone is None and bursts[0].seconds < REPEAT_SECONDS:
        times = min(MOST_TURNS, math.ceil(REPEAT_SECONDS / bursts.pop().seconds))
    while len(bursts) < settings.repeats:
        bursts.append(_ask(plan, running, prompts * times, concurrency, settings.max_tokens))
    texts = [reply.token_ids for reply in bursts[0].replies[: len(prompts)]]
    result: dict[str, Any] = {"times": times, "repeats": [figures_of(burst) for burst in bursts], "texts": texts}
    _check_rounds(side, running, bursts)
    if alone is not None and settings.temperature == 0:
        judge = partial(running.engine.likeliest, running.url, running.model)
        result["differences"] = differences(prompts, alone["texts"], texts, judge)
    return result


def _check_rounds(side: Side, running: Running, bursts: list[Burst]) -> None:
    """Raises RequestError if the engine drafts where it must not, or not, or another number of tokens than was said."""
    for burst in bursts:
        found = len(burst.counters.accepted_per_position) if burst.counters.drafts else 0
        if found != side.k:
            raise RequestError(
                f"the engine {side.name} drafts {f'{found} tokens in a round' if found else 'nothing'}",
                where=running.url,
                hint="name the engine with the draft in evaluate.served.url, the one without it in baseline_url, and "
                "its draft tokens in evaluate.served.num_speculative_tokens",
            )


def _ask(plan: Plan, running: Running, prompts: list[list[int]], concurrency: int, max_tokens: int) -> Burst:
    settings = plan.recipe.evaluate.served
    sampling = Sampling(max_tokens, settings.temperature, plan.recipe.seed)
    return ask_all(running, prompts, concurrency, sampling, settings.timeout_seconds)


@contextmanager
def _up(plan: Plan, side: Side, most: int) -> Iterator[Running]:
    """The engine, running and warm."""
    settings, log = plan.recipe.evaluate.served, plan.folder / "engine.log"
    with ExitStack() as stack:
        url = side.url
        if url is None:
            port = free_port()
            url, command = f"http://127.0.0.1:{port}", [*side.command, "--port", str(port)]
            append_event(RunPaths(plan.folder.parent), "evaluate", "engine", command=shlex.join(command))
            stack.enter_context(
                engine_server(
                    plan.engine, command, url, log=log, start_seconds=settings.start_seconds, where="evaluate.served"
                )
            )
        running = Running(plan.engine, url, served_model(plan.engine, url, "evaluate.served.engine"))
        for size in sorted({1, most}):
            prompts = list(islice(cycle(plan.sets[0].prompts), size))
            _ask(plan, running, prompts, size, min(WARM_UP_TOKENS, settings.max_tokens))
        yield running


def _identity(plan: Plan, side: Side, name: str) -> str:
    """Of what one figure depends on, so that more sets, concurrencies or Ks leave those on record."""
    free = {"enabled", "engine", "num_speculative_tokens", "concurrency", "prompt_sets"}
    free |= {"start_seconds", "timeout_seconds"}
    version = plan.engine_version  # vLLM's figures have been filed under that alone since before there was SGLang
    chosen = plan.sets if name == STEPS else [found for found in plan.sets if found.name == name]
    return hash_json(
        {
            "settings": plan.recipe.evaluate.served.model_dump(mode="json", exclude=free),
            "serve": [plan.recipe.serve.engine_args, plan.recipe.serve.tensor_parallel_size],
            "seed": plan.recipe.seed,
            "draft": plan.draft_sha256 if side.k else None,
            "engine": version if plan.engine.NAME == "vllm" else [plan.engine.NAME, version],
            "prompts": chosen[0].prompts,
        }
    )[:12]
