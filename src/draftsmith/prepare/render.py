"""Messages → token ids and loss mask, by the target's own template.

A turn is one answer of the assistant with the prompt that it answers:

    prompt ids = template(messages before it, add_generation_prompt)      what an engine feeds to the target
    answer ids = what the target writes from there, its end-of-turn token included

The mask is 1 exactly on answer ids. Nothing is ever found by searching text: a given answer is what the rendering of
its turn adds to the rendering of its prompt, and a generated one is the ids that the target returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import RequestError, TargetError
from draftsmith.prepare.sources import answer_turns
from draftsmith.recipe import Prepare
from draftsmith.records import Conversation, TargetFacts

_CHECK_EVERY = 64  # how often `Chat.ids` is compared with the slow way, in calls


class Unrenderable(Exception):
    """A conversation that the template cannot express; the message is the reason under which it is counted."""


@dataclass(frozen=True)
class Turn:
    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class Row:
    """One sequence to train on."""

    input_ids: list[int]  # [T]
    loss_mask: list[int]  # [T], 1 where the target wrote the token
    cut: bool = False  # at max_length_tokens


class Chat:
    """The target's tokenizer and chat template, with the settings under which it is served.

    Raises:
        TargetError: there is no chat template, or the tokenizer splits a rendered chat in an unusable way.
        RequestError: the template file of the recipe cannot be read.
    """

    def __init__(self, tokenizer: Any, facts: TargetFacts, settings: Prepare) -> None:
        self.tokenizer = tokenizer
        self.kwargs = dict(settings.chat_template_kwargs)
        self.template = _read_template(settings.chat_template)
        if self.template is None and not tokenizer.chat_template:
            raise TargetError(
                "its tokenizer has no chat template",
                where=facts.path,
                hint="give one with prepare.chat_template=FILE; a base model has none and is no chat model",
            )
        own = self.template or tokenizer.chat_template
        self.template_text = own if isinstance(own, str) else "\n".join(own.values())
        added = tokenizer.added_tokens_decoder
        self.special = {int(i): token.content for i, token in added.items() if token.special}
        self.special |= {tokenizer.convert_tokens_to_ids(text): text for text in tokenizer.all_special_tokens}
        self._special_pattern = re.compile(
            "|".join(re.escape(text) for text in self.special.values() if text) or r"(?!)"
        )
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset(facts.eos_token_ids) | (frozenset() if eos is None else {eos})
        self._known: list[tuple[str, list[int]]] = []
        self._calls = 0
        self.turn_suffix = self._find_turn_suffix()

    def text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, prompt: bool) -> str:
        """The rendered chat; with `prompt`, up to where the target begins to write.

        Raises:
            Unrenderable: the template refuses the messages, or fails on them.
        """
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                tokenize=False,
                **self.kwargs,
            )
        except Exception as error:  # a template is a program, and fails in any way that programs do
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Unrenderable(f"template refuses it: {reason}") from error

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendered chat, as transformers and the engines make them: the template's own BOS, none added.

        A text that begins like one of the last two is tokenised from their last special token on only, for special
        tokens are split off before anything else (tokenizers' `added_vocabulary`), so that what follows does not
        depend on what precedes. `whole_ids` is the slow way to the same result.
        """
        known = next((pair for pair in reversed(self._known) if text.startswith(pair[0])), None)
        ids = self._continue(*known, text) if known else self.whole_ids(text)
        self._calls += 1
        if known and self._calls % _CHECK_EVERY == 0 and ids != self.whole_ids(text):
            raise TargetError(
                "its tokenizer splits the text after a special token differently, depending on what comes before",
                where=type(self.tokenizer).__name__,
            )
        self._known = [*self._known[-1:], (text, ids)]
        return ids

    def whole_ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _continue(self, known_text: str, known_ids: list[int], text: str) -> list[int]:
        cut = next((i for i in range(len(known_ids) - 1, -1, -1) if known_ids[i] in self.special), None)
        start = known_text.rfind(self.special[known_ids[cut]]) if cut is not None else -1
        if cut is None or start < 0:
            return self.whole_ids(text)
        tail = self.whole_ids(text[start:])
        return known_ids[:cut] + tail if tail[0] == known_ids[cut] else self.whole_ids(text)

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """What an engine feeds to the target for these messages. Raises Unrenderable."""
        self.check_text(messages)
        return self.ids(self.text(messages, tools, prompt=True))

    def check_text(self, messages: list[dict[str, Any]]) -> None:
        """Raise Unrenderable if a turn spells a special token: the tokenizer would make it one, and end the turn."""
        for text in _strings(messages):
            found = self._special_pattern.search(text)
            if found:
                raise Unrenderable(f"text of a turn spells the special token {found.group()}")

    def turn(self, before: list[dict[str, Any]], answer: dict[str, Any], tools: list[dict[str, Any]] | None) -> Turn:
        """An answer that came as text, with its prompt.

        Where the answer's first characters would merge with the prompt's last into one token, the prompt stays as an
        engine would have it, and the answer is tokenised on its own.

        Raises:
            Unrenderable: the template refuses the messages, renders the answer otherwise than it prompts for it, or
                leaves out its calls of tools: the draft would learn to end there.
        """
        prompt = self.text(before, tools, prompt=True)
        whole = self.text([*before, answer], tools, prompt=False)
        if answer.get("tool_calls"):
            self._check_calls_written(whole, before, answer, tools)
        prompt_ids, whole_ids = self.ids(prompt), self.ids(whole)
        if whole_ids[: len(prompt_ids)] == prompt_ids:
            answer_ids = whole_ids[len(prompt_ids) :]
        elif whole.startswith(prompt):
            answer_ids = self.whole_ids(whole[len(prompt) :])
        else:
            raise Unrenderable("template renders the answer otherwise than it prompts for it")
        return Turn(prompt_ids, self.without_glue(answer_ids))

    def _check_calls_written(
        self,
        whole: str,
        before: list[dict[str, Any]],
        answer: dict[str, Any],
        tools: list[dict[str, Any]] | None,
    ) -> None:
        """Raise Unrenderable if `whole`, the rendering of an answer, is the same without its calls."""
        bare = {key: value for key, value in answer.items() if key != "tool_calls"}
        try:
            unchanged = self.text([*before, bare], tools, prompt=False) == whole
        except Unrenderable:
            return
        if unchanged:
            raise Unrenderable("template leaves out an answer's calls of tools")

    def _find_turn_suffix(self) -> list[int]:
        """Ids that the template puts after an answer: those that two different answers have in common at the end."""
        answers = []
        for word in ("one", "two"):
            asked = [{"role": "user", "content": "Count."}]
            try:
                prompt = self.text(asked, None, prompt=True)
                whole = self.text([*asked, {"role": "assistant", "content": word}], None, prompt=False)
            except Unrenderable:
                return []
            if not whole.startswith(prompt):
                return []
            answers.append(self.whole_ids(whole)[len(self.whole_ids(prompt)) :])
        common = 0
        while common < min(map(len, answers)) and answers[0][-1 - common] == answers[1][-1 - common]:
            common += 1
        return answers[0][len(answers[0]) - common :]

    def bos_caveat(self) -> str | None:
        """Where the template's BOS is not what the tokenizer would put itself. Engines feed the template's, and so
        does the corpus; a target that was trained otherwise will not do well in either."""
        bos = self.tokenizer.bos_token_id
        try:
            chat_ids = self.whole_ids(self.text([{"role": "user", "content": "Count."}], None, prompt=True))
        except Unrenderable:
            return None
        if bos is None or not chat_ids:
            return None
        if chat_ids[:2] == [bos, bos]:
            return "the chat template writes the beginning-of-sequence token twice"
        if chat_ids[0] != bos and self.tokenizer("Count.")["input_ids"][0] == bos:
            return "the chat template writes no beginning-of-sequence token, which the tokenizer puts before plain text"
        return None

    @property
    def turn_end_ids(self) -> frozenset[int]:
        """Ids with which the target may end its turn."""
        return self.stop_ids | {token for token in self.turn_suffix if token in self.special}

    @property
    def end_of_turn(self) -> int | None:
        """The id with which the template has an answer end, or else one at which the target stops, if any is known."""
        ends = (token for token in reversed(self.turn_suffix) if token in self.turn_end_ids)
        return next(ends, min(self.stop_ids, default=None))

    def without_glue(self, ids: list[int]) -> list[int]:
        """A rendered answer up to its end-of-turn token: what the template puts after it, the target does not write."""
        ends = self.turn_end_ids
        last_end = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in ends), None)
        if last_end is not None:
            return ids[: last_end + 1]
        glue = len(self.turn_suffix)
        return ids[:-glue] if glue and ids[-glue:] == self.turn_suffix else ids


