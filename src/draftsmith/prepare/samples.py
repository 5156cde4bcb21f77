"""Conversations and their turns → samples of the corpus, in several processes if asked."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice

from draftsmith.errors import DataError
from draftsmith.prepare.render import Chat, Row, Unrenderable, given_turns, rows_of
from draftsmith.prepare.sources import digest_of, question_of
from draftsmith.recipe import Prepare, Recipe
from draftsmith.records import Conversation, Sample, TargetFacts

_CHUNK = 128  # conversations handed to a process at once


@dataclass(frozen=True)
class Outcome:
    """What one conversation came to: its samples, or the reason why there are none."""

    conversation_id: str
    samples: list[Sample] = field(default_factory=list)
    reason: str | None = None  # of the conversation, where it gave no sample
    short_rows: int = 0  # rows with fewer supervised tokens than asked for
    cut_rows: int = 0  # rows that max_length_tokens cut


def split_of(conversation: Conversation, seed: int, validation_fraction: float) -> str:
    """ "validation" for that share of all questions; what else is in the data does not matter.

    Conversations that begin with the same question share a split, for the target gives them the same answer: what is
    held out is not trained on.
    """
    digest = hashlib.sha256(f"{seed}\n".encode() + digest_of(question_of(conversation.messages))).digest()
    return "validation" if int.from_bytes(digest[:8], "big") < validation_fraction * 2**64 else "train"


def outcome_of(conversation: Conversation, rows: list[Row], settings: Prepare, seed: int) -> Outcome:
    """Samples of a conversation's rows. Rows that hardly hold anything to learn from are counted and left out."""
    split = split_of(conversation, seed, settings.validation_fraction)
    samples = [
        Sample(f"{conversation.id}/{number}", conversation.id, conversation.domain, split, row.input_ids, row.loss_mask)
        for number, row in enumerate(rows)
        if sum(row.loss_mask) >= settings.min_answer_tokens
    ]
    return Outcome(
        conversation.id,
        samples,
        None if samples else f"fewer than {settings.min_answer_tokens} supervised tokens",
        len(rows) - len(samples),
        sum(row.cut for row in rows),
    )


def outcome_of_given(conversation: Conversation, chat: Chat, settings: Prepare, seed: int) -> Outcome:
    """Samples with the answers that the data bring along."""
    try:
        turns = given_turns(conversation, chat, settings.max_length_tokens)
    except Unrenderable as reason:
        return Outcome(conversation.id, reason=str(reason))
    if not turns:
        return Outcome(conversation.id, reason=f"first answer begins past {settings.max_length_tokens} tokens")
    return outcome_of(conversation, rows_of(turns, settings.max_length_tokens), settings, seed)


def outcomes_of_given(
    conversations: Iterable[Conversation], chat: Chat, facts: TargetFacts, recipe: Recipe
) -> Iterator[Outcome]:
    """In the order of the conversations, with `prepare.workers` processes; the result does not depend on their number.

    Processes are spawned, not forked: the tokenizer's threads and a fork do not go together.
    """
    settings = recipe.prepare
    if settings.workers == 1:
        for conversation in conversations:
            yield outcome_of_given(conversation, chat, settings, recipe.seed)
        return
    remaining = iter(conversations)
    waiting: deque[Future[list[Outcome]]] = deque()
    with ProcessPoolExecutor(
        settings.workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(facts, recipe)
    ) as pool:
        try:
            while chunk := list(islice(remaining, _CHUNK)):
                waiting.append(pool.submit(_work, chunk))
                if len(waiting) > 2 * settings.workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process died",
                where="prepare.workers",
                hint="usually for lack of memory: use fewer workers; prepare.workers=1 shows the fault itself",
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_worker: tuple[Chat, Recipe]


def _start_worker(facts: TargetFacts, recipe: Recipe) -> None:
    global _worker
    from draftsmith.target import load_tokenizer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to act on
    _worker = Chat(load_tokenizer(facts, recipe.target), facts, recipe.prepare), recipe


def _work(chunk: list[Conversation]) -> list[Outcome]:
    chat, recipe = _worker
    return [outcome_of_given(conversation, chat, recipe.prepare, recipe.seed) for conversation in chunk]
