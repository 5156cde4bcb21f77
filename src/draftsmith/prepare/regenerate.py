"""Answers by the target itself, for every conversation: begun where an earlier run stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from draftsmith.errors import RecipeError
from draftsmith.prepare.answers import Answer, AnswerFile
from draftsmith.prepare.dialogue import Request, dialogue
from draftsmith.prepare.render import Chat, Turn, rows_of
from draftsmith.prepare.samples import Outcome, outcome_of
from draftsmith.progress import Progress, progress
from draftsmith.recipe import Recipe
from draftsmith.records import Conversation, TargetFacts
from draftsmith.rundir import RunPaths, append_event
from draftsmith.signals import check_stop

_WAVE = 16  # batches whose requests are sorted by length together


class Talks:
    """The dialogues of all conversations, as far as they are begun; knows why each has ended."""

    def __init__(self, conversations: Iterable[Conversation], chat: Chat, recipe: Recipe, file: AnswerFile) -> None:
        self.ended: Counter[str] = Counter()
        self._remaining = iter(conversations)
        self._chat, self._settings, self._file = chat, recipe.prepare, file
        self._going: dict[str, Generator[Request, Answer, str]] = {}

    def begin(self) -> Iterator[Request]:
        """The next request of each conversation that was not begun yet and is not done."""
        for conversation in self._remaining:
            known = self._file.of(conversation.id)
            self._going[conversation.id] = dialogue(conversation, self._chat, self._settings, known)
            request = self._advance(conversation.id, None)
            if request is not None:
                yield request

    def go_on(self, answers: list[Answer]) -> list[Request]:
        """Put the answers on disk. Returns the requests that follow them; a conversation that ends has none."""
        self._file.append(answers)
        following = [self._advance(answer.conversation_id, answer) for answer in answers]
        return [request for request in following if request is not None]

    def _advance(self, conversation_id: str, answer: Answer | None) -> Request | None:
        talk = self._going[conversation_id]
        try:
            return next(talk) if answer is None else talk.send(answer)
        except StopIteration as end:
            self.ended[end.value] += 1
            del self._going[conversation_id]
            return None


def answer_all(
    conversations: Iterable[Conversation], total: int, chat: Chat, facts: TargetFacts, recipe: Recipe, paths: RunPaths
) -> dict[str, Any]:
    """Have the target answer every conversation, into `answers.jsonl`; what is there already is kept.

    Args:
        total: number of conversations, for the progress bar.

    Raises:
        Interrupted: a stop was asked for; all answers so far are on disk.
        EngineError: the server fails; likewise.
        TargetError: the target cannot be loaded, or has no room on its device.
    """
    settings = recipe.prepare.regenerate
    if settings.using == "server" and not settings.url:
        raise RecipeError("is needed", where="prepare.regenerate.url", hint="such as http://localhost:8000/v1")
    file = AnswerFile(paths.answers)
    try:
        found, tokens_found = len(file), file.tokens
        if found:
            append_event(paths, "prepare", "answers found", answers=found)
        talks = Talks(conversations, chat, recipe, file)
        with progress("answers", total, "conversations") as bar:
            if settings.using == "server":
                from draftsmith.prepare.server import answer_with_server

                answer_with_server(talks, chat, recipe, bar)
            else:
                _answer_in_process(talks, chat, facts, recipe, bar)
            seconds = bar.seconds
    finally:
        file.close()
    figures = _figures(file, talks.ended)
    rate = round((file.tokens - tokens_found) / max(seconds, 1e-9), 1)
    return {**figures, "using": settings.using, "found_from_an_earlier_run": found, "tokens_per_second": rate}


def _answer_in_process(talks: Talks, chat: Chat, facts: TargetFacts, recipe: Recipe, bar: Progress) -> None:
    """Batches of requests of like length, for padding is computed too. The target is loaded once one is to be made."""
    batch_size = recipe.prepare.regenerate.batch_size
    begun = talks.begin()
    model = None
    wave: list[Request] = []
    while True:
        for request in begun:
            wave.append(request)
            if len(wave) >= _WAVE * batch_size:
                break
        if not wave:
            return
        if model is None:
            from draftsmith.prepare.generate import TargetInProcess

            model = TargetInProcess(chat, facts, recipe)
        wave.sort(key=lambda request: len(request.prompt_ids))
        following: list[Request] = []
        for start in range(0, len(wave), batch_size):
            following += talks.go_on(model.answer(wave[start : start + batch_size]))
            bar.advance(talks.ended.total() - bar.done)
            check_stop("prepare")
        wave = following


def _figures(file: AnswerFile, ended: Counter[str]) -> dict[str, Any]:
    number = len(file)
    return {
        "written_by": "target",
        "answers": number,
        "tokens": file.tokens,
        "regenerated_share": round(file.origins["target"] / number, 4) if number else 0.0,
        "retokenised": file.origins["text"],
        "finish_reasons": dict(file.finish_reasons.most_common()),
        "cut_share": round(1 - file.finished / number, 4) if number else 0.0,
        "conversations_ended": dict(ended.most_common()),
    }


def outcomes_of_answers(
    conversations: Iterable[Conversation], chat: Chat, recipe: Recipe, paths: RunPaths
) -> Iterator[Outcome]:
    """Samples with the target's own answers: training ids are prompt ids and generated ids, and nothing else."""
    settings = recipe.prepare
    file = AnswerFile(paths.answers)
    try:
        for conversation in conversations:
            answers = file.of(conversation.id)
            if answers:
                turns = [Turn(answer.prompt_ids, answer.answer_ids) for answer in answers]
                yield outcome_of(conversation, rows_of(turns, settings.max_length_tokens), settings, recipe.seed)
                continue
            try:
                next(dialogue(conversation, chat, settings, []))
            except StopIteration as end:
                yield Outcome(conversation.id, reason=end.value)
    finally:
        file.close()