def _strings(value: Any) -> Iterator[str]:
    """Every text inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _read_template(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot be read: {error}", where=f"prepare.chat_template {file}") from error


def given_turns(conversation: Conversation, chat: Chat, max_length: int) -> list[Turn]:
    """The answers that the data bring along, each with its prompt. Those that begin past `max_length` are left out.

    Raises:
        Unrenderable: as `Chat.check_text` and `Chat.turn`, or nothing of an answer is rendered but its end.
    """
    messages = conversation.messages
    chat.check_text(messages)
    turns: list[Turn] = []
    for index in answer_turns(messages):
        turn = chat.turn(messages[:index], messages[index], conversation.tools)
        if len(turn.prompt_ids) >= max_length:
            break
        if all(token in chat.turn_end_ids for token in turn.answer_ids):
            raise Unrenderable("template writes nothing of an answer but its end")
        turns.append(turn)
    return turns


def rows_of(turns: Sequence[Turn], max_length: int) -> list[Row]:
    """Rows in which each answer is supervised once, behind exactly the ids that the target saw before it.

    A turn joins the row of the one before if its prompt goes on from that row's ids. Where the template rewrites the
    past (takes out reasoning, say), or tokens fall otherwise, it begins a row of its own, whose earlier answers are
    context only.

        prompt 1 | answer 1 | … prompt 2 | answer 2
           0     |    1     |     0      |    1
    """
    rows: list[Row] = []
    for turn in turns:
        previous = rows.pop() if rows else Row([], [])
        length = len(previous.input_ids)
        if turn.prompt_ids[:length] != previous.input_ids:
            rows.append(previous)
            previous, length = Row([], []), 0
        rows.append(
            Row(
                turn.prompt_ids + turn.answer_ids,
                previous.loss_mask + [0] * (len(turn.prompt_ids) - length) + [1] * len(turn.answer_ids),
            )
        )
    return [
        Row(row.input_ids[:max_length], row.loss_mask[:max_length], len(row.input_ids) > max_length) for row in rows
    ]
