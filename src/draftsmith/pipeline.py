"""How a stage is run: skipped when done, resumed when half done, refused when its settings or inputs changed."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from draftsmith import __version__, launch
from draftsmith.errors import DataError, DraftsmithError, Interrupted, MissingInputError, RequestError, StaleError
from draftsmith.machine import describe_machine
from draftsmith.recipe import Recipe
from draftsmith.redo import ALWAYS, came_of_it, kept_until_done, refuse_unrecorded, set_aside, settle
from draftsmith.rundir import (
    ALSO_READ,
    INPUTS,
    STAGES,
    RunPaths,
    append_event,
    hash_file,
    hash_json,
    hash_outputs,
    sole_process,
    write_json,
)
from draftsmith.store.ledger import LEDGER, lost_shards, read_ledger

DRAFT_FILES = ("config.json", "model.safetensors")


def run_all(recipe: Recipe, *, redo: bool = False) -> dict[str, Any]:
    """Go through all stages. Returns their reports by stage.

    The export states the acceptance, and serving is measured with the export: `evaluate` then goes on after it.
    """
    served = recipe.evaluate.served
    unserved = recipe.evaluate.model_copy(update={"served": served.model_copy(update={"enabled": False})})
    before_export = recipe.model_copy(update={"evaluate": unserved})
    if served.enabled:
        importlib.import_module("draftsmith.evaluate.served").check_served(recipe)
    _files("train", recipe)  # refuses a first draft that is not there
    reports = {}
    for stage in STAGES:
        reports[stage] = run_stage(stage, before_export if stage == "evaluate" else recipe, redo=redo)
        if stage == "prepare":
            _refuse_empty_split(reports[stage])
        if stage == "export" and served.enabled:
            reports["evaluate"] = run_stage("evaluate", recipe)
    return reports


def _refuse_empty_split(prepared: dict[str, Any]) -> None:
    """Raises DataError where a draft could not be trained or not be measured, before hours go into it."""
    for split, share in (("train", "lower"), ("validation", "raise")):
        if not prepared["by_split"][split]["conversations"]:
            raise DataError(
                f"no conversation fell to {split}",
                where="prepare",
                hint=f"add conversations, or {share} prepare.validation_fraction; then prepare --redo",
            )


def run_stage(stage: str, recipe: Recipe, *, redo: bool = False) -> dict[str, Any]:
    """Run one stage as far as it is not done, and return its report.

    Under torchrun, only `train` runs: on all ranks, of which the first keeps the records. The others return nothing.

    Raises:
        StaleError: it was done or begun under other settings or inputs; names what differs.
        MissingInputError: an earlier stage has not been done.
    """

    def work() -> dict[str, Any]:
        paths = RunPaths(recipe.folder)
        if stage in ("prepare", "extract"):
            for line in importlib.import_module("draftsmith.probe").foretell(stage, recipe, paths):
                print(f"{stage}: {line}", file=sys.stderr)
        return importlib.import_module(f"draftsmith.{stage}").run(recipe, paths)

    if launch.world_size() == 1:
        return _run_recorded(stage, recipe, redo, work)
    if stage != "train":
        raise RequestError(
            f"`{stage}` is not for several processes; only `train` is",
            where="torchrun",
            hint=f"run `draftsmith {stage} RECIPE` by itself",
        )
    from draftsmith.train.ranks import run_on_ranks

    return run_on_ranks(recipe.train.device, lambda start: _run_recorded(stage, recipe, redo, start), work) or {}


def _run_recorded(stage: str, recipe: Recipe, redo: bool, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do the `work` of a stage if it is not done, and put on record what came of it."""
    paths = RunPaths(recipe.folder)
    with contextlib.nullcontext() if stage in ALWAYS else sole_process(paths, stage):
        try:
            return _run_alone(stage, recipe, paths, redo, work)
        except (OSError, SafetensorError) as error:
            raise DraftsmithError(
                f"the file system refuses: {error}",
                where=stage,
                hint=f"see the disk that holds {paths.root}, its room and its rights; the same command, without "
                "--redo, goes on from the last safe point",
            ) from error


