"""One token of Mamba-2 per sequence, in Triton: read through the records, append, flush.

One program works on `tiles` tiles of one value head of one sequence. Records keep the inputs as they came (`x`, `B`)
and the float32 step size and log-decay of each token, so nothing is lost and 16-bit inputs cost 16 bits.
"""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from replayssm.decode_device import (
    decode_tile,
    fetch,
    fetch_tile,
    later_decays,
    read_tile,
    store_tile,
    whole_tile,
)
from replayssm.formats.triton_bits import E2M1
from replayssm.formats.triton_ops import load_state


@triton.jit
def fold_window(
    state, write, now, total, own_key, keys_at, decays_at, steps_at, values_at, rows, there, count,
    DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The state after the last token of a window, newest record first."""
    channel = tl.arange(0, BK)
    state = state * tl.exp(total) + write[:, None] * own_key[None, :]
    later = now
    for back in tl.range(0, count):
        j = count - 1 - back
        one = fetch(keys_at + j * DK + channel, channel < DK, BK != DK).to(tl.float32)
        x = fetch(values_at + j * DV + rows, there, MASKED).to(tl.float32)
        x = x * (tl.load(steps_at + j) * tl.exp(later))
        state += x[:, None] * one[None, :]
        later += tl.load(decays_at + j)
    return state


@triton.jit
def mamba2_decode_kernel(
    query, key, value, dt, dt_bias, decay_rate, skip, out, slot_index, cursors, tokens, sequences, philox,
    read_words, read_payload, read_scales, read_head_scales, payload, scales, head_scales,
    key_records, decay_records, step_records, value_records,
    query_row, query_head, query_step, key_row, key_head, key_step, value_row, value_head, value_step,
    dt_row, dt_head, out_row, out_head, out_step,
    smallest_step, largest_step, read_divisor, divisor, tiles,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    WINDOW: tl.constexpr, LP: tl.constexpr, SEPARATE: tl.constexpr,
    BV: tl.constexpr, SPLITS: tl.constexpr, MASKED: tl.constexpr,
    READ_ELEMENT: tl.constexpr, READ_SCALE: tl.constexpr, READ_TILE_ROWS: tl.constexpr, READ_GROUP: tl.constexpr,
    READ_STOCHASTIC: tl.constexpr, READ_SCALES: tl.constexpr, WORDS: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """`replayssm.decode.decode_step` says what it computes, `replayssm.slots` what the tensors are."""
    PACKED: tl.constexpr = READ_ELEMENT == E2M1
    READ_WIDTH: tl.constexpr = DK // 2 if PACKED else DK
    WIDTH: tl.constexpr = DK // 2 if ELEMENT == E2M1 else DK
    pid = tl.program_id(0)
    split = pid % SPLITS
    head = (pid // SPLITS) % HEADS
    row = (pid // (SPLITS * HEADS)).to(tl.int64)
    slot = tl.load(slot_index + row).to(tl.int64)
    if slot < 0:
        return
    of_key = head // (HEADS // KEY_HEADS)
    at = slot * HEADS + head
    read_at = read_payload + at * (DV * READ_WIDTH)
    WORD_WIDTH: tl.constexpr = READ_WIDTH // 4 if WORDS else READ_WIDTH
    words_at = read_words + at * (DV * WORD_WIDTH)
    read_scales_at = read_scales + at * READ_SCALES
    first = split * (tiles * BV) + tl.arange(0, BV)
    # Its address is known before the cursor is: the first tile sets out before everything else.
    codes, stored = fetch_tile(
        words_at, read_scales_at, first, first < DV, MASKED, DK, BK, READ_GROUP, READ_SCALE, READ_TILE_ROWS,
        PACKED, WORDS,
    )  # fmt: skip
    if WINDOW > 1:
        count = tl.load(cursors + slot)
        flush = count == WINDOW - 1
    else:
        count = 0
        flush = True

    channel = tl.arange(0, BK)
    real = channel < DK
    q = fetch(query + row * query_row + of_key * query_head + channel * query_step, real, BK != DK).to(tl.float32)
    raw_key = fetch(key + row * key_row + of_key * key_head + channel * key_step, real, BK != DK)
    k = raw_key.to(tl.float32)
    step = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32) + tl.load(dt_bias + head)
    # softplus; beyond 20 it is the identity to float32. log(1 + e) is taken as atanh's series would: by its ratio form.
    grown = tl.exp(tl.minimum(step, 20.0))
    sum_ = 1.0 + grown
    # Kahan's log1p: the rounding of 1 + e is divided out again.
    soft = tl.where(sum_ == 1.0, grown, tl.log(sum_) * tl.div_rn(grown, tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
    step = tl.where(step > 20.0, step, soft)
    step = tl.minimum(tl.maximum(step, smallest_step), largest_step)
    now = step * tl.load(decay_rate + head)
    own_score = tl.sum(q * k, axis=0) * step + tl.load(skip + head)
    keys_at = key_records + (slot * KEY_HEADS + of_key) * (WINDOW * DK)
    decays_at = decay_records + at * WINDOW
    steps_at = step_records + at * WINDOW

    total = now
    if WINDOW > 1:
        record = tl.arange(0, LP)
        past = record < count
        inside = past[:, None] & real[None, :]
        keys = tl.load(keys_at + record[:, None] * DK + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        later, total = later_decays(decays_at, now, count, LP)
        weight = tl.exp(later) * tl.load(steps_at + record, mask=past, other=0.0)
        scores = tl.sum(keys * q[None, :], axis=1) * weight
    q_now = q * tl.exp(total)

    value_at = value + row * value_row + head * value_head
    out_at = out + row * out_row + head * out_head
    values_at = value_records + at * (WINDOW * DV)
    for tile in tl.range(0, tiles):
        rows = first + tile * BV
        there = rows < DV
        raw_value = fetch(value_at + rows * value_step, there, MASKED)
        x = raw_value.to(tl.float32)
        here, here_scales = codes, stored
        if tile + 1 < tiles:
            codes, stored = fetch_tile(
                words_at, read_scales_at, rows + BV, rows + BV < DV, MASKED, DK, BK, READ_GROUP, READ_SCALE,
                READ_TILE_ROWS, PACKED, WORDS,
            )  # fmt: skip
        of_head = read_head_scales + at
        y = read_tile(here, here_scales, of_head, q_now, READ_ELEMENT, READ_SCALE, PACKED, WORDS)
        if WINDOW > 1:
            written = past[:, None] & there[None, :]
            u = tl.load(values_at + record[:, None] * DV + rows[None, :], mask=written, other=0.0).to(tl.float32)
            y += tl.sum(u * scores[:, None], axis=0)
        y += own_score * x
        if flush:
            token = tl.load(tokens + slot)
            sequence = tl.load(sequences + slot)
            if SEPARATE:
                state = load_state(
                    payload + at * (DV * WIDTH), scales + at * SCALES, head_scales + at, rows, there, DK, BK, ELEMENT,
                    SCALE, TILE_ROWS, GROUP,
                )  # fmt: skip
            elif WORDS:
                state = load_state(
                    read_at, read_scales_at, of_head, rows, there, DK, BK, READ_ELEMENT, READ_SCALE, READ_TILE_ROWS,
                    READ_GROUP,
                )  # fmt: skip
            else:
                low, high = decode_tile(here, here_scales, of_head, READ_ELEMENT, READ_SCALE, PACKED)
                state = whole_tile(low, high, BV, BK, PACKED)
            state = fold_window(
                state, x * step, now, total, k, keys_at, decays_at, steps_at, values_at, rows, there, count, DV, DK,
                BK, MASKED,
            )  # fmt: skip
            if SEPARATE:
                y = tl.sum(state * q[None, :], axis=1) + tl.load(skip + head) * x
                store_tile(
                    state, philox, sequence, token, read_at, read_scales_at, read_head_scales + at, read_divisor, head,
                    rows, there, 1, MASKED, DV, DK, READ_ELEMENT, READ_SCALE, READ_TILE_ROWS, READ_GROUP,
                    READ_STOCHASTIC,
                )  # fmt: skip
            store_tile(
                state, philox, sequence, token, payload + at * (DV * WIDTH), scales + at * SCALES, head_scales + at,
                divisor, head, rows, there, 0, MASKED, DV, DK, ELEMENT, SCALE, TILE_ROWS, GROUP, STOCHASTIC,
            )  # fmt: skip
        else:
            tl.store(values_at + count * DV + rows, raw_value, mask=there)
        tl.store(out_at + rows * out_step, y.to(out.dtype.element_ty), mask=there)

    if WINDOW > 1:
        if split == 0 and not flush:
            tl.store(decays_at + count, now)
            tl.store(steps_at + count, step)
            if head % (HEADS // KEY_HEADS) == 0:
                tl.store(keys_at + count * DK + channel, raw_key, mask=real)
