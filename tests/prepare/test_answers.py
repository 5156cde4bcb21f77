from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from draftsmith.errors import DataError
from draftsmith.prepare.answers import Answer, AnswerFile

MESSAGE = {"role": "assistant", "content": "Sö."}


def answer(name: str, turn: int = 0, reason: str = "stop") -> Answer:
    return Answer(name, turn, [1, 2], [3], reason, MESSAGE)


def test_answers_come_back_by_conversation_in_their_order(tmp_path: Path) -> None:
    with closing(AnswerFile(tmp_path / "answers.jsonl")) as file:
        file.append([answer("a"), answer("b"), answer("a", 1, "length")])
        assert file.of("a") == [answer("a"), answer("a", 1, "length")]
        assert file.of("absent") == []
    with closing(AnswerFile(tmp_path / "answers.jsonl")) as file:
        assert (len(file), file.finished, file.tokens) == (3, 2, 3)
        assert file.of("b") == [answer("b")]


def test_a_half_written_last_line_is_cut_off_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with closing(AnswerFile(path)) as file:
        file.append([answer("a"), answer("b")])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        with closing(AnswerFile(path)) as file:
            assert len(file) == 1
            file.append([answer("b")])
        assert path.read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"conversation_id"\n{}\n')
    with pytest.raises(DataError, match="line at byte 0 is damaged"):
        AnswerFile(path)


def test_an_answer_given_twice_is_refused(tmp_path: Path) -> None:
    with closing(AnswerFile(tmp_path / "answers.jsonl")) as file:
        file.append([answer("a")])
        with pytest.raises(DataError, match="answer 0 of a comes after 1 others"):
            file.append([answer("a")])


def test_each_answer_is_one_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with closing(AnswerFile(path)) as file:
        file.append([answer("a"), answer("b")])
    assert [json.loads(line)["conversation_id"] for line in path.read_text().splitlines()] == ["a", "b"]
