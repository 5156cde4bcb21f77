"""A server of the tiny target over HTTP, as vLLM and others answer, and as they fail."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import recipe as recipes
from draftsmith.corpus import read_corpus
from draftsmith.errors import EngineError, RequestError
from draftsmith.prepare import run, server
from draftsmith.prepare.generate import decode, sampler
from draftsmith.recipe import Recipe, Regenerate
from draftsmith.rundir import RunPaths, write_json
from draftsmith.target import load_target, load_tokenizer
from tests.prepare.chats import facts_of, share_gpt, write_lines

TALKS = [{"conversations": share_gpt(f"How many {i}?", "Some.", "Sure?")} for i in range(6)]
Reply = tuple[int, Any]  # status, JSON
Respond = Callable[[str, dict[str, Any]], Reply]


@contextmanager
def serving(respond: Respond) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An HTTP server whose POST requests `respond` answers; gives its URL and the bodies that it got."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(*respond(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append({"path": self.path, **body})
            self.reply(*respond(self.path, body))

        def reply(self, status: int, data: Any) -> None:
            text = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            with suppress(BrokenPipeError):  # the client has gone
                self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1", bodies
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> tuple[Any, Any]:
    settings = recipes.Target(model=str(tiny_target))
    facts = facts_of(tiny_target)
    return load_tokenizer(facts, settings), load_target(facts, settings, torch.device("cpu"), torch.float32)


@pytest.fixture
def engine(target: tuple[Any, Any]) -> Respond:
    """The tiny target as vLLM serves it."""
    tokenizer, model = target
    lock = threading.Lock()

    def respond(path: str, body: dict[str, Any]) -> Reply:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "max_model_len": 512}]}
        if path == "/v1/chat/completions":
            messages = body["messages"]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        else:
            prompt = body["prompt"]
        greedy = sampler(Regenerate(), 0, torch.device("cpu"))
        with lock:
            (ids,) = decode(model, [prompt], [body["max_tokens"]], frozenset([2]), greedy)
        reason = "stop" if ids[-1] == 2 else "length"
        text = tokenizer.decode([i for i in ids if i != 2])
        choice: dict[str, Any] = {"finish_reason": reason}
        if path == "/v1/chat/completions":
            choice["message"] = {"role": "assistant", "content": text, "reasoning_content": None}
        else:
            choice |= {"text": text, "token_ids": ids if body.get("return_token_ids") else None}
        return 200, {"choices": [choice]}

    return respond


@pytest.fixture
def recipe_of(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    monkeypatch.setattr(server, "_FIRST_WAIT_SECONDS", 0.001)

    def make(url: str, name: str = "run", talks: Any = TALKS, length: int = 128, **regenerate: Any) -> Recipe:
        data = write_lines(tmp_path / "talk.jsonl", *talks)
        settings = {"using": "server", "url": url, "max_new_tokens": 10, "batch_size": 4, **regenerate}
        prepare = {"sources": [{"path": str(data)}], "regenerate": settings, "max_length_tokens": length}
        recipe = recipes.parse(
            {"name": name, "run_dir": str(tmp_path / name), "target": {"model": str(tiny_target)}, "prepare": prepare}
        )
        write_json(RunPaths(recipe.folder).facts, facts_of(tiny_target).to_json())
        return recipe

    return make


def prepare(recipe: Recipe) -> dict[str, Any]:
    return run(recipe, RunPaths(recipe.folder))


def rows(recipe: Recipe) -> list[tuple[str, list[int], list[int]]]:
    return [(s.id, s.input_ids, s.loss_mask) for s in read_corpus(RunPaths(recipe.folder).corpus)]


def answers(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunPaths(recipe.folder).answers.read_text().splitlines()]


def test_a_server_gives_the_corpus_that_transformers_gives(recipe_of: Callable[..., Recipe], engine: Respond) -> None:
    with serving(engine) as (url, bodies):
        report = prepare(served := recipe_of(url))
    prepare(local := recipe_of("", "local", using="transformers"))
    assert rows(served) == rows(local)
    assert report["answers"]["regenerated_share"] == 1.0
    assert report["answers"]["retokenised"] == 0
    asked = bodies[1:]  # the first is the trial
    assert all(body["return_token_ids"] and isinstance(body["prompt"][0], int) for body in asked)
    assert {body["model"] for body in asked} == {"tiny"}


def test_a_server_without_token_ids_has_its_text_tokenised_and_that_is_counted(
    recipe_of: Callable[..., Recipe], engine: Respond
) -> None:
    def without_ids(path: str, body: dict[str, Any]) -> Reply:
        return engine(path, {**body, "return_token_ids": False})

    with serving(without_ids) as (url, _):
        report = prepare(recipe := recipe_of(url))
    assert report["answers"]["retokenised"] == report["answers"]["answers"] > 0
    assert report["answers"]["regenerated_share"] == 0.0
    assert "came as text without token ids" in "\n".join(report["summary"])
    for answer in answers(recipe):
        assert (answer["answer_ids"][-1] == 2) == (answer["finish_reason"] == "stop")


def test_a_server_that_takes_no_token_ids_is_asked_by_chat(recipe_of: Callable[..., Recipe], engine: Respond) -> None:
    def chat_only(path: str, body: dict[str, Any]) -> Reply:
        return (400, {"error": "prompt must be text"}) if path == "/v1/completions" else engine(path, body)

    with serving(chat_only) as (url, bodies):
        report = prepare(recipe := recipe_of(url))
    assert report["answers"]["retokenised"] == report["answers"]["answers"] > 0
    assert {body["path"] for body in bodies[1:]} == {"/v1/chat/completions"}
    for answer in answers(recipe):
        assert (answer["answer_ids"][-1:] == [2]) == (answer["finish_reason"] == "stop")


def scripted(engine: Respond, reasons: list[Any]) -> Respond:
    """Answers of two letters, finished for these reasons one after the other."""
    remaining = iter(reasons)

    def respond(path: str, body: dict[str, Any]) -> Reply:
        if path == "/v1/models" or body["max_tokens"] == 8:  # the trial is answered as ever
            return engine(path, body)
        reason = next(remaining)
        ids = [40, 41, 42, 43] + [2] * (reason == "stop")
        return 200, {"choices": [{"text": "", "token_ids": ids, "finish_reason": reason}]}

    return respond


def test_reasons_for_the_end_are_counted_as_the_server_gives_them(
    recipe_of: Callable[..., Recipe], engine: Respond
) -> None:
    talks = [{"conversations": share_gpt(f"{i}?")} for i in range(5)]
    with serving(scripted(engine, ["length", "stop", "tool_calls", None, "stop"])) as (url, _):
        report = prepare(recipe := recipe_of(url, talks=talks, batch_size=1))
    assert report["answers"]["finish_reasons"] == {"stop": 2, "length": 1, "tool_calls": 1, "unknown": 1}
    assert report["answers"]["cut_share"] == 0.4
    ends = {id: ids[-1] == 2 for id, ids, _ in rows(recipe)}
    assert ends == {"talk/0/0": False, "talk/1/0": True, "talk/2/0": False, "talk/3/0": False, "talk/4/0": True}


def test_trouble_that_passes_is_waited_for(recipe_of: Callable[..., Recipe], engine: Respond) -> None:
    failures = Counter({"/v1/completions": 3, "/v1/models": 2})

    def shaky(path: str, body: dict[str, Any]) -> Reply:
        if failures[path] > 0:
            failures[path] -= 1
            return 503, {"error": "starting"}
        return engine(path, body)

    with serving(shaky) as (url, _):
        prepare(recipe := recipe_of(url))
    prepare(local := recipe_of("", "local", using="transformers"))
    assert rows(recipe) == rows(local)


def test_trouble_that_lasts_stops_the_run_and_loses_no_answer(
    recipe_of: Callable[..., Recipe], engine: Respond
) -> None:
    replies = iter(range(6))  # advanced by one thread at a time, as iterators of C are

    def dying(path: str, body: dict[str, Any]) -> Reply:
        alive = path == "/v1/models" or next(replies, None) is not None
        return engine(path, body) if alive else (500, {"error": "out of memory"})

    with serving(dying) as (url, _), pytest.raises(EngineError, match=r"(?s)failed 6 times in a row.*out of memory"):
        prepare(recipe := recipe_of(url, batch_size=2))
    assert len(answers(recipe)) == 5  # six replies, one of them to the trial
    with serving(engine) as (url, bodies):
        report = prepare(recipe := recipe_of(url, batch_size=2))
    assert report["answers"]["found_from_an_earlier_run"] == 5
    assert len(bodies) == 1 + report["answers"]["answers"] - 5
    prepare(local := recipe_of("", "local", using="transformers"))
    assert rows(recipe) == rows(local)


def test_a_server_that_is_not_there_is_named_with_its_address(recipe_of: Callable[..., Recipe]) -> None:
    with serving(lambda path, body: (200, {})) as (url, _):
        pass  # closed again, so that nothing listens there
    with pytest.raises(EngineError, match=rf"{url}/models.*ConnectError"):
        prepare(recipe_of(url))


def test_a_refused_request_is_not_repeated(recipe_of: Callable[..., Recipe], engine: Respond) -> None:
    def locked(path: str, body: dict[str, Any]) -> Reply:
        return engine(path, body) if path == "/v1/models" else (401, {"error": "no key"})

    with serving(locked) as (url, bodies), pytest.raises(EngineError, match=r"HTTP 401.*no key"):
        prepare(recipe_of(url))
    assert len(bodies) == 1


def test_an_answer_that_takes_too_long_is_an_error_with_the_setting(
    recipe_of: Callable[..., Recipe], engine: Respond
) -> None:
    over = threading.Event()

    def hanging(path: str, body: dict[str, Any]) -> Reply:
        if path != "/v1/models":
            over.wait(30)
        return engine(path, {"max_tokens": 1, "prompt": [5], **body})

    with serving(hanging) as (url, _):
        with pytest.raises(EngineError, match=r"prepare\.regenerate\.timeout_seconds"):
            prepare(recipe_of(url, timeout_seconds=0.3))
        over.set()


def test_a_server_of_another_model_is_found_out(recipe_of: Callable[..., Recipe], engine: Respond) -> None:
    def other(path: str, body: dict[str, Any]) -> Reply:
        status, reply = engine(path, body)
        if "choices" in reply:
            reply["choices"][0] |= {"text": "Bonjour", "token_ids": [70, 71]}
        return status, reply

    with serving(other) as (url, _), pytest.raises(EngineError, match="serves another model"):
        prepare(recipe_of(url))


def test_a_reply_that_is_none_is_an_error_that_shows_it(recipe_of: Callable[..., Recipe], engine: Respond) -> None:
    for reply in ({"error": "?"}, {"choices": []}, [1]):

        def odd(path: str, body: dict[str, Any], reply: Any = reply) -> Reply:
            return engine(path, body) if path == "/v1/models" else (200, reply)

        with serving(odd) as (url, _), pytest.raises(EngineError, match=re.escape(json.dumps(reply))):
            prepare(recipe_of(url))


def test_what_the_server_does_not_have_is_a_wrong_request(recipe_of: Callable[..., Recipe], engine: Respond) -> None:
    def several(path: str, body: dict[str, Any]) -> Reply:
        return (200, {"data": [{"id": "a"}, {"id": "b"}]}) if path == "/v1/models" else engine(path, body)

    with serving(several) as (url, _):
        with pytest.raises(RequestError, match="no model is named, and the server has a, b"):
            prepare(recipe_of(url))
        with pytest.raises(RequestError, match="c is named"):
            prepare(recipe_of(url, served_model="c"))
        prepare(recipe_of(url, served_model="b"))
    with serving(lambda path, body: (404, {}) if path == "/v1/models" else engine(path, body)) as (url, _):
        prepare(recipe_of(url, "unlisted", served_model="b"))
        with pytest.raises(EngineError, match="HTTP 404"):
            prepare(recipe_of(url, "unnamed"))
    with serving(engine) as (url, _), pytest.raises(RequestError, match="at most 512 tokens"):
        prepare(recipe_of(url, "long", length=513))
    with pytest.raises(RequestError, match=r"prepare\.regenerate\.url"):
        prepare(recipe_of("", "nowhere"))
