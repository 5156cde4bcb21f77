"""Conversations out of files: ShareGPT and OpenAI `messages` records, in JSON arrays, JSONL, Parquet or a hub dataset.

The container is told by its first bytes, the form of a record by its keys. Everything that a chat template may use is
kept: tool calls and results, system turns, reasoning, names. What cannot be used is counted by reason.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from draftsmith.errors import DataError, MissingExtraError, RequestError
from draftsmith.recipe import Source
from draftsmith.records import Conversation

# Names of the four roles in the data sets that are about; anything else is an unknown role.
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "ipython"), "tool"),
    **{role: role for role in ("system", "developer")},
}
# Each template reads the target's reasoning under one of these names.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_EXAMPLES = 3
_HEAD_BYTES = 4096
_COMPRESSED = {
    b"\x1f\x8b": "gunzip --keep",
    b"\x28\xb5\x2f\xfd": "zstd -d",
    b"BZh": "bunzip2 --keep",
    b"PK\x03\x04": "unzip",
}
_DEEPEST = 100  # lists and objects in one another; tools nest to about twenty, and Python's own encoder to some hundred
_CONVERT = "save it in UTF-8; `iconv -f WINDOWS-1252 -t UTF-8` converts what Western editions of Windows wrote"
_TOO_DEEP = f"lists and objects nested more than {_DEEPEST} deep"


@dataclass
class Tally:
    """What became of the rows: read, kept, and dropped by reason, with a few ids for each."""

    read: int = 0
    kept: int = 0
    repeated: int = 0  # kept, and turn by turn what an earlier one is
    same_question: int = (
        0  # kept, and begin with the question that an earlier one begins with, repeated ones among them
    )
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, row_id: str) -> None:
        self.dropped[reason] += 1
        known = self.examples.setdefault(reason, [])
        if len(known) < _EXAMPLES:
            known.append(row_id)

    def to_json(self) -> dict[str, Any]:
        dropped = {
            reason: {"rows": number, "examples": self.examples[reason]} for reason, number in self.dropped.most_common()
        }
        counts = {name: getattr(self, name) for name in ("read", "kept", "repeated", "same_question")}
        return {**counts, "dropped": dropped}


class Unusable(Exception):
    """A row that cannot be used; its message is the reason under which it is counted."""


def read_conversations(sources: list[Source], tally: Tally, *, answers_needed: bool) -> Iterator[Conversation]:
    """Every usable conversation of the sources, in their order, with ids that are unique and stable.

    An id is `domain/` and the record's own id, or its index in the source; one seen before gets `~2`, `~3` …

    Args:
        tally: counts rows as they are read.
        answers_needed: drop conversations in which the assistant says nothing after a user's turn.

    Raises:
        RequestError: a source is not there.
        DataError: a file is damaged or cut off; says where.
        MissingExtraError: `datasets` is not installed.
    """
    seen: Counter[str] = Counter()
    wholes: set[bytes] = set()
    questions: set[bytes] = set()
    for number, source in enumerate(sources):
        domain = source.domain or Path(source.path).stem
        stop = None if source.limit is None else source.skip + source.limit
        for index, (place, record) in islice(enumerate(_records(source, number)), source.skip, stop):
            tally.read += 1
            own_id = record.get("id") if isinstance(record, dict) else None
            base = f"{domain}/{own_id if _is_name(own_id) else index}"
            seen[base] += 1
            row_id = base if seen[base] == 1 else f"{base}~{seen[base]}"
            try:
                messages, tools = _parse(record, source.format, answers_needed)
            except Unusable as reason:
                tally.drop(str(reason), f"{row_id} ({place})")
                continue
            tally.kept += 1
            tally.repeated += not _is_new(digest_of(messages), wholes)
            tally.same_question += not _is_new(digest_of(question_of(messages)), questions)
            yield Conversation(id=row_id, messages=messages, domain=domain, tools=tools)


def _is_new(digest: bytes, known: set[bytes]) -> bool:
    before = len(known)
    known.add(digest[:16])
    return len(known) > before


def _is_name(own_id: Any) -> bool:
    return isinstance(own_id, int) or (isinstance(own_id, str) and own_id != "" and _is_unicode(own_id))


def _records(source: Source, number: int) -> Iterator[tuple[str, Any]]:
    """(place for messages to people, record) of everything in one source."""
    if source.format == "dataset":
        return _dataset(source)
    path = Path(source.path)
    if not path.is_file():
        raise RequestError(
            "there is no such file",
            where=f"prepare.sources.{number} {path}",
            hint="a hub dataset needs format: dataset",
        )
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"PAR1"):
        return _parquet(path)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"[") and text[1:2] != b"\0":
        return _json_array(path, source.accept_truncated, number)
    if text.startswith(b"{") and text[1:2] != b"\0":  # which UTF-16 has
        return _json_lines(path, source.accept_truncated, number)
    if packed := next((tool for magic, tool in _COMPRESSED.items() if head.startswith(magic)), None):
        raise DataError("is compressed", where=str(path), hint=f"unpack it with `{packed} {path}`")
    encoding = json.detect_encoding(head)
    if not encoding.startswith("utf-8") and head.decode(encoding, "ignore").lstrip("\ufeff \r\n\t")[:1] in ("[", "{"):
        name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")  # as iconv knows it
        hint = f"convert it with `iconv -f {name} -t UTF-8 {path} > {path}.utf8`"
        raise DataError(f"is text in {name}; JSON is read in UTF-8", where=str(path), hint=hint)
    raise DataError(
        f"begins with {_shown(text[:20])}, which is no JSON array, JSON object or Parquet" if text else "is empty",
        where=str(path),
        hint="sources are ShareGPT or messages records as a JSON array, one JSON object a line, or Parquet",
    )


def _shown(begin: bytes) -> str:
    """The first bytes of a file as text, or as numbers where they are none."""
    text = begin.decode(errors="ignore")  # the last character may be cut
    printable = len(begin) - len(text.encode()) < 4 and " ".join(text.split()).isprintable()
    return f"`{text}`" if printable else f"the bytes {begin[:8].hex(' ')}, no UTF-8 text"


def _json_array(path: Path, accept_truncated: bool, number: int) -> Iterator[tuple[str, Any]]:
    """Records of a JSON array, streamed: the file is never in memory whole."""
    import ijson

    index, last_id = 0, None
    with open(path, "rb") as file:
        _skip_bom(file)
        try:
            for record in ijson.items(ijson.parse(_not_too_deep(ijson.basic_parse(file, use_float=True))), "item"):
                yield f"record {index}", record
                index += 1
                last_id = record.get("id") if isinstance(record, dict) else None
        except ijson.JSONError as error:
            text = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
            problem = text.splitlines()[0]
            after = f"after record {index - 1}" + (f" (id {last_id})" if last_id is not None else "") if index else ""
            if "premature EOF" in problem or ("UTF8" in problem and _ends_inside_a_character(file)):
                if not accept_truncated:
                    how_far = f"{index} records are whole; it ends {after or 'in the first'}"
                    raise _cut_off(how_far, path, number) from error
                return
            mend = "mend the file there, or fetch it again; a file cut off in the middle is told apart from this"
            raise DataError(
                f"is not valid JSON {after or 'in its first record'}, before byte {file.tell()}: {problem}",
                where=str(path),
                hint=_CONVERT if "UTF8" in problem else mend,
            ) from error


def _not_too_deep(events: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The events of a parser, which would use memory by the square of the depth."""
    import ijson

    depth = 0
    for event in events:
        if event[0] in ("start_array", "start_map"):
            depth += 1
            if depth > _DEEPEST:
                raise ijson.JSONError(_TOO_DEEP)
        elif event[0] in ("end_array", "end_map"):
            depth -= 1
        yield event


