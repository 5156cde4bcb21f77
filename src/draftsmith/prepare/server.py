"""Answers by the target behind an OpenAI-compatible server.

What is asked for first is `/completions` with the prompt's token ids and `return_token_ids` (vLLM,
`entrypoints/openai/completion/protocol.py`: `choices[].token_ids`), so that training ids are exactly what the target
read and wrote. A server that takes no token ids is asked by `/chat/completions`; one that returns none has its text
tokenised anew, which is counted. A key that it wants is taken from the environment variable OPENAI_API_KEY.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from dataclasses import replace
from itertools import islice
from typing import Any

import httpx

from draftsmith.engine_server import is_remote
from draftsmith.errors import EngineError, RequestError
from draftsmith.prepare.answers import FINISHED, Answer, Origin
from draftsmith.prepare.dialogue import Request, message_of
from draftsmith.prepare.regenerate import Talks
from draftsmith.prepare.render import Chat, Unrenderable
from draftsmith.prepare.sources import REASONING_KEYS, Unusable, check_values, normal_form
from draftsmith.progress import Progress
from draftsmith.recipe import Recipe
from draftsmith.signals import check_stop

_TRIES = 6
_FIRST_WAIT_SECONDS = 1.0  # doubled after each failure of a request
_PASSING = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses after which the same request may succeed
_NOT_UNDERSTOOD = (400, 404, 405, 415, 422, 501)  # statuses with which a server says that it takes no token ids
_CONNECT_SECONDS = 10.0
_POLL_SECONDS = 1.0

_Reply = tuple[list[int], str, dict[str, Any], Origin]  # answer ids, finish reason, message, origin


def answer_with_server(talks: Talks, chat: Chat, recipe: Recipe, bar: Progress) -> None:
    """Ask the server for every answer, `batch_size` requests in flight.

    Raises:
        EngineError: the server cannot be reached, refuses a request, or keeps failing; what came is on disk.
        RequestError: the server does not have what the recipe asks for.
        Interrupted: a stop was asked for.
    """
    asyncio.run(_drive(talks, chat, recipe, bar))


async def _drive(talks: Talks, chat: Chat, recipe: Recipe, bar: Progress) -> None:
    settings = recipe.prepare.regenerate
    key = os.environ.get("OPENAI_API_KEY")
    async with httpx.AsyncClient(
        base_url=f"{(settings.url or '').rstrip('/')}/",
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(settings.timeout_seconds, connect=_CONNECT_SECONDS, pool=None),
        limits=httpx.Limits(max_connections=settings.batch_size),
        trust_env=is_remote(settings.url or ""),
    ) as client:
        server = _Server(client, chat, recipe)
        begun = talks.begin()
        waiting: list[Request] = []  # begun conversations' next requests
        in_flight: set[asyncio.Task[Answer]] = set()
        failure: BaseException | None = None
        try:
            while True:
                if failure is None:
                    waiting += islice(begun, settings.batch_size - len(in_flight) - len(waiting))
                    if waiting and not server.model:
                        await server.connect(waiting[0])
                    in_flight |= {asyncio.create_task(server.answer(request)) for request in waiting}
                if not in_flight:
                    break
                done, in_flight = await asyncio.wait(
                    in_flight, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                waiting = talks.go_on([task.result() for task in done if task.exception() is None])
                failure = failure or next(filter(None, (task.exception() for task in done)), None)
                bar.advance(talks.ended.total() - bar.done)
                check_stop("prepare")
            if failure is not None:
                raise failure  # only now that what was in flight has come, and is on disk
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)


class _Server:
    """One model behind the server, asked in the way that it understands."""

    def __init__(self, client: httpx.AsyncClient, chat: Chat, recipe: Recipe) -> None:
        self.client, self.chat, self.recipe = client, chat, recipe
        self.settings = recipe.prepare.regenerate
        self.model = ""
        self.takes_ids = True

    async def connect(self, example: Request) -> None:
        """Find the model's name, and try whether the server takes token ids.

        Raises:
            EngineError: the server cannot be reached, or its tokenizer is not the target's.
            RequestError: it serves several models and the recipe names none, or is made for shorter sequences.
        """
        wanted = self.settings.served_model
        try:
            listed = (await self._send("GET", "models", None)).get("data") or []
        except _Refused:  # not every server lists its models
            if wanted is None:
                raise
            listed = []
        cards = {card.get("id"): card for card in listed}
        unclear = len(cards) != 1 if wanted is None else bool(cards) and wanted not in cards
        if unclear:
            raise RequestError(
                f"{wanted or 'no model'} is named, and the server has {', '.join(cards) or 'none'}",
                where="prepare.regenerate.served_model",
            )
        self.model = wanted or next(iter(cards))
        longest, needed = cards.get(self.model, {}).get("max_model_len"), self.recipe.prepare.max_length_tokens
        if isinstance(longest, int) and longest < needed:
            raise RequestError(
                f"the server takes at most {longest} tokens a sequence, and prepare.max_length_tokens is {needed}",
                where=self._url("models"),
                hint="lower the setting, or start the server with a longer max-model-len",
            )
        short = replace(example, max_tokens=min(8, example.max_tokens))
        body = self._body(short) | {"prompt": example.prompt_ids, **_WITH_IDS}
        try:
            choice = await self._ask("completions", body, "text")
        except _Refused as refusal:
            if refusal.status not in _NOT_UNDERSTOOD:
                raise
            self.takes_ids = False
            return
        ids = choice.get("token_ids")
        if ids and not _same_text(self.chat.tokenizer.decode([i for i in ids if i not in self.chat.stop_ids]), choice):
            raise EngineError(
                f"the server reads the token ids {ids} as {choice['text']!r}, and the target's tokenizer does not",
                where=self._url("completions"),
                hint="it serves another model than target.model",
            )

    async def answer(self, request: Request) -> Answer:
        """Raises EngineError."""
        ask = self._complete if self.takes_ids else self._converse
        ids, finish_reason, message, origin = await ask(request)
        return Answer(request.conversation_id, request.turn, request.prompt_ids, ids, finish_reason, message, origin)

    async def _complete(self, request: Request) -> _Reply:
        body = self._body(request) | {"prompt": request.prompt_ids, **_WITH_IDS}
        choice = await self._ask("completions", body, "text")
        finish_reason, ids = choice.get("finish_reason") or "unknown", choice.get("token_ids")
        if ids is not None:
            return ids, finish_reason, message_of(self.chat, ids), "target"
        ids, end = self.chat.whole_ids(choice["text"]), self.chat.end_of_turn
        if finish_reason in FINISHED and end is not None:
            ids = [*ids, end]
        return ids, finish_reason, message_of(self.chat, ids), "text"

    async def _converse(self, request: Request) -> _Reply:
        body = self._body(request) | {"messages": [_openai_message(message) for message in request.messages]}
        if request.tools:
            body["tools"] = request.tools
        if self.chat.kwargs:
            body["chat_template_kwargs"] = self.chat.kwargs
        choice = await self._ask("chat/completions", body, "message")
        finish_reason, said = choice.get("finish_reason") or "unknown", choice["message"]
        kept = {key: said[key] for key in ("tool_calls", *REASONING_KEYS) if said.get(key)}
        try:
            check_values(said)
            message = normal_form({"role": "assistant", "content": said.get("content") or "", **kept})
            self.chat.check_text([message])
            ids = self.chat.turn(request.messages, message, request.tools).answer_ids
        except (Unrenderable, Unusable):
            return [], "not renderable", {"role": "assistant", "content": ""}, "text"
        ends_cut = bool(ids) and finish_reason not in FINISHED and ids[-1] in self.chat.turn_end_ids
        return ids[:-1] if ends_cut else ids, finish_reason, message, "text"

    def _body(self, request: Request) -> dict[str, Any]:
        name = f"{self.recipe.seed} {request.conversation_id}#{request.turn}"
        return {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": self.settings.temperature,
            "top_p": self.settings.top_p,
            "seed": int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big"),
        }

    async def _ask(self, path: str, body: dict[str, Any], part: str) -> dict[str, Any]:
        """The first choice of the reply, which has `part`. Raises EngineError."""
        reply = await self._send("POST", path, body)
        choices = reply.get("choices")
        if not choices or part not in choices[0]:
            raise EngineError(f"replies without `choices[0].{part}`: {json.dumps(reply)[:200]}", where=self._url(path))
        return choices[0]

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The reply as JSON. What may pass is tried again, for about half a minute.

        Raises:
            EngineError: the server refuses the request, or the trouble lasts.
        """
        troubles: dict[str, None] = {}  # in their order, each once: the first is the telling one
        wait = _FIRST_WAIT_SECONDS
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(wait)
                wait *= 2
            try:
                response = await self.client.request(method, path, json=body)
            except httpx.ReadTimeout as error:
                raise EngineError(
                    f"has not answered within {self.settings.timeout_seconds:.0f} seconds",
                    where=self._url(path),
                    hint="raise prepare.regenerate.timeout_seconds or lower batch_size; the same command goes on from "
                    "the answers there are",
                ) from error
            except (httpx.TransportError, httpx.InvalidURL) as error:
                troubles[f"{type(error).__name__} {error}".strip()] = None
                continue
            if response.status_code == 200:
                return _json(response, self._url(path))
            trouble = f"HTTP {response.status_code}: {response.text[:500]}"
            if response.status_code not in _PASSING:
                raise _Refused(response.status_code, trouble, self._url(path))
            troubles[trouble] = None
        raise EngineError(
            f"failed {_TRIES} times in a row: {'; then '.join(troubles)}",
            where=self._url(path),
            hint="see that the server runs, and repeat the command: it goes on from the answers there are",
        )

    def _url(self, path: str) -> str:
        return f"{self.client.base_url}{path}"


