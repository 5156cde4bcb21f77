"""The target's answers on disk: one JSON line each, appended as they come, so that a killed run goes on from there."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.errors import DataError

FINISHED = ("stop", "tool_calls")  # reasons with which the target itself ended its turn
# "target": ids as the target generated them. "text": tokenised anew, of a server that gives no ids.
Origin = Literal["target", "text"]


@dataclass(frozen=True)
class Answer:
    """One turn of a conversation as the target answered it."""

    conversation_id: str
    turn: int  # from 0, among the answers of the conversation
    prompt_ids: list[int]
    answer_ids: list[int]  # the end-of-turn token included, unless the answer was cut
    finish_reason: str  # stop, length, tool_calls …; "unknown" where a server says null
    message: dict[str, Any]  # the answer as a turn of the conversation
    origin: Origin = "target"

    @property
    def finished(self) -> bool:
        return self.finish_reason in FINISHED


class AnswerFile:
    """answers.jsonl: opened, a last line that a crash cut short is cut off; what is whole is indexed by conversation.

    Raises:
        DataError: a line that is not the last is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finish_reasons: Counter[str] = Counter()
        self.origins: Counter[str] = Counter()
        self.tokens = self.finished = 0
        self._places: dict[str, list[int]] = {}  # conversation id -> byte at which each answer begins
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")  # noqa: SIM115 - lives as long as this object
        self._index()

    def __len__(self) -> int:
        return self.finish_reasons.total()

    def of(self, conversation_id: str) -> list[Answer]:
        """The answers of a conversation so far, in their order."""
        answers = []
        for place in self._places.get(conversation_id, ()):
            self._file.seek(place)
            answers.append(Answer(**json.loads(self._file.readline())))
        return answers

    def append(self, answers: Iterable[Answer]) -> None:
        """Write answers; they are on the disk when this returns."""
        for answer in answers:
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(json.dumps(asdict(answer), ensure_ascii=False).encode() + b"\n")
            self._note(answer, place)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _index(self) -> None:
        self._file.seek(0)
        place = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                answer = Answer(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise DataError(
                    f"the line at byte {place} is damaged: {error}",
                    where=str(self.path),
                    hint="`draftsmith prepare RECIPE --redo` deletes the answers and generates them anew",
                ) from error
            self._note(answer, place)
            place += len(line)
        self._file.truncate(place)

    def _note(self, answer: Answer, place: int) -> None:
        places = self._places.setdefault(answer.conversation_id, [])
        if answer.turn != len(places):
            raise DataError(
                f"answer {answer.turn} of {answer.conversation_id} comes after {len(places)} others",
                where=str(self.path),
                hint="two runs must not write to one run folder; `draftsmith prepare RECIPE --redo` begins anew",
            )
        places.append(place)
        self.finish_reasons[answer.finish_reason] += 1
        self.origins[answer.origin] += 1
        self.tokens += len(answer.answer_ids)
        self.finished += answer.finished