def _run_alone(
    stage: str, recipe: Recipe, paths: RunPaths, redo: bool, work: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    wanted = fingerprint(stage, recipe, paths)
    settle(paths, stage)
    if redo:
        set_aside(paths, stage)
    refuse_unrecorded(paths, stage)
    state = None if stage in ALWAYS else read_state(paths, stage)
    if state is not None and state["status"] != "done" and not came_of_it(paths, stage):
        state = None  # mended settings are no other ones
    if state is not None:
        recorded = state["fingerprint"]
        differing = differences({**recorded, "settings": as_of_now(recorded["settings"], recipe)}, wanted)
        if differing:
            raise StaleError(
                f"{'was done' if state['status'] == 'done' else 'was begun'} with "
                f"{'other settings or inputs' if len(differing) > 1 else 'another setting or input'}: "
                + "; ".join(differing),
                where=stage,
                hint=f"restore them, or use another run_dir; `draftsmith {stage} RECIPE --redo`, with the same "
                f"settings, deletes all that this stage left{_took(state)} and does it again",
            )
        lacks = state["status"] == "done" and _lacks(stage, paths)
        if not lacks:
            _refuse_damage(stage, stage, paths)
        if state["status"] == "done" and not lacks and not _goes_on(stage, recipe):
            append_event(paths, stage, "skipped")
            print(f"{stage}: done already", file=sys.stderr)
            return state["report"]
    with kept_until_done(paths, stage):
        return _do(stage, paths, wanted, state, work)


def _do(
    stage: str,
    paths: RunPaths,
    wanted: dict[str, Any],
    state: dict[str, Any] | None,
    work: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Begin the stage, or go on from its `state`, and record how it ended."""
    resuming = state is not None
    started = time.time()
    record: dict[str, Any] = {"status": "running", "fingerprint": wanted, "version": __version__}
    record["machine"] = describe_machine()
    if state is not None and state["status"] == "done":
        # It goes on, and stays done if that is cut short; served.json is written before it is on record again.
        write_json(paths.stage_file(stage), {**state, "outputs": _without(state.get("outputs", {}), paths.served.name)})
    else:
        write_json(paths.stage_file(stage), record)
    append_event(paths, stage, "resumed" if resuming else "started")
    try:
        report = work()
    except (Interrupted, KeyboardInterrupt):
        append_event(paths, stage, "interrupted", seconds=time.time() - started)
        raise
    except (DraftsmithError, OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # the disk may be what failed
            append_event(paths, stage, "failed", error=str(error), seconds=time.time() - started)
        raise
    seconds = round(time.time() - started, 2)
    report = {**report, "seconds": seconds}
    done = {**record, "status": "done", "outputs": hash_outputs(paths, stage), "report": report}
    write_json(paths.stage_file(stage), done)
    append_event(paths, stage, "done", seconds=seconds)
    return report


def _took(state: dict[str, Any]) -> str:
    seconds = state["report"].get("seconds") if state["status"] == "done" else None
    return "" if seconds is None else f", of which the last {seconds:,.0f} s of work"


def _without(outputs: dict[str, str], name: str) -> dict[str, str]:
    return {file: digest for file, digest in outputs.items() if file != name}


def _goes_on(stage: str, recipe: Recipe) -> bool:
    """Whether a finished stage may have more to do: serving is measured on top of the other figures, which stay."""
    return stage == "evaluate" and recipe.evaluate.served.enabled


def _lacks(stage: str, paths: RunPaths) -> bool:
    """Whether something is gone that a finished stage makes anew of what is left: a draft from the last checkpoint, or
    a shard's samples. Where nothing is left, it may have been deleted for room, and is no work to begin unasked."""
    if stage == "train" and any(paths.checkpoints.glob("step-*")):
        files = [paths.checkpoints / of / name for of in ("initial", "final") for name in DRAFT_FILES]
        return not all(file.is_file() for file in files)
    if stage == "extract" and (paths.store / LEDGER).exists():
        return bool(lost_shards(paths.store, read_ledger(paths.store).entries))
    return False


def read_state(paths: RunPaths, stage: str) -> dict[str, Any] | None:
    """What is on record of a stage; None if it was never begun."""
    file = paths.stage_file(stage)
    if not file.exists():
        return None
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        state["fingerprint"]["settings"]["seed"], state["fingerprint"]["inputs"].items()
        state.get("outputs", {}).items()
        if state["status"] == "done":
            state["report"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StaleError(
            f"{file} is damaged: {type(error).__name__}: {error}",
            where=stage,
            hint=f"`draftsmith {stage} RECIPE --redo` deletes this stage's results and does it again",
        ) from error
    return state


def fingerprint(stage: str, recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """All that a stage's result depends on: settings, the inputs' fingerprints, the content of files it reads."""
    inputs = {}
    for name in INPUTS[stage]:
        state = read_state(paths, name)
        if state is None or state["status"] != "done":
            raise MissingInputError(
                f"needs `{name}`, which {'is half done' if state else 'has not been done'} in {paths.root}",
                where=stage,
                hint=f"run `draftsmith {name} RECIPE`, or `draftsmith run RECIPE` for everything in order",
            )
        _refuse_stale_input(stage, name, state["fingerprint"], recipe, paths)
        inputs[name] = hash_json(state["fingerprint"])
    for name in (*INPUTS[stage], *ALSO_READ.get(stage, ())):
        _refuse_damage(stage, name, paths)
    return {"settings": settings_of(stage, recipe), "inputs": inputs, "files": _files(stage, recipe)}


def settings_of(stage: str, recipe: Recipe) -> dict[str, Any]:
    """All settings that a stage's own result depends on."""
    settings = {stage: getattr(recipe, stage).identity(), "target": recipe.target.identity(), "seed": recipe.seed}
    if stage == "probe":  # it writes the layer ids into the facts, where every later stage finds them
        settings["extract.aux_layer_ids"] = recipe.extract.aux_layer_ids
    return settings


def as_of_now(settings: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Recorded settings, and for those that an earlier version of draftsmith did not have, their defaults."""
    found = dict(settings)
    for name in settings.keys() & type(recipe).model_fields.keys() - {"seed"}:
        section = type(getattr(recipe, name))
        default = section(model=recipe.target.model) if name == "target" else section()
        found[name] = _filled(settings[name], default.identity())
    return found


def _filled(value: Any, default: Any) -> Any:
    if not isinstance(value, dict) or not isinstance(default, dict):
        return value
    return {**default, **{key: _filled(of, default.get(key)) for key, of in value.items()}}


def _refuse_stale_input(stage: str, name: str, done: dict[str, Any], recipe: Recipe, paths: RunPaths) -> None:
    """Raises StaleError where an input was done with other settings than the recipe's, or from what is no more.

    The seed may be another: so one trains twice on the same states.
    """
    now = {**json.loads(json.dumps(settings_of(name, recipe))), "seed": done["settings"]["seed"]}
    differing = differences(as_of_now(done["settings"], recipe), now)
    for other, hashed in done["inputs"].items():
        state = read_state(paths, other)
        if state is None or hash_json(state["fingerprint"]) != hashed:
            differing.append(f"`{other}` was done anew since")
    if differing:
        raise StaleError(
            f"needs `{name}`, which was done otherwise: " + "; ".join(differing),
            where=stage,
            hint=f"restore what differs, or do it again with `draftsmith {name} RECIPE --redo`",
        )


def _refuse_damage(stage: str, name: str, paths: RunPaths) -> None:
    """Raises StaleError where a file that the stage `name` wrote is another now."""
    recorded = (read_state(paths, name) or {}).get("outputs", {})
    there = hash_outputs(paths, name) if recorded else {}
    if differing := [f"{name}/{file}" for file, digest in recorded.items() if there.get(file) != digest]:
        anew = f"make it anew with `draftsmith {name} RECIPE --redo`"
        if name == "train":
            anew += "; or delete it: `draftsmith train RECIPE` then makes it anew from the last checkpoint"
        raise StaleError(
            f"{', '.join(differing)}: damaged, changed or removed since it was written",
            where=stage,
            hint=f"restore it from a copy, or {anew}",
        )


def _files(stage: str, recipe: Recipe) -> dict[str, str]:
    """Content hash of each file outside the run that the stage reads."""
    if stage == "probe":
        from draftsmith.probe.facts import read_facts

        facts = read_facts(recipe.target.model, revision=recipe.target.revision)
        names = ("config_sha256", "weights_sha256", "tokenizer_sha256", "template_sha256")
        return {f"target {name.removesuffix('_sha256')}": getattr(facts, name) or "absent" for name in names}
    if stage == "prepare":
        outside = [source.path for source in recipe.prepare.sources if source.format != "dataset"]
        outside += [recipe.prepare.chat_template] if recipe.prepare.chat_template else []
        return {path: hash_file(Path(path)) for path in outside if Path(path).is_file()}
    if stage == "train" and recipe.train.draft.initial is not None:
        return _files_of_draft(Path(recipe.train.draft.initial), RunPaths(recipe.folder).stage("train"))
    return {}


def _files_of_draft(folder: Path, training: Path) -> dict[str, str]:
    """Of the draft to go on from.

    Raises:
        RequestError: there is none, or it is of the training itself, with which --redo would delete it.
    """
    where = f"train.draft.initial={folder}"
    if not (folder / "config.json").is_file():
        raise RequestError(
            "there is no draft, for there is no config.json" if folder.is_dir() else "there is no such folder",
            where=where,
            hint="give RUN/train/checkpoints/final, RUN/export/vllm, or a folder that a published draft was fetched to",
        )
    if folder.resolve().is_relative_to(training.resolve()):
        raise RequestError(
            "is what this very training wrote", where=where, hint="give this one another run_dir, or copy the draft"
        )
    files = sorted(file for of in ("config.json", "*.safetensors", "*.bin") for file in folder.glob(of))
    return {f"{file.parent}/{file.name}": hash_file(file) for file in files}


def differences(before: Any, now: Any, prefix: str = "") -> list[str]:
    """`name: before → now` for every leaf that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for key in sorted(before.keys() | now.keys()):
            found += differences(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else str(key))
        return found
    if before == now:
        return []
    name = prefix.removeprefix("settings.")
    return [name if name.startswith(("inputs.", "files.")) else f"{name}: {_said(before)} → {_said(now)}"]


def _said(value: Any) -> str:
    """As a recipe has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
