from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def test_the_triton_kernels_do_what_the_torch_code_beside_them_does():
    pytest.importorskip("triton")
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(Path(__file__).with_name("kernel_checks.py"))],
        env=os.environ | interpret,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
