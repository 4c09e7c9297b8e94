"""Activations of a model as float32 tokens of a recurrence, in one pass over them on a card."""

import importlib
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from replayssm.launch import launch, triton_problem
from replayssm.records import with_room

TOKENS_PER_PROGRAM = 64
ROOM = 16
"""Room in front of tokens on a card: a window of the usual length, less than one of which is ever buffered."""
_WARPS = 4


def room_on(device: torch.device) -> int:
    """Room that `float32_tokens` leaves in front of its result (see `TokenInputs.room`)."""
    return ROOM if device.type == "cuda" and triton_problem(device) is None else 0


def float32_tokens(
    x: Float[Tensor, "rows time heads width"],
    *,
    eps: float | None = None,
    scale: float = 1.0,
    factor: Float[Tensor, "rows time heads"] | None = None,
) -> Float[Tensor, "rows time heads width"]:
    """Cast to float32 and, in this order, scale to unit length, multiply by a number, multiply by one per head.

    Args:
        x: Activations of any dtype and strides; what a convolution leaves is transposed.
        eps: Added to the sum of squares inside the root of the length; lengths stay as they are when absent.
        scale: The number.
        factor: The numbers of each token and head, float32.

    Returns:
        Contiguous but for the room of `room_on`. On a card the sum of squares is in another order than elsewhere.
    """
    if room_on(x.device) and x.numel():
        return run_kernel(x, eps=eps, scale=scale, factor=factor)
    x = x.to(torch.float32)
    if eps is not None:
        x = x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + eps)
    if scale != 1.0:
        x = x * scale
    return x if factor is None else x * factor.unsqueeze(-1)


def run_kernel(x: Tensor, *, eps: float | None, scale: float, factor: Tensor | None) -> Tensor:
    """Run the kernel; see `float32_tokens`."""
    rows, time, heads, width = x.shape
    out = with_room(rows, ROOM, time, heads, width, x.device)
    kernel: Any = importlib.import_module("replayssm.token_inputs_triton").tokens_kernel
    launch(
        kernel,
        (-(-time // TOKENS_PER_PROGRAM), heads, rows),
        x,
        x if factor is None else factor.contiguous(),
        out,
        time,
        heads,
        out.stride(0),
        *x.stride(),
        scale,
        0.0 if eps is None else eps,
        WIDTH=width,
        BLOCK_T=TOKENS_PER_PROGRAM,
        BLOCK_W=max(16, 1 << (width - 1).bit_length()),
        UNIT=eps is not None,
        SCALED=scale != 1.0,
        HAS_FACTOR=factor is not None,
        num_warps=_WARPS,
    )
    return out
