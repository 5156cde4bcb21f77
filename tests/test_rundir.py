from __future__ import annotations

import pytest

from draftsmith.rundir import RunPaths, append_event, atomic_folder, atomic_path, read_events, write_json


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})
    with pytest.raises(RuntimeError), atomic_path(file) as aside:
        aside.write_text("half")
        raise RuntimeError
    assert file.read_text() == '{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_is_complete_or_absent(tmp_path):
    folder = tmp_path / "folder"
    with pytest.raises(RuntimeError), atomic_folder(folder) as aside:
        (aside / "one").write_text("1")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    for content in ("1", "2"):
        with atomic_folder(folder) as aside:
            (aside / "one").write_text(content)
    assert (folder / "one").read_text() == "2"
    assert list(tmp_path.iterdir()) == [folder]


def test_numbers_that_json_does_not_have_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"a": float("nan")})


def test_an_event_that_a_crash_cut_short_costs_only_itself(tmp_path):
    paths = RunPaths(tmp_path)
    append_event(paths, "train", "started")
    with open(paths.events, "ab") as file:
        file.write(b'{"time": 1, "st')
    append_event(paths, "train", "resumed", step=3)
    assert [event["event"] for event in read_events(paths)] == ["started", "resumed"]
