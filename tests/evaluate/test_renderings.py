"""A draft that was trained on prompts rendered otherwise than those of the run is found out, by the name of how."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from draftsmith.draft.files import save_draft
from draftsmith.draft.model import Draft
from draftsmith.evaluate import why
from draftsmith.evaluate.diagnose import Trial, cause
from draftsmith.evaluate.renderings import FORMATS, FirstTurn, Prompts, renderings, try_renderings
from draftsmith.evaluate.speculate import greedy_decode
from draftsmith.target import load_head
from tests.evaluate.builders import (
    CPU,
    STEPS,
    World,
    build_run,
    learn_by_heart,
    make_draft,
    make_recipe,
    open_target,
    read_text,
    seen_ids,
)

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QUESTIONS = [
    f"{ask} {what}?" for ask in ("How do I sort", "Which is", "Why") for what in ("it", "new", "a fox", "water")
]
TOKENS = 16  # of an answer


@pytest.fixture(scope="module")
def folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a template that writes a BOS and knows a thinking switch."""
    folder = shutil.copytree(tiny_target, tmp_path_factory.mktemp("switched") / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token, tokenizer.chat_template = "<|endoftext|>", TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(folder: Path) -> Prompts:
    return Prompts(AutoTokenizer.from_pretrained(folder), None, {})


@pytest.fixture(scope="module")
def rendered(folder: Path, prompts: Prompts) -> World:
    """Questions as the run rendered them, with the target's answers."""
    facts, target, _ = open_target(folder)
    texts = []
    for question in QUESTIONS:
        text = prompts.render([{"role": "user", "content": question}], None, {})
        assert text is not None
        prompt = prompts.ids(text)
        texts.append(read_text(facts, target, prompt, greedy_decode(target, prompt, TOKENS, ())))
    head = load_head(facts, CPU, target.model.dtype)
    untrained = make_draft(facts, head, seen_ids(texts))
    return World(facts, head, target, texts, untrained, untrained)


def trained_behind(world: World, prompts: Prompts, name: str | None) -> Draft:
    """A draft that knows the same answers by heart, behind prompts in that rendering."""
    texts = world.texts
    if name is not None:
        by_name = {rendering.name: rendering for rendering in renderings(prompts)}
        others = [by_name[name].prompt(text.prompt) for text in world.texts]
        assert all(others)
        texts = [
            read_text(world.facts, world.target, ids, text.answer)
            for ids, text in zip(others, texts, strict=True)
            if ids is not None
        ]
    draft = make_draft(world.facts, world.head, seen_ids(world.texts))
    learn_by_heart(draft, world.head, texts, steps=300)
    return draft.eval()


def trials_of(world: World, prompts: Prompts, draft: Draft) -> list[Trial]:
    turns = [FirstTurn(str(i), text.prompt, text.answer) for i, text in enumerate(world.texts)]
    return try_renderings(draft, world.target, turns, renderings(prompts), STEPS)


@pytest.mark.parametrize("name", ["BOS twice", "no BOS", "enable_thinking=False", "Llama 3 chat template"])
def test_the_rendering_that_the_draft_was_trained_on_is_named(rendered: World, prompts: Prompts, name: str) -> None:
    trials = trials_of(rendered, prompts, trained_behind(rendered, prompts, name))
    named = cause(trials)
    assert named is not None
    assert named.name == name


def test_a_draft_that_was_trained_on_the_runs_prompts_has_nothing_wrong(rendered: World, prompts: Prompts) -> None:
    trials = trials_of(rendered, prompts, trained_behind(rendered, prompts, None))
    assert cause(trials) is None
    assert {"BOS twice", "no BOS", "enable_thinking=False", "Vicuna chat template"} <= {trial.name for trial in trials}


def test_each_rendering_is_what_serving_would_send(folder: Path) -> None:
    """DeepSeek's and Kimi's switch, a template that the run had in the place of the tokenizer's, and a missing BOS."""
    tokenizer, messages = AutoTokenizer.from_pretrained(folder), [{"role": "user", "content": "Why?"}]
    given = (
        "{% for m in messages %}Q: {{ m['content'] }}\nA:{% endfor %}{% if thinking | default(false) %} hm{% endif %}"
    )
    prompts = Prompts(tokenizer, given, {})
    ids = prompts.ids("Q: Why?\nA:")
    assert prompts.messages(ids) == messages
    others = {rendering.name: rendering.prompt(ids) for rendering in renderings(prompts)}
    own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert others["the tokenizer's own chat template"] == own
    assert others["a BOS in front"] == [tokenizer.bos_token_id, *ids]
    assert others["thinking=True"] == prompts.ids("Q: Why?\nA: hm")
    assert others["no BOS"] is None
    assert others["BOS twice"] is None


def test_renderings_that_change_no_prompt_are_not_tried(rendered: World, prompts: Prompts) -> None:
    names = [trial.name for trial in trials_of(rendered, prompts, rendered.untrained)]
    assert "enable_thinking=True" not in names
    assert "thinking=False" not in names
    assert "ChatML chat template" not in names  # the run's, but for the BOS: tried as that already


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief.\n"}]])
def test_a_prompt_is_taken_apart_into_its_messages(prompts: Prompts, system: list[dict[str, str]]) -> None:
    messages = [*system, {"role": "user", "content": "How do I sort?\n\nIn (Python).*"}]
    text = prompts.render(messages, None, {})
    assert text is not None
    assert prompts.messages(prompts.ids(text)) == messages


def test_a_prompt_that_was_rendered_otherwise_is_not_taken_apart(prompts: Prompts) -> None:
    assert prompts.messages(prompts.ids("USER: How? ASSISTANT:")) is None
    assert prompts.otherwise(FORMATS["Vicuna"], {}, prompts.ids("USER: How? ASSISTANT:")) is None


def test_a_run_is_asked_and_names_the_rendering(rendered: World, prompts: Prompts, tmp_path: Path) -> None:
    draft = trained_behind(rendered, prompts, "enable_thinking=False")
    paths = build_run(replace(rendered, trained=draft), tmp_path / "run")
    save_draft(tmp_path / "draft", draft)
    report = why(make_recipe(paths), paths, tmp_path / "draft")
    assert report["cause"] == "enable_thinking=False"
    assert "serve with enable_thinking=False in chat_template_kwargs" in report["summary"][-1]
    assert [trial["name"] for trial in report["renderings"]][:3] == ["BOS twice", "no BOS", "enable_thinking=False"]
