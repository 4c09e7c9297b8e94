"""Records of a window in the decode kernels: decays between them, their keys, what they add up to; and the cursors."""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from replayssm.decode_chunks import fetch, to_chunks

READS_ONLY = tl.constexpr(1)
FLUSHES_ONLY = tl.constexpr(2)


@triton.jit
def later_decays(pointer, now, count, held, LP: tl.constexpr):
    """For each record the sum of the log-decays after it, the present token's included.

    Records below `held` are loaded and those below `count` counted. Each is summed from its own terms, never a
    difference of two sums, which one strong decay would cost their digits.
    """
    record = tl.arange(0, LP)
    following = tl.load(pointer + record + 1, mask=record + 1 < held, other=0.0)
    following = tl.where(record + 1 < count, following, 0.0)
    return tl.cumsum(following, axis=0, reverse=True) + now


@triton.jit
def record_chunk(
    keys_at, decays_at, now, record, count, NUMBER: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    CHANNELS: tl.constexpr, OF: tl.constexpr = 32,
):  # fmt: skip
    """Chunk `NUMBER` of the keys of all records; with a decay per channel, after what has decayed since."""
    CHUNK: tl.constexpr = OF if BK >= OF else BK
    place = NUMBER * CHUNK + tl.arange(0, CHUNK)
    where = record[:, None] * DK + place[None, :]
    keys = tl.load(keys_at + where, mask=(record < count)[:, None] & (place < DK)[None, :], other=0.0)
    if CHANNELS:
        after = (record + 1 < count)[:, None] & (place < DK)[None, :]
        following = tl.load(decays_at + where + DK, mask=after, other=0.0)
        keys = keys.to(tl.float32) * tl.exp(tl.cumsum(following, axis=0, reverse=True) + now[None, :])
    return keys