def _json_lines(path: Path, accept_truncated: bool, number: int) -> Iterator[tuple[str, Any]]:
    """Records of a file with one JSON object a line; blank lines are passed over."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        _skip_bom(file)
        for line_number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except RecursionError as error:
                raise DataError(f"line {line_number}: {_TOO_DEEP}", where=f"{path}:{line_number}") from error
            except ValueError as error:
                if file.tell() == size and not line.endswith(b"\n"):
                    if not accept_truncated:
                        whole = f"{line_number - 1} lines are whole; it ends in line {line_number}"
                        raise _cut_off(whole, path, number) from error
                    return
                if isinstance(error, UnicodeDecodeError):
                    before = line[max(0, error.start - 20) : error.start].decode(errors="ignore")
                    raise DataError(
                        f"line {line_number} is not UTF-8 text: it has byte {line[error.start]:02x} after `{before}`",
                        where=f"{path}:{line_number}",
                        hint=_CONVERT,
                    ) from error
                hint = "one JSON object a line is expected" if line_number > 1 else "an array of records begins with ["
                raise DataError(
                    f"line {line_number} is not valid JSON: {error}", where=f"{path}:{line_number}", hint=hint
                ) from error
            yield f"line {line_number}", record


def _ends_inside_a_character(file: BinaryIO) -> bool:
    """Whether a UTF-8 file that is read to its end lacks the last bytes of a character."""
    if file.read(1):
        return False
    file.seek(-min(3, file.tell()), os.SEEK_CUR)
    for number, byte in enumerate(reversed(file.read()), 1):
        if byte >= 0xC0:  # the first of 2, 3 or 4 bytes
            return number < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False


def _cut_off(how_far: str, path: Path, number: int) -> DataError:
    return DataError(
        f"is cut off at byte {path.stat().st_size}: {how_far}",
        where=str(path),
        hint=f"fetch the file again, or take what is whole with prepare.sources.{number}.accept_truncated=true",
    )


def _skip_bom(file: BinaryIO) -> None:
    if file.read(3) != b"\xef\xbb\xbf":
        file.seek(0)


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        index = 0
        for batch in pq.ParquetFile(path).iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                yield f"row {index}", record
                index += 1
    except UnicodeDecodeError as error:
        raise DataError(
            f"has text that is not UTF-8 within 1,024 rows from row {index} on", where=str(path), hint=_CONVERT
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"is not a whole Parquet file: {error}", where=str(path), hint="fetch the file again"
        ) from error


def _dataset(source: Source) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            "reading a hub dataset needs the package `datasets`",
            where=source.path,
            hint="pip install 'draftsmith[datasets]'",
        ) from error
    try:
        rows: Iterable[Any] = datasets.load_dataset(source.path, split=source.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"cannot be loaded: {error}", where=f"{source.path}, split {source.split}") from error
    for index, record in enumerate(rows):
        yield f"row {index}", record


def _parse(record: Any, form: str, answers_needed: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages in the OpenAI form, and tools. Raises Unusable with the reason."""
    if not isinstance(record, dict):
        raise Unusable(f"record is {_kind(record)}, not an object")
    check_values([record.get(name) for name in ("id", "messages", "conversations", "system", "tools")])
    keys = ("conversations", "messages") if form == "sharegpt" else ("messages", "conversations")
    key = next((key for key in keys if record.get(key) is not None), None)
    if key is None:
        raise Unusable("no `messages` and no `conversations`")
    turns = record[key]
    if not isinstance(turns, list):
        raise Unusable(f"`{key}` is {_kind(turns)}, not a list")
    if not turns:
        raise Unusable("empty conversation")
    messages = [_message(turn) for turn in turns]
    system = record.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "user" for message in messages):
        raise Unusable("no user turn")
    if answers_needed and not answer_turns(messages):
        raise Unusable("no answer")
    return messages, _tools(record.get("tools"))


