"""Kernels to measure against: the card's own bandwidth, and a conventional Mamba-2 step of the usual design.

The Mamba-2 step follows the design of `selective_state_update` in state-spaces/mamba: one program holds `BM` value rows
of one head and all its keys, reads the state, updates it, reduces the output and writes the state back.
"""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportGeneralTypeIssues=false, reportPrivateImportUsage=false

import triton
import triton.language as tl


@triton.jit
def read_kernel(source, sink, count, BLOCK: tl.constexpr):
    """Read everything once; the sums keep the reads alive."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + at, mask=at < count, other=0.0)
    total = tl.sum(x, axis=0)
    tl.store(sink + tl.program_id(0), total)


@triton.jit
def copy_kernel(source, sink, count, BLOCK: tl.constexpr):
    """Copy."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sink + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def read_modify_write_kernel(source, sink, count, BLOCK: tl.constexpr):
    """Update in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(source + at, tl.load(source + at, mask=at < count) * 0.5 + 1.0, mask=at < count)


@triton.jit
def state_update_kernel(
    state, x, dt, dt_bias, decay_rate, b, c, skip, out,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Everything is contiguous: state `[batch, heads, d_v, d_k]`, x `[batch, heads, d_v]`, b and c per group."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    batch = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2)
    group = head // (HEADS // GROUPS)
    there = rows < DV
    at = batch * HEADS + head
    keys = tl.arange(0, DK)
    where = state + at * (DV * DK) + rows[:, None] * DK + keys[None, :]
    h = tl.load(where, mask=there[:, None], other=0.0)
    value = tl.load(x + at * DV + rows, mask=there, other=0.0).to(tl.float32)
    step = tl.load(dt + at).to(tl.float32) + tl.load(dt_bias + head)
    step = tl.where(step <= 20.0, tl.log(1.0 + tl.exp(step)), step)
    decay = tl.exp(step * tl.load(decay_rate + head))
    key = tl.load(b + (batch * GROUPS + group) * DK + keys).to(tl.float32)
    query = tl.load(c + (batch * GROUPS + group) * DK + keys).to(tl.float32)
    h = h * decay + (value * step)[:, None] * key[None, :]
    tl.store(where, h, mask=there[:, None])
    y = tl.sum(h * query[None, :], axis=1) + value * tl.load(skip + head)
    tl.store(out + at * DV + rows, y.to(out.dtype.element_ty), mask=there)
