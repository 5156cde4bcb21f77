"""The page's contents for a terminal, and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.report.figures import Figure, compare, figures, names_apart, say, settings_that_differ
from draftsmith.report.record import RunRecord


def as_json(run: RunRecord, other: RunRecord | None) -> dict[str, Any]:
    """Figures by name, stages, and what is damaged; with another run, that run's figures and the differences."""
    report: dict[str, Any] = {
        "stages": {
            name: {"status": stage.status, "seconds": stage.seconds, "error": stage.error}
            for name, stage in run.stages.items()
        },
        "figures": {one.name: one.value for one in figures(run)},
        "damaged": run.damaged,
    }
    if other:
        report["against"] = {
            "run": str(other.root),
            "figures": {one.name: one.value for one in figures(other)},
            "differences": {name: one.difference for name, one in compare(run, other).items()},
            "settings": settings_that_differ(run, other),
            "damaged": other.damaged,
        }
    return report


def summary_lines(run: RunRecord, other: RunRecord | None, page: Path) -> list[str]:
    lines = [f"report: {page}, {run.done} of {len(run.stages)} stages done"]
    for stage in run.stages.values():
        if stage.status != "done" or stage.error:  # measuring serving goes on from what is done, and may fail
            lines.append(f"  {stage.name}: {stage.status}{_first_line(stage.error)}")
    lines += [f"  damaged: {problem}" for problem in run.damaged]
    if other is None:
        found = figures(run)
        width = max((len(one.label) for one in found), default=0)
        return lines + [f"  {one.label:<{width}}  {_value(one)}" for one in found]
    return lines + _compared_lines(run, other)


def _compared_lines(run: RunRecord, other: RunRecord) -> list[str]:
    name, other_name = names_apart(run, other)
    rows = [("", name, other_name, f"{name} minus {other_name}")]
    for one in compare(run, other).values():
        difference = "" if one.difference is None else say(one.difference, one.unit, signed=True)
        rows.append((one.label, _value(one.this), _value(one.other), difference))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"  damaged in {other_name}: {problem}" for problem in other.damaged]
    lines += [f"  differs, in {other_name} → in {name}: {text}" for text in settings_that_differ(run, other)]
    return [line.rstrip() for line in lines]


def _value(one: Figure | None) -> str:
    if one is None:
        return "–"
    text = say(one.value, one.unit)
    if one.interval:
        low, high = (say(end, one.unit) for end in one.interval)
        text += f" (95 %{f' over {one.over}' if one.over else ''}: {low} to {high})"
    return text


def _first_line(error: str | None) -> str:
    return f": {error.splitlines()[0]}" if error else ""
