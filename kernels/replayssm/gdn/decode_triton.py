"""One token of a gated delta rule per sequence, in Triton: read through the records, append, flush.

One program works on `BV` value rows of one head of one sequence. A value row depends on no other, so its writes `u`,
its output and (once per window, with a shared checkpoint) its flush come from a single pass over the stored state.
Where a flush needs many more registers than a read (scaled formats), two launches share the work: one that skips the
sequences which flush, and one that finds them.
"""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from replayssm.decode_device import (
    FLUSHES_ONLY,
    MATRIX,
    READS_ONLY,
    UNROLL,
    WIDE,
    due_rows,
    fetch,
    fetch_tile,
    later_decays,
    load_wide,
    matrix_products,
    read_tile,
    store_tile,
    wide,
    wide_columns,
    wide_product,
)
from replayssm.formats.triton_bits import E2M1, decode
from replayssm.formats.triton_ops import SCALE_NONE


@triton.jit
def fold_window(
    state, write, now, total, own_key, keys_at, norms_at, decays_at, writes_at, rows, there, WINDOW: tl.constexpr,
    DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
    CHANNELS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """The state after the last token of a window, from the writes that the records hold, newest first."""
    column = wide_columns(BK)
    real = column < DK
    state = state * (wide(tl.exp(total)) if CHANNELS else tl.exp(total)) + write[:, None, None] * wide(own_key)
    later = wide(now) if CHANNELS else now
    for back in tl.range(0, WINDOW - 1, loop_unroll_factor=UNROLL):
        j = WINDOW - 2 - back
        one = fetch(keys_at + j * DK + column, real, BK != DK).to(tl.float32)
        u = fetch(writes_at + j * DV + rows, there, MASKED)
        if CHANNELS:
            one = one * tl.exp(later)
            if NORMALISE:
                u = u * tl.load(norms_at + j)
            later += fetch(decays_at + j * DK + column, real, BK != DK)
        else:
            weight = tl.exp(later)
            if NORMALISE:
                weight = weight * tl.load(norms_at + j)
            u = u * weight
            later += tl.load(decays_at + j)
        state += u[:, None, None] * one
    return state


@triton.jit
def delta_token(state, value, strength, log_decay, key, CHANNELS: tl.constexpr):
    """The recurrence itself, for a WIDE state and key."""
    state = state * tl.exp(log_decay)
    write = strength * (value - wide_product(state, key))
    return state + write[:, None, None] * key


@triton.jit
def replay_window(
    state, keys_at, norms_at, decays_at, values_at, betas_at, rows, there, WINDOW: tl.constexpr,
    DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
    CHANNELS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """The state after all records of a full window, their writes computed anew from this state."""
    column = wide_columns(BK)
    real = column < DK
    for j in tl.range(0, WINDOW - 1, loop_unroll_factor=UNROLL):
        one = fetch(keys_at + j * DK + column, real, BK != DK).to(tl.float32)
        if NORMALISE:
            one = one * tl.load(norms_at + j)
        value = fetch(values_at + j * DV + rows, there, MASKED).to(tl.float32)
        if CHANNELS:
            log_decay = fetch(decays_at + j * DK + column, real, BK != DK)
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
    scale, epsilon, read_divisor, divisor, count_rows,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    WINDOW: tl.constexpr, LP: tl.constexpr, SEPARATE: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr,
    BV: tl.constexpr, SPLITS: tl.constexpr, MASKED: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    READ_ELEMENT: tl.constexpr, READ_SCALE: tl.constexpr, READ_TILE_ROWS: tl.constexpr, READ_GROUP: tl.constexpr,
    READ_STOCHASTIC: tl.constexpr, READ_SCALES: tl.constexpr, WORDS: tl.constexpr, FORM: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr, SCALES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`replayssm.decode.decode_step` says what it computes, `replayssm.slots` what the tensors are."""
    PACKED: tl.constexpr = READ_ELEMENT == E2M1
    READ_WIDTH: tl.constexpr = DK // 2 if PACKED else DK
    WIDTH: tl.constexpr = DK // 2 if ELEMENT == E2M1 else DK
    READS: tl.constexpr = STEPS != FLUSHES_ONLY or not SEPARATE
    REPLAYS: tl.constexpr = SEPARATE and STEPS != READS_ONLY
    first_item = tl.program_id(0)
    items = first_item + 1
    if STEPS == FLUSHES_ONLY:
        due, place = due_rows(slot_index, cursors, count_rows, WINDOW, ROWS)
        items = due * (HEADS * SPLITS)
    for item in tl.range(first_item, items, tl.num_programs(0), num_stages=1):
        # The interpreter counts in Python's integers, which are no tensors.
        number = item + first_item * 0
        split = number % SPLITS
        head = (number // SPLITS) % HEADS
        row = (number // (SPLITS * HEADS)).to(tl.int64)
        if STEPS == FLUSHES_ONLY:
            row = tl.sum(tl.where(place == row + 1, tl.arange(0, ROWS), 0), axis=0).to(tl.int64)
        slot = tl.load(slot_index + row).to(tl.int64)
        if slot >= 0:
            of_key = head // (HEADS // KEY_HEADS)
            at = slot * HEADS + head
            read_at = read_payload + at * (DV * READ_WIDTH)
            WORD_WIDTH: tl.constexpr = READ_WIDTH // 4 if WORDS else READ_WIDTH
            read_scales_at = read_scales + at * READ_SCALES
            of_head = read_head_scales + at
            rows = split * BV + tl.arange(0, BV)
            there = rows < DV
            # Its address is known before the cursor is: the state sets out before everything else.
            if READS:
                codes, stored = fetch_tile(
                    read_words + at * (DV * WORD_WIDTH), read_scales_at, rows, there, MASKED, DK, BK, READ_GROUP,
                    READ_SCALE, READ_TILE_ROWS, PACKED, WORDS, FORM,
                )  # fmt: skip
            count = 0
            if WINDOW > 1:
                count = tl.load(cursors + slot)
            flush = count == WINDOW - 1

            channel = tl.arange(0, BK)
            real = channel < DK
            query_at = query + row * query_row + of_key * query_head
            key_at = key + row * key_row + of_key * key_head
            q = fetch(query_at + channel * query_step, real, BK != DK).to(tl.float32)
            raw_key = fetch(key_at + channel * key_step, real, BK != DK)
            k = raw_key.to(tl.float32)
            q_norm = scale
            k_norm = 1.0
            if NORMALISE:
                q_norm = scale * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(q * q, axis=0) + epsilon))
                k_norm = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(k * k, axis=0) + epsilon))
                k = k * k_norm
            q = q * q_norm
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
            raw_value = fetch(value + row * value_row + head * value_head + rows * value_step, there, MASKED)
            v = raw_value.to(tl.float32)
            out_at = out + row * out_row + head * out_head + rows * out_step
            writes_at = write_records + at * (WINDOW * DV)
            values_at = value_records + at * (WINDOW * DV)
            betas_at = beta_records + at * WINDOW

            # A flush of a separate checkpoint looks at nothing but the copy that carries the recurrence.
            if READS:
                through = True
                if SEPARATE or STEPS == READS_ONLY:
                    through = count != WINDOW - 1
                if through:
                    own_score = tl.sum(q * k, axis=0)
                    total = now
                    if WINDOW > 1:
                        record = tl.arange(0, LP)
                        past = record < count
                        inside = past[:, None] & real[None, :]
                        written = past[:, None] & there[None, :]
                        keys = tl.load(keys_at + record[:, None] * DK + channel[None, :], mask=inside, other=0.0)
                        u = tl.load(writes_at + record[:, None] * DV + rows[None, :], mask=written, other=0.0)
                        keys = keys.to(tl.float32)
                        # What each record contributes to this token: `overlap` along its key, `scores` along its query.
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
                    if FORM == MATRIX:
                        recalled, y = matrix_products(
                            codes, stored, of_head, key_at, query_at, key_step, query_step, DK, BK, READ_ELEMENT,
                            READ_SCALE, INTERPRETED,
                        )  # fmt: skip
                        recalled = recalled * (k_norm * tl.exp(total))
                        y = y * (q_norm * tl.exp(total))
                    else:
                        gain = tl.exp(total)
                        recalled = read_tile(
                            codes, stored, of_head, k * gain, READ_ELEMENT, READ_SCALE, PACKED, WORDS, FORM
                        )
                        y = read_tile(codes, stored, of_head, q * gain, READ_ELEMENT, READ_SCALE, PACKED, WORDS, FORM)
                    if WINDOW > 1:
                        recalled += tl.sum(u * overlap[:, None], axis=0)
                        y += tl.sum(u * scores[:, None], axis=0)
                    write = strength * (v - recalled)
                    y += own_score * write
                    tl.store(out_at, y.to(out.dtype.element_ty), mask=there)
                    if not SEPARATE and STEPS != READS_ONLY:
                        if flush:
                            if FORM != WIDE or READ_SCALE != SCALE_NONE:
                                state = load_wide(
                                    read_at, read_scales_at, of_head, rows, there, MASKED, DK, BK, READ_ELEMENT,
                                    READ_SCALE, READ_TILE_ROWS, READ_GROUP,
                                )  # fmt: skip
                            else:
                                state = decode(codes, READ_ELEMENT)
                            state = fold_window(
                                state, write, now, total, k, keys_at, norms_at, decays_at, writes_at, rows, there,
                                WINDOW, DV, DK, BK, MASKED, CHANNELS, NORMALISE,
                            )  # fmt: skip
                            store_tile(
                                state, philox, tl.load(sequences + slot), tl.load(tokens + slot),
                                payload + at * (DV * WIDTH), scales + at * SCALES, head_scales + at, divisor, head,
                                rows, there, 0, MASKED, DV, DK, ELEMENT, SCALE, TILE_ROWS, GROUP, STOCHASTIC,
                            )  # fmt: skip
                    if WINDOW > 1:
                        if not flush:
                            tl.store(writes_at + count * DV + rows, write, mask=there)
                            if SEPARATE:
                                tl.store(values_at + count * DV + rows, raw_value, mask=there)
                            if split == 0:
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
            if REPLAYS:
                if flush:
                    state = load_wide(
                        payload + at * (DV * WIDTH), scales + at * SCALES, head_scales + at, rows, there, MASKED, DK,
                        BK, ELEMENT, SCALE, TILE_ROWS, GROUP,
                    )  # fmt: skip
                    state = replay_window(
                        state, keys_at, norms_at, decays_at, values_at, betas_at, rows, there, WINDOW, DV, DK, BK,
                        MASKED, CHANNELS, NORMALISE,
                    )  # fmt: skip
                    state = delta_token(state, v, strength, wide(now) if CHANNELS else now, wide(k), CHANNELS)
                    y = wide_product(state, wide(q))
                    tl.store(out_at, y.to(out.dtype.element_ty), mask=there)
                    token = tl.load(tokens + slot)
                    sequence = tl.load(sequences + slot)
                    store_tile(
                        state, philox, sequence, token, read_at, read_scales_at, of_head, read_divisor, head, rows,
                        there, 1, MASKED, DV, DK, READ_ELEMENT, READ_SCALE, READ_TILE_ROWS, READ_GROUP, READ_STOCHASTIC,
                    )  # fmt: skip
                    store_tile(
                        state, philox, sequence, token, payload + at * (DV * WIDTH), scales + at * SCALES,
                        head_scales + at, divisor, head, rows, there, 0, MASKED, DV, DK, ELEMENT, SCALE, TILE_ROWS,
                        GROUP, STOCHASTIC,
                    )  # fmt: skip
