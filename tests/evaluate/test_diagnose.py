"""Each fault is planted in a draft that accepts much; it is found, by name, and nothing is found without one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.draft.config import draft_config
from draftsmith.draft.files import save_draft
from draftsmith.draft.model import Draft
from draftsmith.errors import RequestError
from draftsmith.evaluate import why
from draftsmith.evaluate.diagnose import Recorded, Trial, cause, compared, conversations_needed, diagnose
from draftsmith.evaluate.offline import target_top1
from draftsmith.recipe import Draft as DraftSettings
from tests.evaluate.builders import (
    STEPS,
    World,
    build_run,
    build_world,
    learn_by_heart,
    make_draft,
    make_recipe,
    open_target,
    read_text,
    seen_ids,
)


@pytest.fixture(scope="module")
def world(tiny_target: Path) -> World:
    """As many conversations as it takes to tell a cause from chance, and short ones."""
    return build_world(tiny_target, prompts=12, answer_tokens=16)


@pytest.fixture(scope="module")
def recorded(world: World) -> list[Recorded]:
    """The world's texts with the states at the draft's layer ids, and one and two above and below."""
    others = {shift: open_target(world.facts.path, shift)[1] for shift in (-2, -1, 1, 2)}
    texts = []
    for i, text in enumerate(world.texts):
        aux = {0: text.aux}
        for shift, target in others.items():
            with torch.no_grad():
                aux[shift] = target.read(text.prompt + text.answer, keep=1, cached=False)[1]
        top1 = target_top1(world.head, text.last, text.loss_mask)
        texts.append(Recorded(str(i), text.input_ids, text.loss_mask, top1, aux))
    return texts


def of_ids(texts: list[Recorded], shift: int) -> list[Recorded]:
    """As if the states of layer ids so many higher had been recorded as the draft's own."""
    return [
        replace(text, aux={at - shift: aux for at, aux in text.aux.items() if abs(at - shift) <= 1}) for text in texts
    ]


def found(world: World, draft: Draft, texts: list[Recorded]) -> str | None:
    named = cause(diagnose(draft, world.facts, texts, STEPS))
    return named.name if named else None


def changed(draft: Draft, **changes: object) -> Draft:
    """The draft under a configuration that it was not trained with."""
    other = Draft(replace(draft.config, **changes))
    other.load_state_dict(draft.state_dict(), strict=False)
    return other.eval()


@pytest.fixture(scope="module")
def plain(world: World) -> Draft:
    """A good draft without the norms that make it indifferent to the size of what it is fed."""
    settings = DraftSettings(norm_before_residual=False, norm_before_fc=False, norm_output=False)
    draft = Draft(draft_config(world.facts, settings, len(ids := seen_ids(world.texts)), world.facts.aux_layer_ids))
    draft.initialise(world.head, ids, seed=0)
    learn_by_heart(draft, world.head, world.texts, steps=120)
    return draft.eval()


def test_a_good_draft_has_nothing_wrong_with_it(world, recorded):
    trials = diagnose(world.trained, world.facts, of_ids(recorded, 0), STEPS)
    assert trials[0].name == "as it is"
    assert (trials[0].lift, trials[0].by_chance) == (0, 1)
    assert trials[0].accepted > 1
    assert cause(trials) is None
    assert len(trials) > 7


def test_a_draft_that_learnt_nothing_is_not_explained_away(world, recorded):
    assert found(world, world.untrained, of_ids(recorded, 0)) is None


@pytest.mark.parametrize("shift", [-1, 1])
def test_layer_ids_one_off_are_found(world, recorded, shift):
    name = "layer ids one lower" if shift > 0 else "layer ids one higher"
    assert found(world, world.trained, of_ids(recorded, shift)) == name


def test_layers_in_another_order_are_found(world, recorded):
    turned = [replace(text, aux={at: aux.flip(-2) for at, aux in text.aux.items()}) for text in of_ids(recorded, 0)]
    assert found(world, world.trained, turned) == "auxiliary states in descending order"


