"""What the hand-written passes share: kernels fused by the compiler, and weight gradients that add up in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Run a chain of elementwise operations and row reductions as few kernels on CUDA, through torch.compile.

    The number of rows, the first argument's first dimension, may change without compiling anew. On a CPU the function
    runs as it is written.
    """
    compiled: Callable[P, R] | None = None  # at the first call on CUDA: the compiler takes seconds to import

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        first = args[0]
        assert isinstance(first, torch.Tensor)
        if not first.is_cuda:
            return function(*args, **kwargs)
        compiled = compiled or torch.compile(function)
        for argument in args:
            if isinstance(argument, torch.Tensor) and argument.ndim > 1 and len(argument) == len(first):
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled(*args, **kwargs)

    return call


def wide(x: torch.Tensor) -> torch.Tensor:
    """In float32, or wider where it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def accumulate(total: torch.Tensor | None, doutput: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Add a linear layer's weight gradient doutputᵀ·inputs to `total`, in float32 or wider whatever they are.

    On CUDA the matrix product itself adds to `total`, so that no rounded gradient exists in between.
    """
    product = doutput.t(), inputs
    if doutput.is_cuda and doutput.dtype != torch.float32 and doutput.dtype != torch.float64:
        if total is None:
            return torch.mm(*product, out_dtype=torch.float32)
        return torch.addmm(total, *product, out_dtype=torch.float32, out=total)
    if total is None:
        return wide(torch.mm(*product))
    return total.add_(torch.mm(*product)) if total.dtype != doutput.dtype else total.addmm_(*product)
