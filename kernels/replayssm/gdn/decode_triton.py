"""One token of a gated delta rule per sequence, in Triton: read through the records, append, flush.

One program works on `tiles` tiles of one value head of one sequence. A value row depends on no other, so its writes
`u`, its output and (once per window, with a shared checkpoint) its flush come from a single pass over the stored state.
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
    state, write, now, total, own_key, keys_at, norms_at, decays_at, writes_at, rows, there, count,
    DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
    CHANNELS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """The state after the last token of a window, from the writes that the records hold, newest first."""
    channel = tl.arange(0, BK)
    real = channel < DK
    if CHANNELS:
        state = state * tl.exp(total)[None, :]
    else:
        state = state * tl.exp(total)
    state += write[:, None] * own_key[None, :]
    later = now
    for back in tl.range(0, count):
        j = count - 1 - back
        one = fetch(keys_at + j * DK + channel, real, BK != DK).to(tl.float32)
        if NORMALISE:
            one = one * tl.load(norms_at + j)
        u = fetch(writes_at + j * DV + rows, there, MASKED)
        one = one * tl.exp(later)
        state += u[:, None] * one[None, :]
        if CHANNELS:
            later += fetch(decays_at + j * DK + channel, real, BK != DK)
        else:
            later += tl.load(decays_at + j)
    return state


@triton.jit
def delta_token(state, value, strength, log_decay, key, CHANNELS: tl.constexpr):
    """The recurrence itself."""
    if CHANNELS:
        state = state * tl.exp(log_decay)[None, :]
    else:
        state = state * tl.exp(log_decay)
    write = strength * (value - tl.sum(state * key[None, :], axis=1))
    return state + write[:, None] * key[None, :]


@triton.jit
def replay_window(
    state, keys_at, norms_at, decays_at, values_at, betas_at, rows, there, count,
    DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
    CHANNELS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """The state after all records of a full window, their writes computed anew from this state."""
    channel = tl.arange(0, BK)
    real = channel < DK
    for j in tl.range(0, count):
        one = fetch(keys_at + j * DK + channel, real, BK != DK).to(tl.float32)
        if NORMALISE:
            one = one * tl.load(norms_at + j)
        value = fetch(values_at + j * DV + rows, there, MASKED).to(tl.float32)
        if CHANNELS:
            log_decay = fetch(decays_at + j * DK + channel, real, BK != DK)
        else:
            log_decay = tl.load(decays_at + j)
        state = delta_token(state, value, tl.load(betas_at + j), log_decay, one, CHANNELS)
    return state


@triton.jit
def delta_decode_kernel(
    query, key, value, log_decay, beta, out, slot_index, cursors, tokens, sequences, philox,
    read_words, read_payload, read_scales, read_head_scales, payload, scales, head_scales,
    key_records, norm_records, write_records, decay_records, value_records, beta_records,
    query_row, query_head, query_step, key_row, key_head, key_step, value_row, value_head, value_step,
    decay_row, decay_head, decay_step, beta_row, beta_head, out_row, out_head, out_step,
    scale, epsilon, read_divisor, divisor, tiles,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    WINDOW: tl.constexpr, LP: tl.constexpr, SEPARATE: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr,
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
    k = fetch(key + row * key_row + of_key * key_head + channel * key_step, real, BK != DK)
    raw_key = k
    k = k.to(tl.float32)
    q_norm = scale
    k_norm = 1.0
    if NORMALISE:
        q_norm = scale * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(q * q, axis=0) + epsilon))
        k_norm = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(k * k, axis=0) + epsilon))
        k = k * k_norm
    q = q * q_norm
    own_score = tl.sum(q * k, axis=0)
    strength = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    decay_at = log_decay + row * decay_row + head * decay_head
    if CHANNELS:
        now = fetch(decay_at + channel * decay_step, real, BK != DK).to(tl.float32)
        decays_at = decay_records + at * (WINDOW * DK)
    else:
        now = tl.load(decay_at).to(tl.float32)
        decays_at = decay_records + at * WINDOW
    keys_at = key_records + (slot * KEY_HEADS + of_key) * (WINDOW * DK)
    norms_at = norm_records + (slot * KEY_HEADS + of_key) * WINDOW

    # What each record contributes to this token: `overlap` along its key, `scores` along its query.
    total = now
    if WINDOW > 1:
        record = tl.arange(0, LP)
        past = record < count
        inside = past[:, None] & real[None, :]
        keys = tl.load(keys_at + record[:, None] * DK + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        if CHANNELS:
            where = decays_at + record[:, None] * DK + channel[None, :]
            after = (record + 1 < count)[:, None] & real[None, :]
            following = tl.load(where + DK, mask=after, other=0.0)
            total = now + tl.sum(tl.load(where, mask=inside, other=0.0), axis=0)
            keys = keys * tl.exp(tl.cumsum(following, axis=0, reverse=True) + now[None, :])
            weight = tl.full((LP,), 1.0, tl.float32)
        else:
            later, total = later_decays(decays_at, now, count, LP)
            weight = tl.exp(later)
        if NORMALISE:
            weight = weight * tl.load(norms_at + record, mask=past, other=0.0)
        overlap = tl.sum(keys * k[None, :], axis=1) * weight
        scores = tl.sum(keys * q[None, :], axis=1) * weight
    k_now = k * tl.exp(total)
    q_now = q * tl.exp(total)

    value_at = value + row * value_row + head * value_head
    out_at = out + row * out_row + head * out_head
    writes_at = write_records + at * (WINDOW * DV)
    values_at = value_records + at * (WINDOW * DV)
    betas_at = beta_records + at * WINDOW
    for tile in tl.range(0, tiles):
        rows = first + tile * BV
        there = rows < DV
        raw_value = fetch(value_at + rows * value_step, there, MASKED)
        v = raw_value.to(tl.float32)
        here, here_scales = codes, stored
        if tile + 1 < tiles:
            codes, stored = fetch_tile(
                words_at, read_scales_at, rows + BV, rows + BV < DV, MASKED, DK, BK, READ_GROUP, READ_SCALE,
                READ_TILE_ROWS, PACKED, WORDS,
            )  # fmt: skip
        of_head = read_head_scales + at
        recalled = read_tile(here, here_scales, of_head, k_now, READ_ELEMENT, READ_SCALE, PACKED, WORDS)
        y = read_tile(here, here_scales, of_head, q_now, READ_ELEMENT, READ_SCALE, PACKED, WORDS)
        if WINDOW > 1:
            written = past[:, None] & there[None, :]
            u = tl.load(writes_at + record[:, None] * DV + rows[None, :], mask=written, other=0.0)
            recalled += tl.sum(u * overlap[:, None], axis=0)
            y += tl.sum(u * scores[:, None], axis=0)
        write = strength * (v - recalled)
        y += own_score * write
        if flush:
            token = tl.load(tokens + slot)
            sequence = tl.load(sequences + slot)
            if SEPARATE:
                state = load_state(
                    payload + at * (DV * WIDTH), scales + at * SCALES, head_scales + at, rows, there, DK, BK, ELEMENT,
                    SCALE, TILE_ROWS, GROUP,
                )  # fmt: skip
                state = replay_window(
                    state, keys_at, norms_at, decays_at, values_at, betas_at, rows, there, count, DV, DK, BK, MASKED,
                    CHANNELS, NORMALISE,
                )  # fmt: skip
                state = delta_token(state, v, strength, now, k, CHANNELS)
                y = tl.sum(state * q[None, :], axis=1)
                store_tile(
                    state, philox, sequence, token, read_at, read_scales_at, read_head_scales + at, read_divisor, head,
                    rows, there, 1, MASKED, DV, DK, READ_ELEMENT, READ_SCALE, READ_TILE_ROWS, READ_GROUP,
                    READ_STOCHASTIC,
                )  # fmt: skip
            else:
                if WORDS:
                    state = load_state(
                        read_at, read_scales_at, of_head, rows, there, DK, BK, READ_ELEMENT, READ_SCALE, READ_TILE_ROWS,
                        READ_GROUP,
                    )  # fmt: skip
                else:
                    low, high = decode_tile(here, here_scales, of_head, READ_ELEMENT, READ_SCALE, PACKED)
                    state = whole_tile(low, high, BV, BK, PACKED)
                state = fold_window(
                    state, write, now, total, k, keys_at, norms_at, decays_at,
                    writes_at, rows, there, count, DV, DK, BK, MASKED, CHANNELS, NORMALISE,
                )  # fmt: skip
            store_tile(
                state, philox, sequence, token, payload + at * (DV * WIDTH), scales + at * SCALES, head_scales + at,
                divisor, head, rows, there, 0, MASKED, DV, DK, ELEMENT, SCALE, TILE_ROWS, GROUP, STOCHASTIC,
            )  # fmt: skip
        else:
            tl.store(writes_at + count * DV + rows, write, mask=there)
            if SEPARATE:
                tl.store(values_at + count * DV + rows, raw_value, mask=there)
        tl.store(out_at + rows * out_step, y.to(out.dtype.element_ty), mask=there)

    if WINDOW > 1:
        if split == 0 and not flush:
            if CHANNELS:
                tl.store(decays_at + count * DK + channel, now, mask=real)
            else:
                tl.store(decays_at + count, now)
            if SEPARATE:
                tl.store(betas_at + count, strength)
            if head % (HEADS // KEY_HEADS) == 0:
                tl.store(keys_at + count * DK + channel, raw_key, mask=real)
                if NORMALISE:
                    tl.store(norms_at + count, k_norm)
