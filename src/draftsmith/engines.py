"""The engines that serve, by name; which one a recipe measures; and the draft that was exported for it."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from draftsmith import engine_sglang, engine_vllm
from draftsmith.engine_api import Engine
from draftsmith.engine_server import ask
from draftsmith.errors import EngineError, RequestError
from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths

ENGINES: dict[str, Engine] = {"vllm": engine_vllm, "sglang": engine_sglang}


def measured_engine(recipe: Recipe) -> Engine:
    return ENGINES[recipe.evaluate.served.engine or recipe.serve.engine]


def installed_version(engine: Engine) -> str | None:
    for distribution in engine.DISTRIBUTIONS:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_of(engine: Engine, url: str | None) -> str | None:
    """Of the engine that runs at `url`, or else of the one that is installed; None where nobody says."""
    if url is None:
        return installed_version(engine)
    try:
        return engine.version_at(url)
    except (EngineError, ValueError, KeyError):
        return None


def name_of(served: dict[str, Any]) -> str:
    """Of the engine whose figures evaluate/served.json has, with its version where that was known."""
    title = ENGINES[served["engine"]].TITLE if "engine" in served else ""
    return f"{title} {served.get('engine_version') or ''}".strip()


def served_model(engine: Engine, url: str, setting: str, api_key: str | None = None) -> str:
    """Name of the first model of a server.

    Args:
        setting: which the engine was chosen by.

    Raises:
        RequestError: it is another engine's.
        EngineError: it does not answer, or has none.
    """
    models = ask(url, "GET", "/v1/models", api_key=api_key).json().get("data") or []
    if not models:
        raise EngineError("lists no model", where=f"{url}/v1/models")
    owner = models[0].get("owned_by")
    if owner != engine.NAME and owner in ENGINES:
        raise RequestError(
            f"{ENGINES[owner].TITLE} runs there, not {engine.TITLE}",
            where=url,
            hint=f"{setting}={owner}, or another address",
        )
    return str(models[0]["id"])


def exported_draft(paths: RunPaths, engine: Engine, where: str) -> Path:
    """Folder of the draft in the engine's format.

    Raises:
        MissingInputError: nothing was exported.
        RequestError: it was, and not for this engine, with the reason.
    """
    folder, file = paths.export(engine.NAME), paths.stage_file("export")
    if folder.exists() or not file.exists():
        return paths.require(folder, "export")
    report = json.loads(file.read_text(encoding="utf-8")).get("report", {})
    if (why := report.get("left_out", {}).get(engine.NAME)) is None:
        raise RequestError(
            f"{folder} is not there: export.formats leaves it out",
            where=where,
            hint="set export.formats: null in the recipe, then `draftsmith export RECIPE --redo`",
        )
    remedy = f"it was exported for {', '.join(report.get('formats', []))}; for {engine.TITLE}, train one that it holds"
    raise RequestError(f"{engine.TITLE} cannot hold this draft: {why}", where=where, hint=remedy)
