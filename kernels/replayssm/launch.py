"""Launching Triton kernels: one place that says where they can run and how they are compiled.

Triton is imported on first use, so that everything else works without it.
"""

import importlib
from typing import Any

import torch


def triton_problem(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on this device, or None if they can.

    Triton's interpreter, which `TRITON_INTERPRET=1` switches on before Triton is imported, runs them on a CPU, slowly.
    """
    if _triton() is None:
        return "the package triton is not installed; install it or use backend torch"
    if device.type != "cuda" and not is_interpreted():
        return f"Triton kernels need a CUDA device, got {device}; use backend torch"
    return None


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    triton = _triton()
    return triton is not None and bool(triton.knobs.runtime.interpret)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, **constants: Any) -> None:
    """Launch a kernel on the current device.

    Products are never fused with sums: a payload times its scale is rounded to float32 before anything is added to it,
    and the same source gives the same bits in every kernel.

    Args:
        kernel: A `triton.jit` function.
        grid: Programs per axis.
        *arguments: Tensors and numbers.
        num_warps: Warps per program.
        **constants: Compile-time arguments and launch options.
    """
    if 0 not in grid:
        kernel[grid](*arguments, num_warps=num_warps, enable_fp_fusion=False, **constants)


def _triton() -> Any:
    try:
        return importlib.import_module("triton")
    except ImportError:
        return None
