"""A target that is spread over two workers: each holds half of every layer, and one of them hands the states out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.extract.engines import Engines
from tests.extract import scale
from tests.extract.vllm_runs import ROUNDING, errors, mixed_samples, plan_for, run_on, states_of

pytestmark = pytest.mark.vllm
OF_TWO_WORKERS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def test_every_state_of_a_target_in_two_halves_is_the_references(tmp_path: Path) -> None:
    model, samples = scale.llama(tmp_path / "model"), mixed_samples(12)
    plan = plan_for(model, tmp_path / "run", tensor_parallel_size=2)
    assert plan.engine_args["tensor_parallel_size"] == 2
    with Engines(replace(plan, environment={**plan.environment, **OF_TWO_WORKERS})) as engines:
        found = states_of(run_on(engines, samples))
        engines.end()
    assert list(found) == [one.id for one in samples]
    assert errors(model, found, samples).max() < ROUNDING
