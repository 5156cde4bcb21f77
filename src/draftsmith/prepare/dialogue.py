"""A conversation answered turn by turn by the target, its own answers in the context of the next."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from draftsmith.prepare.answers import Answer
from draftsmith.prepare.render import Chat, Unrenderable
from draftsmith.prepare.sources import REASONING_KEYS
from draftsmith.recipe import Prepare
from draftsmith.records import Conversation


@dataclass(frozen=True)
class Request:
    """What the target is to answer next."""

    conversation_id: str
    turn: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    prompt_ids: list[int]
    max_tokens: int


def dialogue(
    conversation: Conversation, chat: Chat, settings: Prepare, known: list[Answer]
) -> Generator[Request, Answer, str]:
    """Yields requests, is sent their answers, and returns why it ends. `known` answers are not asked for again.

    Where the data have an answer, the target gives its own, which takes its place in the context. A call of a tool
    whose result follows stays as it is in the context, for the result belongs to that call; the target's own turn is
    asked for all the same. A user's turn at the end, without an answer in the data, is answered too.
    """
    context: list[dict[str, Any]] = []
    messages = conversation.messages
    turn, asked = 0, False
    for index in range(len(messages) + 1):
        message = messages[index] if index < len(messages) else None
        if message is not None and (message["role"] != "assistant" or not asked):
            context.append(message)
            asked = asked or message["role"] in ("user", "tool")
            continue
        awaited = ("user", "tool") if message is None else ("user", "tool", "system", "developer")
        if context[-1]["role"] not in awaited:  # a second answer to one question, or nothing more to answer
            continue
        if turn == settings.regenerate.max_turns:
            return "as many turns as asked for"
        if turn < len(known):
            answer = known[turn]
        else:
            try:
                prompt_ids = chat.prompt_ids(context, conversation.tools)
            except Unrenderable as reason:
                return str(reason)
            room = settings.max_length_tokens - len(prompt_ids)
            if room < settings.min_answer_tokens:
                return f"prompt leaves no room for an answer within {settings.max_length_tokens} tokens"
            limit = min(room, settings.regenerate.max_new_tokens)
            answer = yield Request(conversation.id, turn, list(context), conversation.tools, prompt_ids, limit)
        turn += 1
        if not answer.finished:
            return "answer cut before its end"
        if message is not None and index + 1 < len(messages) and messages[index + 1]["role"] == "tool":
            context.append(message)
        elif answer.message["content"].strip():
            context.append(answer.message)
        else:
            return "answer without text"
    return "end of the conversation"


_HARMONY_PART = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\||$)", re.DOTALL)


def message_of(chat: Chat, answer_ids: list[int]) -> dict[str, Any]:
    """Generated ids as a turn for the context of the next: reasoning apart from the answer, where it can be told.

    Other special tokens stay in the text, so that a template is never fed them unnoticed (`Chat.check_text`).
    """
    ids = answer_ids[:-1] if answer_ids and answer_ids[-1] in chat.stop_ids else answer_ids
    text = chat.tokenizer.decode(ids, skip_special_tokens=False)
    parts = _HARMONY_PART.findall(text)
    if parts:
        content = "".join(words for channel, words in parts if channel == "final")
        reasoning = "\n".join(words for channel, words in parts if channel != "final")
    else:
        reasoning, mark, content = text.rpartition("</think>")
        reasoning = reasoning.strip().removeprefix("<think>").strip()
        content = content.lstrip("\n") if mark else content
    message = {"role": "assistant", "content": content}
    return {**message, **dict.fromkeys(REASONING_KEYS, reasoning)} if reasoning else message
