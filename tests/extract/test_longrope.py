"""Which of LongRoPE's factors states have: those of serving, however long the samples are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import extract
from draftsmith.errors import RequestError, StoreError
from draftsmith.extract.engine_settings import engine_args
from draftsmith.extract.from_transformers import Reference
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Recipe, Target, parse
from draftsmith.rundir import RunPaths
from draftsmith.store.shards import Store
from draftsmith.target import load_target, take_long_factors
from tests.extract import scale
from tests.extract.test_from_vllm import prepared
from tests.extract.vllm_runs import REPOSITORY, mixed_samples

ORIGINAL, LONGEST = 128, 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scale.phi3(tmp_path_factory.mktemp("phi3"), ORIGINAL)


def served_up_to(recipe: Recipe, tokens: int | None) -> Recipe:
    args = {} if tokens is None else {"max_model_len": tokens}
    return recipe.model_copy(update={"serve": recipe.serve.model_copy(update={"engine_args": args})})


@pytest.mark.parametrize(
    ("served", "samples", "engine"),
    [(None, 126, 128), (128, 100, 102), (129, 40, 129), (512, 126, 129), (512, 500, 502)],
)
def test_the_engine_is_told_a_length_at_which_it_takes_the_factors_of_serving(
    model: Path, served: int | None, samples: int, engine: int
) -> None:
    recipe = served_up_to(parse({"name": "t", "target": {"model": "m"}}), served)
    assert engine_args(recipe, read_facts(str(model)), "float32", samples)["max_model_len"] == engine


def test_samples_longer_than_what_is_served_are_refused_with_both_remedies(model: Path) -> None:
    recipe = parse({"name": "t", "target": {"model": "m"}})
    with pytest.raises(RequestError) as caught:
        engine_args(recipe, read_facts(str(model)), "float32", 127)
    assert caught.value.where == "serve.engine_args.max_model_len"
    assert "prepare.max_length_tokens to 126" in str(caught.value.hint)


def test_the_reference_takes_for_short_sequences_what_it_takes_for_long_ones(model: Path) -> None:
    facts, target = read_facts(str(model)), Target(model=str(model))
    loaded = load_target(facts, target, torch.device("cpu"), torch.float32)
    reference = Reference(loaded, facts, (2, 4))
    ids = torch.randint(3, 500, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    of_long = reference.states([ids])[0][:40]  # no token sees what comes after it
    assert not torch.allclose(reference.states([ids[:40]])[0], of_long, rtol=1e-2)
    take_long_factors(loaded)
    torch.testing.assert_close(reference.states([ids[:40]])[0], of_long, rtol=1e-4, atol=1e-4)


@pytest.mark.vllm
def test_short_samples_get_the_factors_of_serving_and_one_store_no_others(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    samples = [replace(one, input_ids=one.input_ids[:100], loss_mask=one.loss_mask[:100]) for one in mixed_samples(12)]
    prepared_run: tuple[Any, RunPaths] = prepared(tmp_path, model, samples)
    recipe, paths = prepared_run
    extract.run(served_up_to(recipe, LONGEST), paths)
    manifest = Store.open(paths.store).manifest
    assert manifest.rope_factors == "long"
    assert manifest.parity is not None
    assert manifest.parity["against"] == "transformers"
    with pytest.raises(StoreError, match='rope_factors is "long", and "short" is needed'):
        extract.run(recipe, paths)
