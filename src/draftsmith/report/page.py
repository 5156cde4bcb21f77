"""The page: what is shown of a run, and how. `page.html` is its text, `page.css` its looks."""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from draftsmith import __version__
from draftsmith.engines import name_of
from draftsmith.recipe import Served
from draftsmith.report.commands import as_yaml, command, recorded_recipe
from draftsmith.report.figures import (
    PREFERRED,
    compare,
    dig,
    figures,
    interval,
    is_number,
    names_apart,
    per_step,
    prompt_set,
    say,
    settings_that_differ,
)
from draftsmith.report.plots import Axis, Bar, Series, axis, grouped_bars, histogram, interval_rows, line_chart
from draftsmith.report.record import RunRecord, StageRecord

HERE = Path(__file__).parent
MOST_POINTS, MOST_BINS, MOST_ROWS = 300, 24, 24
CARDS = ("acceptance_trained", "acceptance_untrained", "identical_share", "tokens", "loss", "seconds")


def render(run: RunRecord, other: RunRecord | None, recipe: Path | None, made: datetime) -> str:
    """The whole page, one document that fetches nothing.

    Args:
        other: the run to set beside it.
        recipe: where the recipe on record is, for the commands.
        made: when this is.
    """
    found = {one.name: one for one in figures(run)}
    served = [one for one in run.served.get("prompt_sets") or [] if is_number(dig(one, "speedup"))]
    tree = recorded_recipe(run)
    return _template().render(
        css=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        run=run,
        reports={name: stage.report for name, stage in run.stages.items()},
        cards=[found[name] for name in CARDS if name in found],
        target=target_name(run),
        made=made.strftime("%Y-%m-%d %H:%M %Z").strip(),
        version=__version__,
        longest_seconds=max((stage.seconds or 0 for stage in run.stages.values()), default=0),
        rates=_rates(run),
        machines=[list(same) for _, same in groupby(_begun(run), lambda stage: (stage.version, stage.machine))],
        plots={
            "lengths": _lengths(run),
            "loss": _loss(run),
            "accuracy": _accuracy(run),
            "positions": _positions(run),
            "domains": _domains(run),
        },
        steps=_steps(run),
        validations=[line for line in run.metrics if line.get("split") == "validation"],
        trained=prompt_set(run, "trained"),
        untrained=prompt_set(run, "untrained"),
        anywhere=_anywhere(run),
        served=served,
        offline_rows=_offline_rows(run),
        served_rows=[(one.get("name"), one, "repeats") for one in served],
        most_served=max((len(one.get("per_position") or []) for one in served), default=0),
        served_by=name_of(run.served),
        busy_note=run.served.get("busy_note"),
        served_settings=_served_settings(run),
        foretold=_foretold(run),
        compared=compare(run, other) if other else {},
        settings=settings_that_differ(run, other) if other else [],
        other=other,
        names=names_apart(run, other) if other else (),
        recipe=as_yaml(tree) if tree else None,
        command=lambda stage, *more: command(stage, recipe, *more),
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,  # what a run does not have prints as nothing, or as a dash
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["show"] = show
    environment.filters["between"] = between
    return environment.get_template("page.html")


def target_name(run: RunRecord) -> str | None:
    """The hub id, or the name of the model's folder."""
    for stage in run.stages.values():
        if isinstance(model := dig(stage.settings, "target", "model"), str):
            return model if re.fullmatch(r"[^/.~][^/]*/[^/]+", model) else Path(model).name
    return None


def show(value: Any, unit: str, signed: bool = False) -> Markup:
    """A number as people read it, with the exact one for machines; a dash where there is none."""
    if not is_number(value):
        return Markup("–")
    return Markup('<data value="{}">{}</data>').format(repr(value), say(value, unit, signed))


def between(bounds: Any, unit: str) -> Markup:
    """A 95 % interval."""
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        return Markup("")
    return Markup(' <span class="interval">({} to {})</span>').format(show(bounds[0], unit), show(bounds[1], unit))


def _served_settings(run: RunRecord) -> list[str]:
    """What was set otherwise than by default, as it is typed."""
    usual = Served().model_dump(mode="json")
    found = dig(run.served, "settings") or {}
    return [f"evaluate.served.{name}={json.dumps(value)}" for name, value in found.items() if value != usual.get(name)]


def _foretold(run: RunRecord) -> dict[int, list[dict[str, Any]]]:
    """The forecast by concurrency, each by K."""
    found: dict[int, list[dict[str, Any]]] = {}
    for one in dig(run.served, "forecast", "all") or []:
        found.setdefault(one["concurrency"], []).append(one)
    return found


def _offline_rows(run: RunRecord) -> list[tuple[str, dict[str, Any], str]]:
    """The acceptance that the forecast is made of, as served sets have theirs: of whole answers, and of as much of
    them as was served. Name, figures, and what their interval is over."""
    made_of, within = (dig(run.served, "forecast", name) for name in ("acceptance_of", "within_tokens"))
    sets = run.acceptance.get("prompt_sets") or []
    rows = []
    for one in sets:
        if made_of and dig(one, "name") == made_of:
            rows.append((f"offline, {made_of}", one, "conversations"))
            if part := dig(one, "within_tokens", str(within)):
                rows.append((f"offline, within {within} tokens", part, ""))
    return rows


def _anywhere(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Sets that have rates over all slots, and those after recorded words at temperature."""
    found = {}
    for of in run.acceptance.get("prompt_sets") or []:
        if dig(of, "all_slots", "unconditional_per_position"):
            found[of.get("name")] = of["all_slots"]
        if heated := dig(of, "at_temperature"):
            found[f"{of.get('name')}, at temperature {heated.get('temperature')}"] = heated
    return found


def _begun(run: RunRecord) -> list[StageRecord]:
    return [stage for stage in run.stages.values() if stage.version]


def _rates(run: RunRecord) -> dict[str, tuple[float, str]]:
    """Throughput of a stage: what is on record, and a second of what it is."""
    lines = [line for line in run.metrics if line.get("split") == "train"]
    found = {
        "prepare": (dig(run.stages["prepare"].report, "answers", "tokens_per_second"), "tokens/s written"),
        "extract": (dig(run.stages["extract"].report, "tokens_per_second"), "tokens/s captured"),
        "train": (lines[-1].get("steps_per_second") if lines else None, "steps/s"),
    }
    return {stage: (rate, unit) for stage, (rate, unit) in found.items() if is_number(rate)}


def _lengths(run: RunRecord) -> Markup | None:
    if not run.lengths_tokens:
        return None
    bins = min(MOST_BINS, len(set(run.lengths_tokens)))
    counts, edges = np.histogram(run.lengths_tokens, bins=bins)
    across = Axis("tokens in a sample", float(edges[0]), float(edges[-1]))
    title = (
        f"Histogram of the lengths of {len(run.lengths_tokens):,} samples, from {min(run.lengths_tokens):,} to "
        f"{max(run.lengths_tokens):,} tokens"
    )
    return histogram(title, across, counts.tolist(), edges.tolist(), "samples")


def _curve(run: RunRecord, split: str, name: str) -> list[tuple[float, float]]:
    """Step and value, thinned to what a chart can show; the last point is always there."""
    lines = [line for line in run.metrics if line.get("split") == split]
    points = [(line["step"], line[name]) for line in lines if is_number(line.get("step")) and is_number(line.get(name))]
    every = max(1, -(-len(points) // MOST_POINTS))
    return points[::-1][::every][::-1]


def _loss(run: RunRecord) -> Markup | None:
    series = [
        Series("training", "s7", _curve(run, "train", "loss")),
        Series("held out", "s0", _curve(run, "validation", "loss"), marked=True),
    ]
    losses = [loss for one in series for _, loss in one.points]
    if not losses:
        return None
    steps = [step for one in series for step, _ in one.points]
    wide = min(losses) > 0 and max(losses) > 4 * min(losses)
    up = axis("loss (logarithmic)" if wide else "loss", losses, log=wide)
    ends = [f"{one.name} from {one.points[0][1]:.3f} to {one.points[-1][1]:.3f}" for one in series if one.points]
    title = f"Loss over {max(steps):,} training steps: {', '.join(ends)}"
    return line_chart(title, axis("step", steps, from_zero=True), up, series)


def _steps(run: RunRecord) -> int:
    """Unroll steps that training has figures of."""
    return max((len(per_step(line, "accuracy")) for line in run.metrics), default=0)


def _accuracy(run: RunRecord) -> Markup | None:
    series = []
    for k in range(_steps(run)):
        series += [
            Series(f"step {k + 1}, training", f"s{k % 7} faint", _curve(run, "train", f"accuracy_{k}")),
            Series(f"step {k + 1}, held out", f"s{k % 7}", _curve(run, "validation", f"accuracy_{k}"), marked=True),
        ]
    rates = [rate for one in series for _, rate in one.points]
    if not rates:
        return None
    steps = [step for one in series for step, _ in one.points]
    last = [f"{one.name} {one.points[-1][1]:.3f}" for one in series if one.marked and one.points]
    title = f"Accuracy of each unroll step over {max(steps):,} training steps; at the end: {', '.join(last)}"
    return line_chart(title, axis("step", steps, from_zero=True), axis("accuracy", rates, from_zero=True), series)


def _positions(run: RunRecord) -> Markup | None:
    groups = []
    for draft in PREFERRED:
        chosen = prompt_set(run, draft)
        rates = chosen.get("per_position")
        if rates:
            bounds = chosen.get("per_position_95") or [None] * len(rates)
            groups.append([Bar(draft, rate, tuple(b) if b else None) for rate, b in zip(rates, bounds, strict=True)])
    if not groups:
        return None
    names = [str(k + 1) for k in range(min(map(len, groups)))]
    highest = [end for group in groups for bar in group for end in (bar.value, *(bar.interval or ()))]
    said = "; ".join(f"{group[0].name} {', '.join(f'{bar.value:.3f}' for bar in group)}" for group in groups)
    title = f"Share of rounds in which each draft token is accepted: {said}"
    return grouped_bars(title, "draft token", axis("accepted", highest, from_zero=True), names, groups)


def _domains(run: RunRecord) -> Markup | None:
    sets = {draft: prompt_set(run, draft).get("by_domain") or {} for draft in PREFERRED}
    largest = sorted(sets["trained"], key=lambda name: -(dig(sets["trained"], name, "rounds") or 0))[:MOST_ROWS]
    rows = []
    for name in largest:
        bars = [
            Bar(draft, found[name]["mean_acceptance_length"], interval(found[name]))
            for draft, found in sets.items()
            if is_number(dig(found, name, "mean_acceptance_length"))
        ]
        rows.append((name, bars))
    ends = [end for _, bars in rows for bar in bars for end in (bar.value, *(bar.interval or ()))]
    if not ends:
        return None
    title = f"Acceptance length in {len(rows)} domain{'s' if len(rows) > 1 else ''}, trained and untrained draft"
    return interval_rows(title, axis("acceptance length", ends), rows)