@triton.jit
def window_gain(
    decays_at, now, count, held, LP: tl.constexpr, WINDOW: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """What is left of the stored state once the present token has decayed it too: a number, or a vector in chunks."""
    record = tl.arange(0, LP)
    if CHANNELS:
        WIDTH: tl.constexpr = 32 if BK >= 32 else BK
        gain = ()
        for c in tl.static_range(BK // WIDTH):
            total = now[c].to(tl.float32)
            if WINDOW > 1:
                place = c * WIDTH + tl.arange(0, WIDTH)
                inside = (record < count)[:, None] & (place < DK)[None, :]
                total += tl.sum(tl.load(decays_at + record[:, None] * DK + place[None, :], mask=inside, other=0.0), 0)
            gain = gain + (tl.exp(total),)
        return gain
    elif WINDOW > 1:
        own = tl.load(decays_at + record, mask=record < held, other=0.0)
        return tl.exp(tl.sum(tl.where(record < count, own, 0.0), axis=0) + now)
    else:
        return tl.exp(now)


@triton.jit
def record_products(
    keys_at, key_at, key_step, query_at, query_step, held, LP: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The products of the keys of all records with the token's key and with its query, `[LP]` each.

    Products of bfloat16 vectors are exact, so tensor cores take them; sums are float32.
    """
    record = tl.arange(0, LP)
    place = tl.arange(0, BK)
    inside = (record < held)[:, None] & (place < DK)[None, :]
    keys = tl.load(keys_at + record[:, None] * DK + place[None, :], mask=inside, other=0.0)
    # Four of each, because tensor cores take no fewer than eight columns.
    of_key = (tl.arange(0, 8) < 4)[:, None]
    key_places, query_places = (key_at + place * key_step)[None, :], (query_at + place * query_step)[None, :]
    if key_at.dtype == query_at.dtype:
        where = tl.where(of_key, key_places, query_places)
        pairs = tl.trans(fetch(where, tl.broadcast_to((place < DK)[None, :], (8, BK)), BK != DK))
    else:
        real = (place < DK)[None, :]
        one, other = fetch(key_places, real, BK != DK), fetch(query_places, real, BK != DK)
        pairs = tl.trans(tl.where(of_key, one.to(tl.float32), other.to(tl.float32)))
    if INTERPRETED or keys.dtype != tl.bfloat16 or pairs.dtype != tl.bfloat16:
        total = tl.dot(keys.to(tl.float32), pairs.to(tl.float32), input_precision="ieee")
    else:
        total = tl.dot(keys, pairs)
    with_key, with_query = tl.split(tl.sum(tl.reshape(total, (LP, 2, 4)), axis=2))
    return with_key * 0.25, with_query * 0.25


@triton.jit
def record_chunks(
    keys_at, decays_at, now, record, count, DK: tl.constexpr, BK: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """All chunks of the keys of all records."""
    found = ()
    if CHANNELS or BK < 64:
        for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
            present = now[c].to(tl.float32) if CHANNELS else now
            found = found + (record_chunk(keys_at, decays_at, present, record, count, c, DK, BK, CHANNELS),)
    else:
        # Two at a time: loads of the shape of a tile's chunks would be given the layout of 16-bit keys, all of them.
        for c in tl.static_range(BK // 64):
            found = found + to_chunks(record_chunk(keys_at, decays_at, now, record, count, c, DK, BK, False, 64))
    return found


@triton.jit
def exact_product(rows, columns, INTERPRETED: tl.constexpr):
    """The product of a float32 and a bfloat16 matrix on tensor cores.

    Three bfloat16 hold every bit of a float32 between them, so products are exact and sums float32.
    """
    if INTERPRETED or columns.dtype != tl.bfloat16:
        return tl.dot(rows, columns.to(tl.float32), input_precision="ieee")
    else:
        first = rows.to(tl.bfloat16)
        rest = rows - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(third, columns)
        total = tl.dot(second, columns, acc=total)
        return tl.dot(first, columns, acc=total)


@triton.jit
def fold_records(state, weighted, keys, BK: tl.constexpr, INTERPRETED: tl.constexpr):
    """A decayed tile in chunks after the writes `[records, rows]` of a window along the records' keys."""
    rows = tl.trans(weighted)
    folded = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        folded = folded + (state[c] + exact_product(rows, keys[c], INTERPRETED),)
    return folded


@triton.jit
def record_rows(
    inputs_at, input_step, records_at, rows, count, held, DV: tl.constexpr, LP: tl.constexpr, MASKED: tl.constexpr,
    EAGER: tl.constexpr,
):  # fmt: skip
    """The token's values for the rows of a tile, and the values or writes `[records, rows]` of the window so far."""
    record = tl.arange(0, LP)
    there = rows < DV
    where = records_at + record[:, None] * DV + rows[None, :]
    past = tl.load(where, mask=(record < held)[:, None] & there[None, :], other=0.0)
    if EAGER:
        past = tl.where((record < count)[:, None], past, 0.0)
    return fetch(inputs_at + rows * input_step, there, MASKED), past


@triton.jit
def due_rows(slot_index, cursors, rows, WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """Which rows flush: how many, and the number of each among them (of any other row, 0), counted from 1."""
    index = tl.arange(0, ROWS)
    slot = tl.load(slot_index + index, mask=index < rows, other=-1)
    count = tl.load(cursors + slot, mask=slot >= 0, other=-1)
    due = ((slot >= 0) & (count == WINDOW - 1)).to(tl.int32)
    return tl.sum(due, axis=0), tl.cumsum(due, axis=0) * due


@triton.jit
def work_item(
    item, first_item, slot_index, place, HEADS: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Which part of which head of which row, and its slot; `place` is that of `due_rows`, of flushes only."""
    # The interpreter counts in Python's integers, which are no tensors.
    number = item + first_item * 0
    row = (number // (SPLITS * HEADS)).to(tl.int64)
    if STEPS == FLUSHES_ONLY:
        row = tl.sum(tl.where(place == row + 1, tl.arange(0, ROWS), 0), axis=0).to(tl.int64)
    return number % SPLITS, (number // SPLITS) % HEADS, row, tl.load(slot_index + row).to(tl.int64)


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
