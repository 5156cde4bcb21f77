from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith import recipe as recipes
from draftsmith import signals
from draftsmith.corpus import corpus_metadata, read_corpus
from draftsmith.errors import DataError, Interrupted, RecipeError, RequestError
from draftsmith.prepare import run
from draftsmith.prepare.samples import split_of
from draftsmith.recipe import Recipe
from draftsmith.records import Sample
from draftsmith.rundir import RunPaths, write_json
from draftsmith.vocab_map import read_draft_vocab
from tests.prepare.chats import SHOUTED, conversation, facts_of, share_gpt, write_lines

TALKS = [
    {"conversations": share_gpt(f"How many {i}?", f"There are {i} of them.", "Sure?", "Quite sure, I think.")}
    for i in range(12)
]


@pytest.fixture
def recipe_of(tiny_target: Path, tmp_path: Path) -> Any:
    """Makes recipes over the talks, and a run folder whose target is probed."""

    def make(
        *records: Any, name: str = "run", target: Path = tiny_target, regenerate: Any = None, **settings: Any
    ) -> tuple[Recipe, RunPaths]:
        data = write_lines(tmp_path / f"{name}.jsonl", *records)
        prepare = {
            "sources": [{"path": str(data), "domain": "talk"}],
            "regenerate": regenerate or {"using": "none"},
            "max_length_tokens": 128,
            "validation_fraction": 0.25,
            **settings,
        }
        recipe = recipes.parse(
            {"name": name, "run_dir": str(tmp_path / name), "target": {"model": str(target)}, "prepare": prepare}
        )
        paths = RunPaths(recipe.folder)
        write_json(paths.facts, facts_of(target).to_json())
        return recipe, paths

    return make


def corpus(paths: RunPaths) -> list[Sample]:
    return list(read_corpus(paths.corpus))


def test_the_report_says_what_became_of_rows_and_tokens(recipe_of: Any) -> None:
    recipe, paths = recipe_of(*TALKS, {"conversations": []}, {"conversations": share_gpt("A?", "B")})
    report = run(recipe, paths)
    samples = corpus(paths)
    assert report["rows"]["read"] == 14
    assert report["rows"]["kept"] == report["conversations"] == 12
    assert {reason: entry["rows"] for reason, entry in report["rows"]["dropped"].items()} == {
        "empty conversation": 1,
        "fewer than 4 supervised tokens": 1,
    }
    assert report["samples"] == len(samples) == 12
    assert report["tokens"] == sum(len(sample.input_ids) for sample in samples)
    assert report["supervised_tokens"] == sum(sum(sample.loss_mask) for sample in samples)
    assert report["length_tokens"]["max"] == max(len(sample.input_ids) for sample in samples)
    for split in ("train", "validation"):
        assert report["by_split"][split]["samples"] == sum(sample.split == split for sample in samples) > 0
    assert report["by_domain"]["talk"]["tokens"] == report["tokens"]
    assert json.loads(json.dumps(report)) == report
    text = "\n".join(report["summary"])
    assert "dropped 1: empty conversation (talk/12 (line 13))" in text
    assert "answers are not the target's own" in text
    assert corpus_metadata(paths.corpus)["tokenizer_sha256"] == facts_of(Path(recipe.target.model)).tokenizer_sha256


def test_the_draft_vocabulary_comes_from_training_samples_and_covers_them(recipe_of: Any) -> None:
    recipe, paths = recipe_of(*TALKS, draft_vocab_size=64)
    report = run(recipe, paths)
    ids = read_draft_vocab(paths.draft_vocab)
    assert ids is not None
    assert len(ids) == 64
    assert {0, 1, 2} <= set(ids)
    written = {
        t for s in corpus(paths) if s.split == "train" for t, m in zip(s.input_ids, s.loss_mask, strict=True) if m
    }
    assert written <= set(ids)
    assert report["draft_vocab"]["coverage_train"] == 1.0
    assert report["draft_vocab"]["distinct_tokens"] == len(written)


def test_any_number_of_workers_writes_the_same_bytes(recipe_of: Any) -> None:
    many = [{"conversations": share_gpt(f"How many {i}?", f"There are {i} of them.")} for i in range(600)]
    one, paths_of_one = recipe_of(*many)
    two, paths_of_two = recipe_of(*many, name="two", workers=2)
    two = two.model_copy(update={"prepare": two.prepare.model_copy(update={"sources": one.prepare.sources})})
    assert run(one, paths_of_one) == run(two, paths_of_two)
    assert paths_of_one.corpus.read_bytes() == paths_of_two.corpus.read_bytes()


