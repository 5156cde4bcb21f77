"""A run → one HTML page, and the same in a few lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths

PAGE, RECIPE = "report.html", "recipe.yaml"


def run(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Write the page of the run. Says where it is: the stages before have said the rest."""
    report = write_report(paths.root, recipe.report.against)
    return {**report, "summary": [report["summary"][0]]}


def write_report(root: Path, against: Path | None = None) -> dict[str, Any]:
    """Write ROOT/report/report.html, and beside it the recipe that the run has on record.

    A run that is not finished has a report too; what is not there is shown as not done, what is damaged is named.

    Args:
        against: another run's folder, whose figures are set beside this one's.

    Raises:
        RequestError: a folder is not that of a run.
    """
    from datetime import datetime

    from draftsmith.report.commands import as_yaml, recorded_recipe
    from draftsmith.report.page import render
    from draftsmith.report.record import read_run
    from draftsmith.report.summary import as_json, summary_lines
    from draftsmith.rundir import write_text

    record, other = read_run(root), read_run(against) if against else None
    folder = RunPaths(root).stage("report")
    tree = recorded_recipe(record)
    if tree:
        write_text(folder / RECIPE, as_yaml(tree))
    page = folder / PAGE
    write_text(page, render(record, other, folder / RECIPE if tree else None, datetime.now().astimezone()))
    report = {"page": str(page), "bytes": page.stat().st_size, "recipe": str(folder / RECIPE) if tree else None}
    report |= as_json(record, other)
    return {**report, "summary": summary_lines(record, other, page)}
