"""The import rules of the package, read from its source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import draftsmith
from draftsmith.rundir import STAGES

PACKAGE = Path(draftsmith.__file__).parent
LIGHT = ["cli", "recipe", "records", "errors", "rundir", "pipeline", "probe", "probe.facts", "probe.checks"]


def imported_modules(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("stage", STAGES)
def test_stages_do_not_import_one_another(stage):
    others = tuple(f"draftsmith.{other}" for other in STAGES if other != stage)
    for file in (PACKAGE / stage).rglob("*.py"):
        offending = {
            name for name in imported_modules(file) if name in others or name.startswith(tuple(f"{o}." for o in others))
        }
        assert not offending, f"{file.relative_to(PACKAGE)} imports {offending}"


def test_the_mathematics_import_no_stage():
    for file in (PACKAGE / "draft").rglob("*.py"):
        assert not {n for n in imported_modules(file) if n.startswith(tuple(f"draftsmith.{s}" for s in STAGES))}, file


@pytest.mark.parametrize("module", LIGHT)
def test_what_must_answer_at_once_loads_no_heavy_package(module):
    heavy = ["torch", "transformers", "vllm", "pyarrow", "datasets", "numpy"]
    code = f"import sys, draftsmith.{module}; print([name for name in {heavy} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
