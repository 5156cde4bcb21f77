"""Capture from scale models of the families that matter most: 200 sequences of 1 to 500 tokens, none lost or swapped.

Steps of 64 tokens and 8 sequences cut the prompts into pieces, except under MLA, which vLLM computes in one on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.probe.facts import read_facts
from draftsmith.rehearse.scale_config import ORDINARY_TOKENS
from draftsmith.rehearse.scale_model import build_scale_model
from tests.extract.vllm_runs import REPOSITORY, ROUNDING, captured, errors, mixed_samples, plan_for

pytestmark = pytest.mark.vllm
CONFIGS = Path(__file__).parents[1] / "probe" / "configs"
IN_ONE_PIECE = {"max_num_batched_tokens": 512}
CACHED, UNCACHED = ({"engine_args": {"enable_prefix_caching": on}} for on in (True, False))


@pytest.fixture(autouse=True)
def workers_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("deepseek-v3", IN_ONE_PIECE, id="deepseek-v3"),
        pytest.param("kimi-k2.5", IN_ONE_PIECE, id="kimi-k2.5"),
        pytest.param("qwen3-30b-a3b", CACHED, id="qwen3-moe"),
        pytest.param("qwen3-30b-a3b", UNCACHED, id="qwen3-moe, no prefix cache", marks=pytest.mark.slow),
        pytest.param("gpt-oss-20b", CACHED, id="gpt-oss"),
        pytest.param("gpt-oss-20b", UNCACHED, id="gpt-oss, no prefix cache", marks=pytest.mark.slow),
        pytest.param("gpt-oss-20b", {"capture": "hooked"}, id="gpt-oss, hooked", marks=pytest.mark.slow),
        pytest.param(
            "kimi-k2.5", {**IN_ONE_PIECE, "capture": "hooked"}, id="kimi-k2.5, hooked", marks=pytest.mark.slow
        ),
        pytest.param("deepseek-v3", {**IN_ONE_PIECE, "capture": "hooked"}, id="deepseek-v3, hooked"),
        pytest.param("gpt2", {}, id="gpt2, hooked"),
    ],
)
def test_every_state_is_the_references(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    evidence = {"path": name, "config": json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))}
    plain = build_scale_model(evidence, tmp_path / "model").plain
    samples = mixed_samples(200, ORDINARY_TOKENS)
    states = captured(plan_for(plain, tmp_path / "run", **settings), samples)
    assert list(states) == [one.id for one in samples]
    by_sequence = errors(plain, states, samples).split([len(one.input_ids) for one in samples])
    # A processor rounds single tokens to 1.6 times ROUNDING where experts are nearly tied; a swapped state is off by 1.
    strays = [one.id for one, found in zip(samples, by_sequence, strict=True) if found.max() >= 10 * ROUNDING]
    # Measured: none. A near-tie may fall the other way on another machine, which no swap is: of two.
    assert len(strays) <= bool(read_facts(str(plain)).num_experts), strays
    assert max(found.median() for found in by_sequence) < ROUNDING, strays


@pytest.mark.real_model
@pytest.mark.parametrize("settings", [CACHED, pytest.param(UNCACHED, id="no prefix cache", marks=pytest.mark.slow)])
def test_every_state_of_a_real_model_is_the_references(smollm2: Path, settings: dict[str, Any], tmp_path: Path) -> None:
    samples = mixed_samples(200, 49152)
    states = captured(plan_for(smollm2, tmp_path / "run", **settings), samples)
    assert list(states) == [one.id for one in samples]
    found = errors(smollm2, states, samples)
    assert found.quantile(0.99) < ROUNDING
    assert found.max() < 2.0**-9, "more than rounding to bfloat16"
