"""The kernel of `replayssm.token_inputs`."""

# pyright: basic

import triton
import triton.language as tl


@triton.jit
def tokens_kernel(
    x_ptr, factor_ptr, out_ptr,
    time, heads, out_row, x_row, x_time, x_head, x_step, scale, eps,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
    UNIT: tl.constexpr, SCALED: tl.constexpr, HAS_FACTOR: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens of one head of one row."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    w = tl.arange(0, BLOCK_W)
    here = (t < time)[:, None] & (w < WIDTH)[None, :]
    at = x_ptr + row * x_row + head * x_head + t.to(tl.int64)[:, None] * x_time + w[None, :] * x_step
    x = tl.load(at, mask=here, other=0.0).to(tl.float32)
    if UNIT:
        length = tl.sqrt_rn(tl.sum(x * x, axis=1) + eps)
        x = x * tl.div_rn(tl.full((BLOCK_T,), 1.0, tl.float32), length)[:, None]
    if SCALED:
        x = x * scale
    if HAS_FACTOR:
        x = x * tl.load(factor_ptr + (row * time + t) * heads + head, mask=t < time, other=0.0)[:, None]
    out = row * out_row + (t.to(tl.int64) * heads + head) * WIDTH
    tl.store(out_ptr + out[:, None] + w[None, :], x, mask=here)
