from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftsmith.evaluate.busy import busy_cores, cores_between, warning

BEFORE = (
    "cpu  1000 0 500 8000 100 0 0 0 0 0\ncpu0 500 0 250 4000 50 0 0 0 0 0\ncpu1 500 0 250 4000 50 0 0 0 0 0\nintr 5\n"
)


def test_cores_at_work_are_those_that_neither_idle_nor_wait_for_a_disk():
    assert cores_between(BEFORE, BEFORE.replace("8000 100", "8150 150")) == pytest.approx(0)
    assert cores_between(BEFORE, BEFORE.replace("cpu  1000 0 500 8000", "cpu  1060 0 520 8120")) == pytest.approx(0.8)
    assert cores_between(BEFORE, BEFORE.replace("cpu  1000", "cpu  1200")) == pytest.approx(2)
    assert cores_between(BEFORE, BEFORE) == 0, "no tick went by"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux says it")
def test_this_machine_has_no_more_at_work_than_it_has():
    found = busy_cores()
    assert found is not None
    assert 0 <= found <= (os.cpu_count() or 1)


def test_a_machine_at_work_is_told_of_with_the_engine_that_it_slowed():
    cores = os.cpu_count() or 1
    assert warning({"without the draft": 0.01, "with the draft, K = 3": 0.0}) is None
    assert warning({}) is None
    said = warning({"without the draft": cores * 0.5 + 1, "with the draft, K = 3": 0.0})
    assert said is not None
    assert f"{cores * 0.5 + 1:.1f} of {cores} cores were at work before the engine without the draft" in said
