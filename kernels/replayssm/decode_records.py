"""Records of a window in the decode kernels: decays between them, their keys, what they add up to; and the cursors."""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

ALL_STEPS = tl.constexpr(0)
READS_ONLY = tl.constexpr(1)
FLUSHES_ONLY = tl.constexpr(2)


@triton.jit
def later_decays(pointer, now, count, held, LP: tl.constexpr):
    """For each record the sum of the log-decays after it, the present token's included, and the sum of all.

    Records below `held` are loaded and those below `count` counted.

    Each is summed from its own terms, never a difference of two sums, which one strong decay would cost their digits.
    """
    record = tl.arange(0, LP)
    following = tl.load(pointer + record + 1, mask=record + 1 < held, other=0.0)
    own = tl.load(pointer + record, mask=record < held, other=0.0)
    following = tl.where(record + 1 < count, following, 0.0)
    own = tl.where(record < count, own, 0.0)
    return tl.cumsum(following, axis=0, reverse=True) + now, tl.sum(own, axis=0) + now


@triton.jit
def record_chunk(
    keys_at, decays_at, now, record, count, NUMBER: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Chunk `NUMBER` of the keys of all records; with a decay per channel, after what has decayed since."""
    CHUNK: tl.constexpr = 32 if BK >= 32 else BK
    place = NUMBER * CHUNK + tl.arange(0, CHUNK)
    where = record[:, None] * DK + place[None, :]
    keys = tl.load(keys_at + where, mask=(record < count)[:, None] & (place < DK)[None, :], other=0.0)
    if CHANNELS:
        after = (record + 1 < count)[:, None] & (place < DK)[None, :]
        following = tl.load(decays_at + where + DK, mask=after, other=0.0)
        keys = keys.to(tl.float32) * tl.exp(tl.cumsum(following, axis=0, reverse=True) + now[None, :])
    return keys


@triton.jit
def record_chunks(
    keys_at, decays_at, now, record, count, DK: tl.constexpr, BK: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """All chunks of the keys of all records."""
    found = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        present = now[c].to(tl.float32) if CHANNELS else now
        found = found + (record_chunk(keys_at, decays_at, present, record, count, c, DK, BK, CHANNELS),)
    return found


@triton.jit
def folded(weighted, keys, INTERPRETED: tl.constexpr):
    """The sum over records of `u k'`, from `[records, BV]` float32 and `[records, keys]`, on tensor cores.

    Three bfloat16 hold every bit of a float32 between them: with bfloat16 keys products are exact, sums float32.
    """
    rows = tl.trans(weighted)
    if INTERPRETED or keys.dtype != tl.bfloat16:
        return tl.dot(rows, keys.to(tl.float32), input_precision="ieee")
    else:
        first = rows.to(tl.bfloat16)
        rest = rows - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(third, keys)
        total = tl.dot(second, keys, acc=total)
        return tl.dot(first, keys, acc=total)


@triton.jit
def fold_window(
    before, gain, own, key, key_norm, weighted, keys, WINDOW: tl.constexpr, BK: tl.constexpr, CHANNELS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The state after the last token of a window, in chunks: what was stored, the token's own write, the records'."""
    state = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        after = before[c] * (gain[c][None, :] if CHANNELS else gain)
        after += own[:, None] * (key[c].to(tl.float32) * key_norm)[None, :]
        if WINDOW > 1:
            after += folded(weighted, keys[c], INTERPRETED)
        state = state + (after,)
    return state


@triton.jit
def due_rows(slot_index, cursors, rows, WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """Which rows flush: how many, and the number of each among them (of any other row, 0), counted from 1."""
    index = tl.arange(0, ROWS)
    slot = tl.load(slot_index + index, mask=index < rows, other=-1)
    count = tl.load(cursors + slot, mask=slot >= 0, other=-1)
    due = ((slot >= 0) & (count == WINDOW - 1)).to(tl.int32)
    return tl.sum(due, axis=0), tl.cumsum(due, axis=0) * due


@triton.jit
def advance_cursors_kernel(slot_index, cursors, tokens, count, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Count the token that all layers have just read: one more record, or none after a flush."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_index + row, mask=row < count, other=-1).to(tl.int64)
    used = slot >= 0
    cursor = tl.load(cursors + slot, mask=used, other=0) + 1
    tl.store(cursors + slot, tl.where(cursor >= WINDOW, 0, cursor), mask=used)
    token = tl.load(tokens + slot, mask=used, other=0)
    tl.store(tokens + slot, token + 1, mask=used)