# Ask for the ids of what was generated; special tokens stay in the text, for the check in `connect`.
_WITH_IDS = {"return_token_ids": True, "skip_special_tokens": False}


class _Refused(EngineError):
    def __init__(self, status: int, trouble: str, where: str) -> None:
        super().__init__(f"refuses the request: {trouble}", where=where)
        self.status = status


def _json(response: httpx.Response, where: str) -> dict[str, Any]:
    try:
        reply = response.json()
    except (ValueError, RecursionError) as error:
        raise EngineError(f"answers no JSON: {response.text[:200]!r}", where=where) from error
    if not isinstance(reply, dict):
        raise EngineError(f"answers no JSON object: {response.text[:200]!r}", where=where)
    return reply


def _same_text(ours: str, choice: dict[str, Any]) -> bool:
    """Whether both tokenizers read the ids alike, white space and characters that are cut in the middle aside."""
    theirs = str(choice.get("text", ""))
    return "\ufffd" in ours + theirs or "".join(ours.split()) == "".join(theirs.split())


def _openai_message(message: dict[str, Any]) -> dict[str, Any]:
    """A turn with the keys that the protocol knows, arguments of calls as text."""
    known: dict[str, Any] = {key: message[key] for key in ("role", "content", "name", "tool_call_id") if key in message}
    if message.get("tool_calls"):
        known["tool_calls"] = [_openai_call(call) for call in message["tool_calls"]]
    return known


def _openai_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