def test_a_question_that_is_trained_on_is_never_held_out_and_repeats_are_counted(recipe_of: Any) -> None:
    retold = [{"conversations": share_gpt(f"How  many {i}?\n", f"I count {i} of them, I think.")} for i in range(12)]
    recipe, paths = recipe_of(*TALKS, *TALKS[:5], *retold)
    report = run(recipe, paths)
    questions = [*range(12), *range(5), *range(12)]
    splits: dict[int, set[str]] = {}
    for sample in corpus(paths):
        splits.setdefault(questions[int(sample.conversation_id.removeprefix("talk/"))], set()).add(sample.split)
    assert sorted(map(len, splits.values())) == [1] * 12
    assert set.union(*splits.values()) == {"train", "validation"}
    assert (report["rows"]["repeated"], report["rows"]["same_question"]) == (5, 17)
    assert any("17 begin with the question" in line and "5 repeat" in line for line in report["summary"])


def test_an_ids_split_does_not_change_when_data_are_added(recipe_of: Any) -> None:
    recipe, paths = recipe_of(*TALKS)
    run(recipe, paths)
    before = {sample.conversation_id: sample.split for sample in corpus(paths)}
    recipe, paths = recipe_of(*TALKS, *TALKS, name="more")
    run(recipe, paths)
    after = {sample.conversation_id: sample.split for sample in corpus(paths)}
    assert before.items() <= after.items()


def test_about_the_asked_share_of_conversations_is_held_out() -> None:
    for seed in (0, 1):
        held_out = sum(split_of(conversation(("user", f"How {i}?")), seed, 0.05) == "validation" for i in range(20_000))
        assert 850 < held_out < 1150
    assert split_of(conversation(("user", "How?")), 0, 0.0) == "train"
    assert split_of(conversation(("user", "How?")), 0, 1.0) == "validation"


def test_where_no_row_can_be_used_the_reasons_are_counted_and_no_corpus_is_left(recipe_of: Any) -> None:
    recipe, paths = recipe_of({"text": "<|im_start|>user\nHow?"}, {"text": "…"})
    with pytest.raises(DataError, match="none of 2 rows gives a sample: 2 × no `messages`"):
        run(recipe, paths)
    assert not paths.corpus.exists()


def test_where_the_template_refuses_every_row_the_run_stops_and_says_so(recipe_of: Any, tmp_path: Path) -> None:
    (tmp_path / "shouted.jinja").write_text(SHOUTED)
    recipe, paths = recipe_of(*TALKS, chat_template=str(tmp_path / "shouted.jinja"))
    with pytest.raises(DataError, match=r"12 × template refuses it: no chats today \(such as talk/0\)"):
        run(recipe, paths)
    assert not paths.corpus.exists()


def test_a_run_without_sources_is_a_wrong_request(recipe_of: Any) -> None:
    recipe, paths = recipe_of(sources=[])
    with pytest.raises(RecipeError, match="names no conversations"):
        run(recipe, paths)


BY_TARGET = {"using": "transformers", "max_new_tokens": 12, "batch_size": 3}


@pytest.mark.parametrize(
    ("prepare", "draft", "said"),
    [
        ({"draft_vocab_size": 321}, {}, "prepare.draft_vocab_size: is 321, and the target's vocabulary has 320"),
        ({"draft_vocab_size": 2}, {}, "prepare.draft_vocab_size: is 2, too small for the 3 special tokens"),
        ({}, {"num_attention_heads": 3}, "train.draft: 3 attention heads cannot share 2 key-value heads"),
        ({}, {"head_dim": 7}, "train.draft: a head_dim of 7 is odd"),
        ({}, {"fc_norm": True}, "train.draft: norm_before_fc and fc_norm exclude each other"),
    ],
)
def test_a_draft_that_cannot_be_is_refused_before_an_answer_is_written(
    recipe_of: Any, prepare: dict[str, Any], draft: dict[str, Any], said: str
) -> None:
    recipe, paths = recipe_of(*TALKS[:1], regenerate=BY_TARGET, **prepare)
    train = recipe.train.model_copy(update={"draft": recipe.train.draft.model_copy(update=draft)})
    with pytest.raises(RequestError, match=said):
        run(recipe.model_copy(update={"train": train}), paths)
    assert not paths.answers.exists()


