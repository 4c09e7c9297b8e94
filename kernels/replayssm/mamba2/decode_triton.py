"""One token of Mamba-2 per sequence, in Triton: read through the records, append, flush.

One program works on `BV` value rows of one head of one sequence. Records keep the inputs as they came (`x`, `B`)
and the float32 step size and log-decay of each token, so nothing is lost and 16-bit inputs cost 16 bits.
"""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.decode_chunks import (
    chunk_product,
    chunks,
    decayed_chunks,
    fetch,
    inner_product,
    written,
)
from replayssm.decode_records import (
    FLUSHES_ONLY,
    READS_ONLY,
    due_rows,
    fold_records,
    later_decays,
    record_chunks,
    record_products,
    record_rows,
    window_gain,
    work_item,
)
from replayssm.decode_tiles import (
    MATRIX,
    WIDE,
    fetch_tile,
    load_tile,
    read_tile,
    store_again,
    store_copies,
)
from replayssm.decode_words import (
    matrix_products,
    vector_pairs,
)
from replayssm.formats.triton_bits import E2M1

# A step size that is no number must not come out as one: minima and maxima leave it out unless told otherwise.
NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def mamba2_rows(
    codes, stored, of_head, asked, gain, score, own_score, raw_value, past, values_at, out_at, out_step, rows, count,
    DV: tl.constexpr, BK: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr,
    WORDS: tl.constexpr, FORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The outputs and the records of the rows of a fetched tile."""
    there = rows < DV
    u = past.to(tl.float32)
    if FORM == MATRIX:
        _, y = matrix_products(codes, stored, of_head, asked, BK, ELEMENT, SCALE, INTERPRETED)
    else:
        y = read_tile(codes, stored, of_head, asked, BK, ELEMENT, SCALE, PACKED, WORDS, FORM)
    y = y * gain + tl.sum(u * score[:, None], axis=0)
    y += own_score * raw_value.to(tl.float32)
    tl.store(out_at + rows * out_step, y.to(out_at.dtype.element_ty), mask=there)
    tl.store(values_at + count * DV + rows, raw_value, mask=there)


@triton.jit(do_not_specialize=["count_rows"])
def mamba2_decode_kernel(
    query, key, value, dt, dt_bias, decay_rate, skip, out, slot_index, cursors, tokens, sequences, philox,
    read_words, read_payload, read_scales, read_head_scales, payload, scales, head_scales,
    key_records, decay_records, step_records, value_records,
    query_row, query_head, query_step, key_row, key_head, key_step, value_row, value_head, value_step,
    dt_row, dt_head, out_row, out_head, out_step,
    smallest_step, largest_step, read_divisor, divisor, count_rows,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    WINDOW: tl.constexpr, LP: tl.constexpr, SEPARATE: tl.constexpr,
    BV: tl.constexpr, SPLITS: tl.constexpr, MASKED: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    EAGER: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    READ_ELEMENT: tl.constexpr, READ_SCALE: tl.constexpr, READ_TILE_ROWS: tl.constexpr, READ_GROUP: tl.constexpr,
    READ_STOCHASTIC: tl.constexpr, READ_SCALES: tl.constexpr, WORDS: tl.constexpr, FORM: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr, SCALES: tl.constexpr, AGAIN: tl.constexpr, INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`replayssm.decode.decode_step` says what it computes, `replayssm.slots` what the tensors are."""
    PACKED: tl.constexpr = READ_ELEMENT == E2M1
    READ_WIDTH: tl.constexpr = DK // 2 if PACKED else DK
    WIDTH: tl.constexpr = DK // 2 if ELEMENT == E2M1 else DK
    WORD_WIDTH: tl.constexpr = READ_WIDTH // 4 if WORDS else READ_WIDTH
    READS: tl.constexpr = WINDOW > 1 and STEPS != FLUSHES_ONLY
    FLUSHES: tl.constexpr = STEPS != READS_ONLY
    if EARLY:
        # The kernel before has to be done with all that is read here; the next one may be set up meanwhile.
        gdc_wait()
        gdc_launch_dependents()
    first_item = tl.program_id(0)
    items = first_item + 1
    place = first_item
    if STEPS == FLUSHES_ONLY:
        due, place = due_rows(slot_index, cursors, count_rows, WINDOW, ROWS)
        items = due * (HEADS * SPLITS)
    for item in tl.range(first_item, items, tl.num_programs(0), num_stages=1):
        split, head, row, slot = work_item(item, first_item, slot_index, place, HEADS, SPLITS, STEPS, ROWS)
        # Everything that does not depend on the slot sets out beside it.
        of_key = head // (HEADS // KEY_HEADS)
        query_at = query + row * query_row + of_key * query_head
        key_at = key + row * key_row + of_key * key_head
        step = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32) + tl.load(dt_bias + head)
        # softplus; beyond 20 it is the identity to float32. log(1 + e) by its ratio form.
        grown = tl.exp(tl.minimum(step, 20.0, propagate_nan=NAN))
        sum_ = 1.0 + grown
        # Kahan's log1p: the rounding of 1 + e is divided out again.
        soft = tl.where(sum_ == 1.0, grown, tl.log(sum_) * tl.div_rn(grown, tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
        step = tl.where(step > 20.0, step, soft)
        step = tl.maximum(step, smallest_step, propagate_nan=NAN)
        step = tl.minimum(step, largest_step, propagate_nan=NAN)
        now = step * tl.load(decay_rate + head)
        kept = tl.load(skip + head)
        value_at = value + row * value_row + head * value_head
        out_at = out + row * out_row + head * out_head
        if slot >= 0:
            at = slot * HEADS + head
            words_at = read_words + at * (DV * WORD_WIDTH)
            read_at = read_payload + at * (DV * READ_WIDTH)
            read_scales_at = read_scales + at * READ_SCALES
            of_head = read_head_scales + at
            main_at = payload + at * (DV * WIDTH)
            lanes = tl.arange(0, BV)
            if READS and STAGES == 1:
                # Its address is known before the cursor is, so the first tile sets out before everything else.
                rows = split * (TILES * BV) + lanes
                codes, stored = fetch_tile(
                    words_at, read_scales_at, rows, rows < DV, MASKED, DK, BK, READ_GROUP, READ_SCALE, READ_TILE_ROWS,
                    PACKED, WORDS, FORM,
                )  # fmt: skip
            count = 0
            if WINDOW > 1:
                count = tl.load(cursors + slot)
            # Loads of records that do not wait for the cursor: more bytes, and one trip to memory less.
            held = WINDOW if EAGER else count
            keys_at = key_records + (slot * KEY_HEADS + of_key) * (WINDOW * DK)
            decays_at = decay_records + at * WINDOW
            steps_at = step_records + at * WINDOW
            values_at = value_records + at * (WINDOW * DV)
            record = tl.arange(0, LP)
            gain = window_gain(decays_at, now, count, held, LP, WINDOW, DK, BK, False)
            if WINDOW > 1:
                weight = tl.exp(later_decays(decays_at, now, count, held, LP))
                weight = weight * tl.load(steps_at + record, mask=record < held, other=0.0)
                weight = tl.where(record < count, weight, 0.0)

            if READS:
                if count < WINDOW - 1:
                    _, with_query = record_products(
                        keys_at, key_at, key_step, query_at, query_step, held, LP, DK, BK, INTERPRETED
                    )
                    score = tl.where(record < count, with_query * weight, 0.0)
                    own_score = inner_product(query_at, query_step, key_at, key_step, DK, BK) * step + kept
                    if FORM == MATRIX:
                        asked = vector_pairs(query_at, query_step, query_at, query_step, DK, BK, READ_ELEMENT)
                    elif FORM == WIDE:
                        asked = chunks(query_at, query_step, DK, BK)
                    else:
                        place_k = tl.arange(0, BK)
                        asked = fetch(query_at + place_k * query_step, place_k < DK, BK != DK).to(tl.float32)
                    if STAGES == 1:
                        for t in tl.static_range(TILES):
                            rows = (split * TILES + t) * BV + lanes
                            raw_value, past = record_rows(
                                value_at, value_step, values_at, rows, count, held, DV, LP, MASKED, EAGER
                            )
                            if t + 1 < TILES:
                                # The next tile is on its way while this one is worked on.
                                next_codes, next_stored = fetch_tile(
                                    words_at, read_scales_at, rows + BV, rows + BV < DV, MASKED, DK, BK, READ_GROUP,
                                    READ_SCALE, READ_TILE_ROWS, PACKED, WORDS, FORM,
                                )  # fmt: skip
                            mamba2_rows(
                                codes, stored, of_head, asked, gain, score, own_score, raw_value, past, values_at,
                                out_at, out_step, rows, count, DV, BK, READ_ELEMENT, READ_SCALE, PACKED, WORDS, FORM,
                                INTERPRETED,
                            )  # fmt: skip
                            if t + 1 < TILES:
                                codes, stored = next_codes, next_stored
                    else:
                        for t in tl.range(0, TILES, num_stages=STAGES):
                            rows = (split * TILES + t) * BV + lanes
                            codes, stored = fetch_tile(
                                words_at, read_scales_at, rows, rows < DV, MASKED, DK, BK, READ_GROUP, READ_SCALE,
                                READ_TILE_ROWS, PACKED, WORDS, FORM,
                            )  # fmt: skip
                            raw_value, past = record_rows(
                                value_at, value_step, values_at, rows, count, held, DV, LP, MASKED, EAGER
                            )
                            mamba2_rows(
                                codes, stored, of_head, asked, gain, score, own_score, raw_value, past, values_at,
                                out_at, out_step, rows, count, DV, BK, READ_ELEMENT, READ_SCALE, PACKED, WORDS, FORM,
                                INTERPRETED,
                            )  # fmt: skip
                    if split == 0:
                        tl.store(decays_at + count, now)
                        tl.store(steps_at + count, step)
                        if head % (HEADS // KEY_HEADS) == 0:
                            channel = tl.arange(0, BK)
                            kept_key = fetch(key_at + channel * key_step, channel < DK, BK != DK)
                            tl.store(keys_at + count * DK + channel, kept_key, mask=channel < DK)
            if FLUSHES:
                if count == WINDOW - 1:
                    new_key = chunks(key_at, key_step, DK, BK)
                    new_query = chunks(query_at, query_step, DK, BK)
                    if WINDOW > 1:
                        keys = record_chunks(keys_at, decays_at, now, record, count, DK, BK, False)
                    largest = 0
                    for t in tl.range(0, TILES, num_stages=STAGES):
                        rows = (split * TILES + t) * BV + lanes
                        there = rows < DV
                        state = load_tile(
                            main_at, scales + at * SCALES, head_scales + at, rows, there, MASKED, DK, BK, ELEMENT,
                            SCALE, TILE_ROWS, GROUP,
                        )  # fmt: skip
                        if WINDOW > 1:
                            raw_value, past = record_rows(
                                value_at, value_step, values_at, rows, count, count, DV, LP, MASKED, False
                            )
                        else:
                            raw_value = fetch(value_at + rows * value_step, there, MASKED)
                        state = decayed_chunks(state, gain, BK, False)
                        if WINDOW > 1:
                            state = fold_records(state, past.to(tl.float32) * weight[:, None], keys, BK, INTERPRETED)
                        x = raw_value.to(tl.float32)
                        after = written(state, x * step, new_key, BK)
                        y = chunk_product(after, new_query, BK) + kept * x
                        tl.store(out_at + rows * out_step, y.to(out.dtype.element_ty), mask=there)
                        largest = store_copies(
                            after, philox, tl.load(sequences + slot), tl.load(tokens + slot), main_at,
                            scales + at * SCALES, head_scales + at, divisor, read_at, read_scales_at, of_head,
                            read_divisor, head, rows, there, largest, SEPARATE, AGAIN, MASKED, DV, DK, BK, ELEMENT,
                            SCALE, TILE_ROWS, GROUP, STOCHASTIC, READ_ELEMENT, READ_SCALE, READ_TILE_ROWS, READ_GROUP,
                            READ_STOCHASTIC,
                        )  # fmt: skip
                    if AGAIN:
                        store_again(
                            main_at, philox, tl.load(sequences + slot), tl.load(tokens + slot), read_at, read_scales_at,
                            of_head, read_divisor, head, split * (TILES * BV), largest, BV, TILES, MASKED, DV, DK, BK,
                            READ_ELEMENT, READ_SCALE, READ_TILE_ROWS, READ_GROUP, READ_STOCHASTIC,
                        )  # fmt: skip
