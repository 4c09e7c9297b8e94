"""Launching Triton kernels: one place that says where they can run and how they are compiled.

Triton is imported on first use, so that everything else works without it.
"""

import importlib
from dataclasses import replace
from functools import cache
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


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 of any other."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)  # pyright: ignore


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, fused: bool = False, **constants: Any
) -> None:
    """Launch a kernel on the current device.

    Unless `fused`, products are never fused with sums: a payload times its scale is rounded to float32 before anything
    is added to it, and the same source gives the same bits in every kernel.

    Args:
        kernel: A `triton.jit` function.
        grid: Programs per axis.
        *arguments: Tensors and numbers.
        num_warps: Warps per program.
        fused: Let the compiler fuse products with sums, in a kernel where no stored value depends on it.
        **constants: Compile-time arguments and launch options.
    """
    if 0 in grid:
        return
    if is_interpreted():
        _mend_interpreter()
    first = next(a for a in arguments if isinstance(a, torch.Tensor))
    with torch.cuda.device_of(first):
        kernel[grid](*arguments, num_warps=num_warps, enable_fp_fusion=fused, **constants)


@cache
def _mend_interpreter() -> None:
    """Work around two faults of the interpreter of Triton 3.6.

    It keeps loop bounds in arrays that NumPy 2.4 does not take for numbers. And each call of a device function patches
    `triton.language` once more, on top of the patches of the launch, so that a kernel grows slower with every call.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core = importlib.import_module("triton.language.core")
    builder = interpreter.interpreter_builder
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang

    def index(tensor: Any) -> int:
        return int(tensor.handle.data.item())

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", index)

    def patch_once(function: Any) -> Any:
        scope = patch_language(function)
        # Triton's own device functions reach the language through its core.
        interpreter._patch_builtin(core, builder, scope)
        interpreter._patch_lang_core(core, scope)
        return scope

    def call(function: Any, *arguments: Any, **constants: Any) -> Any:
        return function.rewrite()(*arguments, **constants)

    # Compiled code does not check integers for overflow either.
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter._patch_lang = patch_once
    interpreter.InterpretedFunction.__call__ = call


def _triton() -> Any:
    try:
        return importlib.import_module("triton")
    except ImportError:
        return None
