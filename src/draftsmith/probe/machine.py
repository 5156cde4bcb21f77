"""What a machine has to offer: devices, memory, cores.

Standard library only and self-contained: `remote.py` sends this file as it is to another machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any


def inspect_machine() -> dict[str, Any]:
    """`gpus`: a list of {name, memory_bytes}; number of `cpus`; `memory_bytes` of the host."""
    return {
        "gpus": _gpus(),
        "cpus": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _gpus() -> list[dict[str, Any]]:
    """NVIDIA devices, as nvidia-smi lists them; none if it is not there or has no driver to talk to."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in done.stdout.splitlines():
        name, _, mebibytes = line.rpartition(", ")
        if mebibytes.isdigit():
            gpus.append({"name": name, "memory_bytes": int(mebibytes) * 2**20})
    return gpus
