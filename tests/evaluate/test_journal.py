from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.evaluate.journal import work_through


def test_what_is_done_is_not_done_again_and_keeps_its_place(tmp_path: Path) -> None:
    calls: list[str] = []

    def work(id: str) -> dict[str, int]:
        calls.append(id)
        return {"n": len(id)}

    file = tmp_path / "x.jsonl"
    assert work_through(file, "w", "items", ["a", "bb"], work) == [{"n": 1}, {"n": 2}]
    assert work_through(file, "w", "items", ["ccc", "bb", "a"], work) == [{"n": 3}, {"n": 2}, {"n": 1}]
    assert calls == ["a", "bb", "ccc"]


def test_a_kill_loses_at_most_the_item_in_hand(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"

    def dies(id: str) -> dict[str, int]:
        if id == "b":
            raise KeyboardInterrupt
        return {"n": 1}

    with pytest.raises(KeyboardInterrupt):
        work_through(file, "w", "items", ["a", "b"], dies)
    assert work_through(file, "w", "items", ["a", "b"], lambda id: {"n": 2}) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("torn", [b'{"id": "b", "resu', b'{"id": "b", "result": {"n": 1}}'])
def test_a_line_cut_short_is_work_not_done(tmp_path: Path, torn: bytes) -> None:
    file = tmp_path / "x.jsonl"
    work_through(file, "w", "items", ["a"], lambda id: {"n": 1})
    whole = file.read_bytes()
    file.write_bytes(whole + torn)
    assert work_through(file, "w", "items", ["a", "b"], lambda id: {"n": 2}) == [{"n": 1}, {"n": 2}]
    assert file.read_bytes().startswith(whole + b'{"id": "b", "result": {"n": 2}}\n')