def test_target_ids_where_offsets_should_be_are_found(world, recorded):
    draft = changed(world.trained)
    assert draft.draft_ids is not None
    draft.d2t.copy_(draft.draft_ids)
    assert found(world, draft, of_ids(recorded, 0)) == "d2t holds target ids"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"norm_before_residual": True}, "norm_before_residual the other way"),
        ({"norm_output": True}, "norm_output the other way"),
        ({"norm_before_fc": True}, "no norm before fc"),
        ({"rope_theta": 2.0}, "the target's RoPE"),
    ],
)
def test_a_configuration_that_is_not_the_drafts_is_found(world, recorded, plain, changes, name):
    assert found(world, changed(plain, **changes), of_ids(recorded, 0)) == name


@pytest.mark.parametrize(
    ("norm", "name"),
    [("norm_before_fc", "a norm over all states before fc"), ("fc_norm", "a norm over each state before fc")],
)
def test_a_norm_before_fc_that_the_configuration_does_not_have_is_found(world, recorded, norm, name):
    settings = DraftSettings(norm_before_residual=False, norm_before_fc=False, norm_output=False)
    config = draft_config(world.facts, settings, len(ids := seen_ids(world.texts)), world.facts.aux_layer_ids)
    draft = Draft(replace(config, **{norm: True}))
    draft.initialise(world.head, ids, seed=0)
    learn_by_heart(draft, world.head, world.texts, steps=120)
    assert found(world, changed(draft, **{norm: False}), of_ids(recorded, 0)) == name


def test_a_rope_that_is_neither_the_drafts_nor_the_targets_is_found(world, recorded, plain):
    scaled = changed(plain, rope_scaling={"rope_type": "linear", "factor": 50.0})
    assert found(world, scaled, of_ids(recorded, 0)) == "the target's RoPE"
    other_target = replace(world, facts=replace(world.facts, rope_theta=3.0))
    assert found(other_target, changed(plain, rope_theta=2.0), of_ids(recorded, 0)) == "the default RoPE"


def test_the_remedy_says_what_to_set(world, recorded, plain):
    named = cause(diagnose(changed(plain, norm_output=True), world.facts, of_ids(recorded, 0), STEPS))
    assert named is not None
    assert named.remedy == "set norm_output to False in its configuration"
    assert named.lift > 0.3


def test_as_many_conversations_as_are_said_to_be_needed_are_evidence_and_one_fewer_is_none():
    """A change that helps in each of them, among twelve that do nothing."""

    def named(conversations: int) -> Trial | None:
        before, owners = np.full((conversations, 2), 20.0), [str(i) for i in range(conversations)]
        trials = [compared(str(i), "a remedy", before, before + np.array([i == 0, 0]), owners) for i in range(12)]
        assert conversations_needed(trials) == 8  # 12 / 2^8 < 0.05
        return cause(trials)

    assert named(8) is not None
    assert named(7) is None


@pytest.mark.parametrize("conversations", [2, 4, 8, 12])
def test_where_nothing_helps_a_cause_is_named_in_one_of_twenty_diagnoses_at_most(conversations):
    """Twelve readings a diagnosis, none of them better than the draft as it is."""
    chance, named = np.random.default_rng(0), 0
    owners = [str(i) for i in range(conversations)]
    for _ in range(100):
        before = np.stack([chance.normal(30, 5, conversations), np.full(conversations, 20)], -1)
        trials = []
        for reading in range(12):
            after = before + np.stack([chance.normal(0, 4, conversations), np.zeros(conversations)], -1)
            trials.append(compared(str(reading), "a remedy", before, after, owners))
        named += cause(trials) is not None
    assert named <= 10  # of 100 at a rate of 5 %: more in one of a hundred repetitions


