"""The engine in the foreground, proved to draft before it is left to serve."""

from __future__ import annotations

import shlex
import subprocess
import sys
from itertools import pairwise
from typing import Any

from draftsmith.engine_api import Engine
from draftsmith.engine_server import engine_server
from draftsmith.engines import ENGINES, served_model
from draftsmith.errors import CheckFailed, EngineError
from draftsmith.recipe import Recipe
from draftsmith.signals import stop_requested

SMOKE_PROMPT, SMOKE_TOKENS = "The quick brown fox jumps over the lazy dog. The quick brown fox", 32
_POLL_SECONDS = 0.25


def serve_in_foreground(recipe: Recipe, report: dict[str, Any]) -> dict[str, Any]:
    """Run the command of `serve`'s report until Ctrl-C or SIGTERM, which end it cleanly.

    Once it is healthy, one request shows that it drafts. The engine's own words go to stderr.

    Returns:
        what the request showed.

    Raises:
        MissingExtraError: the engine is not installed.
        CheckFailed: it serves, and does not draft.
        EngineError: it did not come up, or ended by itself.
        Interrupted: a stop was asked for before it was up.
    """
    engine, seconds = ENGINES[report["engine"]], recipe.evaluate.served.start_seconds
    url, api_key = _url(recipe, engine), _api_key(recipe)
    say(shlex.join("…" if before == "--api-key" else one for before, one in pairwise(["", *report["arguments"]])))
    with engine_server(engine, report["arguments"], url, log=None, start_seconds=seconds, where="serve") as process:
        smoke = smoke_request(engine, url, api_key)
        say(f"{url} is healthy and drafts: {smoke['accepted_tokens']} of {smoke['draft_tokens']} draft tokens accepted")
        say("Ctrl-C ends it")
        _until_stopped(process)
    return {"url": url, **smoke, "summary": [f"{'serve':<9} ended on request"]}


def smoke_request(engine: Engine, url: str, api_key: str | None) -> dict[str, Any]:
    """Ask for a few tokens, and see by the counters that they were drafted. Raises CheckFailed, EngineError."""
    model = served_model(engine, url, "serve.engine", api_key)
    text, counted = engine.complete(url, model, SMOKE_PROMPT, SMOKE_TOKENS, api_key)
    if not counted.drafts:
        raise CheckFailed(
            f"the engine answers and has drafted nothing in {SMOKE_TOKENS} tokens",
            where=url,
            hint="see in its log whether it took the draft",
        )
    return {
        "text": text,
        "drafts": counted.drafts,
        "draft_tokens": counted.draft_tokens,
        "accepted_tokens": counted.accepted_tokens,
    }


def _until_stopped(process: subprocess.Popen[bytes]) -> None:
    while not stop_requested():
        try:
            status = process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        raise EngineError(f"the engine ended by itself with status {status}", where="serve")


def _url(recipe: Recipe, engine: Engine) -> str:
    given = recipe.serve.engine_args
    host = given.get("host", "127.0.0.1")
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{recipe.serve.port or given.get('port', engine.PORT)}"


def _api_key(recipe: Recipe) -> str | None:
    """What the engine asks of requests; of those for its health and counters neither engine asks it."""
    given = recipe.serve.engine_args.get("api_key")
    return str(given) if given else None


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
