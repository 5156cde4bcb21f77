import random
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftsmith.errors import StoreError
from draftsmith.store.ledger import Entry, read_ledger, salvage_ledger, write_ledger

texts = st.text(max_size=8)


@st.composite
def entries(draw: st.DrawFn, least: int = 0) -> list[Entry]:
    found = []
    for number in range(draw(st.integers(least, 6))):
        lengths = draw(st.lists(st.integers(0, 1 << 40), max_size=4))
        lists = [draw(st.lists(texts, min_size=len(lengths), max_size=len(lengths))) for _ in range(3)]
        found.append(Entry(f"shard-{number:05d}", draw(st.integers(0, 1 << 50)), draw(texts), *lists, lengths))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@settings(max_examples=40, deadline=None)
@given(entries(), st.integers(0, 6))
def test_a_ledger_says_what_was_entered_however_it_was(folder: Path, due: list[Entry], at_once: int) -> None:
    ledger = write_ledger(folder, due[:at_once])
    for entry in due[at_once:]:
        ledger.append(entry)
    found = read_ledger(folder)
    assert found == ledger
    assert found.entries == due
    assert found.whole_bytes == (folder / "ledger.jsonl").stat().st_size
    assert salvage_ledger(folder) == (due, [])


@settings(max_examples=40, deadline=None)
@given(entries(least=2), st.data())
def test_a_line_removed_doubled_or_moved_is_noticed(folder: Path, due: list[Entry], data: st.DataObject) -> None:
    write_ledger(folder, due)
    file = folder / "ledger.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    place = data.draw(st.integers(0, len(lines) - 2))
    change = data.draw(st.sampled_from(["removed", "doubled", "moved"]))
    if change == "removed":
        del lines[place]
    elif change == "doubled":
        lines.insert(data.draw(st.integers(place, len(lines))), lines[place])
    else:
        lines[place], lines[-1] = lines[-1], lines[place]
    file.write_bytes(b"".join(lines))
    with pytest.raises(StoreError, match=r"removed, doubled or moved.*\n.*store repair"):
        read_ledger(folder)


@settings(max_examples=40, deadline=None)
@given(entries(least=3), st.data())
def test_a_line_taken_from_another_store_is_noticed(folder: Path, due: list[Entry], data: st.DataObject) -> None:
    others = data.draw(entries(least=len(due)))
    write_ledger(folder, others)
    file = folder / "ledger.jsonl"
    foreign = file.read_bytes().splitlines(keepends=True)
    write_ledger(folder, due)
    lines = file.read_bytes().splitlines(keepends=True)
    place = data.draw(st.integers(0, len(lines) - 1))
    assume(0 < place < len(lines) - 1)  # a first line alone is a ledger of its own, and nothing follows the last
    assume(foreign[place] != lines[place])
    lines[place] = foreign[place]
    file.write_bytes(b"".join(lines))
    with pytest.raises(StoreError):
        read_ledger(folder)


@settings(max_examples=40, deadline=None)
@given(entries(least=1), st.randoms(use_true_random=False))
def test_what_can_be_salvaged_is_every_line_that_is_whole(
    folder: Path, due: list[Entry], chance: random.Random
) -> None:
    write_ledger(folder, due)
    file = folder / "ledger.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    place = chance.randrange(len(lines))
    damaged = bytearray(lines[place])
    damaged[chance.randrange(len(damaged) - 1)] ^= 1 << chance.randrange(8)
    lines[place] = bytes(damaged)
    file.write_bytes(b"".join(lines))
    kept, problems = salvage_ledger(folder)
    assert kept == due[:place] + due[place + 1 :]
    assert len(problems) >= 1
