"""What GPUs can do, by a part of their name. No torch."""

from __future__ import annotations

# Dense bf16 operations a second at the peak: NVIDIA's data sheets, without sparsity.
GPU_FLOPS = (
    ("B300", 2250e12),
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("4090", 165e12),
    ("3090", 71e12),
)


def peak_flops(name: str) -> float | None:
    """Of one GPU; None if its name is not known."""
    return next((peak for part, peak in GPU_FLOPS if part in name), None)