def test_training_ids_are_the_prompts_and_the_ids_that_the_target_generated(recipe_of: Any) -> None:
    import torch

    from draftsmith.target import load_target, load_tokenizer

    recipe, paths = recipe_of(*TALKS[:5], regenerate=BY_TARGET)
    report = run(recipe, paths)
    facts = facts_of(Path(recipe.target.model))
    tokenizer = load_tokenizer(facts, recipe.target)
    model = load_target(facts, recipe.target, torch.device("cpu"), torch.float32)
    first_rows = [sample for sample in corpus(paths) if sample.id.endswith("/0")]
    assert len(first_rows) == 5
    for i, sample in enumerate(first_rows):
        asked = [{"role": "user", "content": f"How many {i}?"}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist()
        assert sample.input_ids[: len(whole)] == whole
        assert sample.loss_mask[: len(whole)] == [0] * len(prompt) + [1] * (len(whole) - len(prompt))
    assert report["answers"]["regenerated_share"] == 1.0
    assert not any("not the target's own" in line for line in report["summary"])


def test_an_answer_that_was_cut_is_counted_and_has_no_end_of_turn(recipe_of: Any) -> None:
    recipe, paths = recipe_of(*TALKS[:4], regenerate={**BY_TARGET, "max_new_tokens": 6})
    report = run(recipe, paths)
    answers = [json.loads(line) for line in paths.answers.read_text().splitlines()]
    cut = [answer for answer in answers if answer["finish_reason"] == "length"]
    assert report["answers"]["finish_reasons"]["length"] == len(cut) > 0
    assert report["answers"]["cut_share"] == round(len(cut) / len(answers), 4)
    assert all(len(answer["answer_ids"]) == 6 and 2 not in answer["answer_ids"] for answer in cut)


def test_a_stopped_run_goes_on_to_the_same_corpus(recipe_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, whole_paths = recipe_of(*TALKS, regenerate=BY_TARGET)
    run(whole, whole_paths)
    recipe, paths = recipe_of(*TALKS, name="stopped", regenerate=BY_TARGET)
    monkeypatch.setattr(signals, "_requested", True)
    for answers in (3, 6):  # stopped after each batch
        with pytest.raises(Interrupted):
            run(recipe, paths)
        assert len(paths.answers.read_bytes().splitlines()) == answers
        with open(paths.answers, "ab") as file:
            file.write(b'{"conversation_id": "talk/5", "turn": 0, "pro')  # as a kill leaves it
    assert not paths.corpus.exists()
    monkeypatch.setattr(signals, "_requested", False)
    report = run(recipe, paths)
    assert report["answers"]["found_from_an_earlier_run"] == 6
    keys = [(a["conversation_id"], a["turn"]) for a in map(json.loads, paths.answers.read_text().splitlines())]
    assert len(keys) == len(set(keys)) == report["answers"]["answers"]
    assert corpus(paths) == corpus(whole_paths)


def test_a_finished_run_asks_for_nothing_again(recipe_of: Any) -> None:
    recipe, paths = recipe_of(*TALKS[:3], regenerate=BY_TARGET)
    run(recipe, paths)
    answers, samples = paths.answers.read_bytes(), paths.corpus.read_bytes()
    run(recipe, paths)
    assert (paths.answers.read_bytes(), paths.corpus.read_bytes()) == (answers, samples)


def test_conversations_the_target_cannot_be_asked_are_counted(recipe_of: Any) -> None:
    marked = {"conversations": share_gpt("What does <|im_end|> mean?")}
    long = {"conversations": share_gpt("long " * 200)}
    recipe, paths = recipe_of(*TALKS[:2], marked, long, regenerate=BY_TARGET)
    report = run(recipe, paths)
    assert {reason: entry["examples"] for reason, entry in report["rows"]["dropped"].items()} == {
        "text of a turn spells the special token <|im_end|>": ["talk/2"],
        "prompt leaves no room for an answer within 128 tokens": ["talk/3"],
    }
    assert report["answers"]["conversations_ended"].keys() >= report["rows"]["dropped"].keys()