def test_a_larger_lift_that_may_be_chance_does_not_hide_a_smaller_one_that_is_none():
    noisy, small, smaller = (Trial(f"{lift}", "a remedy", 2, lift, by) for lift, by in [(9, 0.2), (2, 1e-4), (1, 1e-5)])
    assert cause([smaller, noisy, small]) == small


def test_too_few_conversations_are_told_with_how_many_are_needed(world, plain, tmp_path):
    paths = build_run(replace(world, texts=world.texts[:4]), tmp_path / "run")
    save_draft(tmp_path / "draft", changed(plain, norm_output=True))
    report = why(make_recipe(paths), paths, tmp_path / "draft")
    assert report["cause"] is None
    assert re.search(
        r"too few conversations .* 4 held out, and \d+ are needed .*prepare\.validation_fraction", report["verdict"]
    )
    assert report["summary"][-1].strip() == report["verdict"]


def test_a_run_is_asked_for_the_reason(world, plain, tmp_path):
    """From the files of a run, with the draft in a folder of its own, on layer ids that the store does not have."""
    paths = build_run(world, tmp_path / "run")
    recipe = make_recipe(paths)
    assert why(recipe, paths)["cause"] is None
    with pytest.raises(RequestError, match="holds no draft"):
        why(recipe, paths, tmp_path)
    save_draft(tmp_path / "draft", changed(plain, aux_layer_ids=tuple(id + 1 for id in plain.config.aux_layer_ids)))
    report = why(recipe, paths, tmp_path / "draft")
    assert report["cause"] == "layer ids one lower"
    assert report["summary"][-1].startswith(
        "          found: layer ids one lower; it was trained on canonical layer ids"
    )
    kept = json.loads((paths.stage("evaluate") / "why.json").read_text())
    assert kept == json.loads(json.dumps({name: value for name, value in report.items() if name != "summary"}))


def another_writer(world: World) -> World:
    """The same prompts with answers that the target would not give, and a draft that knows those by heart."""
    texts = [read_text(world.facts, world.target, text.prompt, text.answer[::-1]) for text in world.texts]
    draft = make_draft(world.facts, world.head, seen_ids(world.texts))
    learn_by_heart(draft, world.head, texts, steps=80)
    return replace(world, texts=texts, trained=draft.eval())


def test_a_draft_of_another_writers_answers_is_found(world: World, tmp_path: Path) -> None:
    paths = build_run(another_writer(world), tmp_path)
    report = why(make_recipe(paths), paths)
    assert report["cause"] == "trained on answers that are not the target's own"
    assert report["own_answers"]["lift"] < -0.3
    assert "of the recorded answers' tokens are the target's own top-1" in " ".join(report["notes"])
    assert "prepare.regenerate" in report["summary"][-1]


def test_a_draft_of_the_targets_own_answers_is_cleared_on_anothers(world: World, tmp_path: Path) -> None:
    """It accepts little on the recorded answers, which are at fault and not the draft."""
    paths = build_run(replace(another_writer(world), trained=world.trained), tmp_path)
    report = why(make_recipe(paths), paths)
    assert report["cause"] is None
    assert report["own_answers"]["lift"] > 0.3
    assert any("answers that the target writes itself" in line for line in report["summary"])


def test_the_target_is_not_asked_for_answers_where_the_recorded_are_its_own(world: World, tmp_path: Path) -> None:
    paths = build_run(world, tmp_path)
    assert why(make_recipe(paths), paths)["own_answers"] is None


def test_states_that_the_target_does_not_compute_are_found(world: World, tmp_path: Path) -> None:
    """As if the engine that recorded them had run the model otherwise; the draft was trained on what it gave."""
    texts = [replace(text, aux=text.aux.flip(-1) * 3) for text in world.texts]
    draft = make_draft(world.facts, world.head, seen_ids(texts))
    learn_by_heart(draft, world.head, texts, steps=80)
    paths = build_run(replace(world, texts=texts, trained=draft.eval()), tmp_path)
    assert why(make_recipe(paths), paths)["cause"] == "states as transformers 5 recorded them"