def answer_turns(messages: list[dict[str, Any]]) -> list[int]:
    """Indices of the assistant's turns that answer something: a user or a tool has spoken before."""
    asked, found = False, []
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and asked:
            found.append(index)
        asked = asked or message["role"] in ("user", "tool")
    return found


def question_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns before the first answer."""
    return messages[: next(iter(answer_turns(messages)), None)]


def digest_of(messages: list[dict[str, Any]]) -> bytes:
    """SHA-256 of what the turns say, whatever the white space in their texts."""
    turns = [(turn["role"], turn["content"].split(), turn.get("tool_calls")) for turn in messages]
    return hashlib.sha256(json.dumps(turns, sort_keys=True, default=str).encode()).digest()


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise Unusable(f"turn is {_kind(turn)}, not an object")
    turn = {key: value for key, value in turn.items() if value is not None}
    name = turn.pop("role", None) or turn.pop("from", None)
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise Unusable(f"unknown role {name!r}" if name is not None else "turn without a role")
    content = _text(turn.pop("content", turn.pop("value", None)))
    message = {"role": role, "content": content, **turn}
    if name == "function_call":
        message = _called(message)
    message = normal_form(message)
    said = (message.get(key) for key in ("content", "tool_calls", *REASONING_KEYS))
    if role in ("user", "assistant") and not any(text.strip() if isinstance(text, str) else text for text in said):
        raise Unusable(f"empty {role} turn")
    return message


def normal_form(message: dict[str, Any]) -> dict[str, Any]:
    """A turn as templates expect it: calls under `tool_calls`, their arguments as objects, and reasoning under every
    name that is about; names that the turn has itself keep their own text."""
    if isinstance(call := message.get("function_call"), dict):  # OpenAI's name for it until 2023
        message = {key: value for key, value in message.items() if key != "function_call"}
        message["tool_calls"] = message.get("tool_calls") or [{"type": "function", "function": call}]
    if message.get("tool_calls"):
        message = {**message, "tool_calls": _tool_calls(message["tool_calls"])}
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
    if message["role"] != "assistant" or reasoning is None:
        return message
    return {**dict.fromkeys(REASONING_KEYS, reasoning), **message}


def _text(content: Any) -> str:
    """The text of a turn; several text parts are joined by a line break, as serving engines do."""
    if content is None:
        return ""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type", "unnamed") if isinstance(part, dict) else _kind(part)
                raise Unusable(f"content part that is not text ({kind})")
        return _text("\n".join(part["text"] for part in content))
    if not isinstance(content, str):
        raise Unusable(f"content is {_kind(content)}, not text")
    return content


def check_values(value: Any, depth: int = 0) -> None:
    """Raises Unusable for what no file or template could hold: half a character, or a depth that nothing can walk."""
    if isinstance(value, str):
        if not _is_unicode(value):
            raise Unusable("text that is not valid Unicode (a lone surrogate)")
    elif isinstance(value, dict | list):
        if depth > _DEEPEST:
            raise Unusable(_TOO_DEEP)
        for item in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            check_values(item, depth + 1)


def _is_unicode(text: str) -> bool:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
    return True


def _called(message: dict[str, Any]) -> dict[str, Any]:
    """A `function_call` turn, whose content is the call as JSON, as tool_calls; other text stays content."""
    call = _json_or_none(message["content"])
    calls = call if isinstance(call, list) else [call]
    if not all(isinstance(item, dict) and "name" in item for item in calls):
        return message
    return {**message, "content": "", "tool_calls": [{"type": "function", "function": item} for item in calls]}


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Calls with their arguments as an object, which templates print as JSON; OpenAI writes them as a string."""
    if isinstance(calls, str):
        calls = _json_or_none(calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Unusable("`tool_calls` is not a list of objects")
    parsed = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = _json_or_none(function["arguments"] or "{}")
            if isinstance(arguments, dict):
                call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(call)
    return parsed


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        tools = _json_or_none(tools) if tools.strip() else None
        if tools is None:
            return None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("`tools` is not a list of objects")
    return tools


def _json_or_none(text: str) -> Any:
    """Raises Unusable as `check_values` does."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    except RecursionError:
        raise Unusable(_TOO_DEEP) from None
    check_values(value)
    return value


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a truth value", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
