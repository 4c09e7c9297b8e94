"""One token of a gated delta rule per sequence, in Triton: read through the records, append, flush.

One program works on tiles of `BV` value rows of one head of one sequence. A value row depends on no other, so its
write `u` and its output come from a single pass over the stored state, and so does its flush. Where a flush needs many
more registers than a read (scaled formats), two launches share the work: one that skips the sequences which flush, and
one that finds them.
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
    exponentials,
    fetch,
    inner_product,
    scaled_chunks,
)
from replayssm.decode_records import (
    FLUSHES_ONLY,
    READS_ONLY,
    due_rows,
    fold_records,
    record_chunks,
    record_rows,
    window_gain,
    work_item,
)
from replayssm.decode_tiles import (
    MATRIX,
    fetch_tile,
    load_tile,
    read_tile,
    store_again,
    store_copies,
)
from replayssm.decode_words import matrix_products
from replayssm.formats.triton_bits import E2M1
from replayssm.gdn.decode_window import (
    append_solution,
    delta_overlaps,
    delta_vectors,
    delta_write,
    load_solution,
    record_weights,
    replay_window,
    replayed_writes,
)


@triton.jit
def delta_rows(
    codes, stored, of_head, ahead, asked, gain, overlap, score, own_score, strength, k_norm, q_norm, raw_value, u,
    writes_at, values_at, out_at, out_step, rows, count, DV: tl.constexpr, BK: tl.constexpr, SEPARATE: tl.constexpr,
    CHANNELS: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr, WORDS: tl.constexpr,
    FORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The outputs and the records of the rows of a fetched tile."""
    there = rows < DV
    if FORM == MATRIX:
        recalled, y = matrix_products(codes, stored, of_head, ahead, BK, ELEMENT, SCALE, INTERPRETED)
    else:
        recalled = read_tile(codes, stored, of_head, ahead, BK, ELEMENT, SCALE, PACKED, WORDS, FORM)
        y = read_tile(codes, stored, of_head, asked, BK, ELEMENT, SCALE, PACKED, WORDS, FORM)
    recalled = recalled * (k_norm if CHANNELS else k_norm * gain)
    y = y * (q_norm if CHANNELS else q_norm * gain)
    recalled += tl.sum(u * overlap[:, None], axis=0)
    y += tl.sum(u * score[:, None], axis=0)
    write = strength * (raw_value.to(tl.float32) - recalled)
    y += own_score * write
    tl.store(out_at + rows * out_step, y.to(out_at.dtype.element_ty), mask=there)
    tl.store(writes_at + count * DV + rows, write, mask=there)
    if SEPARATE:
        tl.store(values_at + count * DV + rows, raw_value, mask=there)


@triton.jit(do_not_specialize=["count_rows"])
def delta_decode_kernel(
    query, key, value, log_decay, beta, out, slot_index, cursors, tokens, sequences, philox,
    read_words, read_payload, read_scales, read_head_scales, payload, scales, head_scales,
    key_records, norm_records, write_records, decay_records, value_records, beta_records,
    solution_records,
    query_row, query_head, query_step, key_row, key_head, key_step, value_row, value_head, value_step,
    decay_row, decay_head, decay_step, beta_row, beta_head, out_row, out_head, out_step,
    scale, epsilon, read_divisor, divisor, count_rows,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    WINDOW: tl.constexpr, LP: tl.constexpr, SEPARATE: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr,
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
    # Where each channel has its own decay, the writes of a window have no form in which keys stay bfloat16.
    FOLDS: tl.constexpr = WINDOW > 1 and not (SEPARATE and CHANNELS)
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
        q_norm = scale
        k_norm = 1.0
        if NORMALISE:
            q_square = inner_product(query_at, query_step, query_at, query_step, DK, BK)
            k_square = inner_product(key_at, key_step, key_at, key_step, DK, BK)
            q_norm = scale * tl.div_rn(1.0, tl.sqrt_rn(q_square + epsilon))
            k_norm = tl.div_rn(1.0, tl.sqrt_rn(k_square + epsilon))
        strength = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
        decay_at = log_decay + row * decay_row + head * decay_head
        if CHANNELS:
            now = chunks(decay_at, decay_step, DK, BK)
        else:
            now = tl.load(decay_at).to(tl.float32)
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
            norms_at = norm_records + (slot * KEY_HEADS + of_key) * WINDOW
            decays_at = decay_records + at * (WINDOW * DK if CHANNELS else WINDOW)
            writes_at = write_records + at * (WINDOW * DV)
            values_at = value_records + at * (WINDOW * DV)
            betas_at = beta_records + at * WINDOW
            solution_at = solution_records + at * (WINDOW * WINDOW)
            record = tl.arange(0, LP)

            if READS:
                if count < WINDOW - 1:
                    gain = window_gain(decays_at, now, count, held, LP, WINDOW, DK, BK, CHANNELS)
                    overlap, score = delta_overlaps(
                        key_at, key_step, query_at, query_step, now, keys_at, norms_at, decays_at, k_norm, q_norm,
                        count, held, LP, DK, BK, CHANNELS, NORMALISE, INTERPRETED,
                    )  # fmt: skip
                    own_score = inner_product(query_at, query_step, key_at, key_step, DK, BK) * (q_norm * k_norm)
                    ahead, asked = delta_vectors(
                        key_at, key_step, query_at, query_step, decay_at, decay_step, decays_at, gain, count, LP, DK,
                        BK, CHANNELS, READ_ELEMENT, FORM,
                    )  # fmt: skip
                    if STAGES == 1:
                        for t in tl.static_range(TILES):
                            rows = (split * TILES + t) * BV + lanes
                            raw_value, u = record_rows(
                                value_at, value_step, writes_at, rows, count, held, DV, LP, MASKED, EAGER
                            )
                            if t + 1 < TILES:
                                # The next tile is on its way while this one is worked on.
                                next_codes, next_stored = fetch_tile(
                                    words_at, read_scales_at, rows + BV, rows + BV < DV, MASKED, DK, BK, READ_GROUP,
                                    READ_SCALE, READ_TILE_ROWS, PACKED, WORDS, FORM,
                                )  # fmt: skip
                            delta_rows(
                                codes, stored, of_head, ahead, asked, gain, overlap, score, own_score, strength, k_norm,
                                q_norm, raw_value, u, writes_at, values_at, out_at, out_step, rows, count, DV, BK,
                                SEPARATE, CHANNELS, READ_ELEMENT, READ_SCALE, PACKED, WORDS, FORM, INTERPRETED,
                            )  # fmt: skip
                            if t + 1 < TILES:
                                codes, stored = next_codes, next_stored
                    else:
                        for t in tl.range(0, TILES, num_stages=STAGES):
                            rows = (split * TILES + t) * BV + lanes
                            codes, stored = fetch_tile(
                                words_at, read_scales_at, rows, rows < DV, MASKED, DK, BK, READ_GROUP,
                                READ_SCALE, READ_TILE_ROWS, PACKED, WORDS, FORM,
                            )  # fmt: skip
                            raw_value, u = record_rows(
                                value_at, value_step, writes_at, rows, count, held, DV, LP, MASKED, EAGER
                            )
                            delta_rows(
                                codes, stored, of_head, ahead, asked, gain, overlap, score, own_score, strength, k_norm,
                                q_norm, raw_value, u, writes_at, values_at, out_at, out_step, rows, count, DV, BK,
                                SEPARATE, CHANNELS, READ_ELEMENT, READ_SCALE, PACKED, WORDS, FORM, INTERPRETED,
                            )  # fmt: skip
                    if split == 0:
                        channel = tl.arange(0, BK)
                        real = channel < DK
                        if CHANNELS:
                            own = fetch(decay_at + channel * decay_step, real, BK != DK).to(tl.float32)
                            tl.store(decays_at + count * DK + channel, own, mask=real)
                        else:
                            tl.store(decays_at + count, now)
                        if SEPARATE:
                            tl.store(betas_at + count, strength)
                            if not CHANNELS:
                                append_solution(solution_at, overlap, strength, count, WINDOW, LP)
                        if head % (HEADS // KEY_HEADS) == 0:
                            kept_key = fetch(key_at + channel * key_step, real, BK != DK)
                            tl.store(keys_at + count * DK + channel, kept_key, mask=real)
                            if NORMALISE:
                                tl.store(norms_at + count, k_norm)
            if FLUSHES:
                if count == WINDOW - 1:
                    passed = window_gain(decays_at, now, count, count, LP, WINDOW, DK, BK, CHANNELS)
                    if FOLDS:
                        weight = record_weights(norms_at, decays_at, now, count, count, LP, CHANNELS, NORMALISE)
                        keys = record_chunks(keys_at, decays_at, now, record, count, DK, BK, CHANNELS)
                        if SEPARATE:
                            solution, strengths, factor = load_solution(
                                solution_at, betas_at, norms_at, decays_at, count, WINDOW, LP, NORMALISE
                            )
                    largest = 0
                    for t in tl.range(0, TILES, num_stages=STAGES):
                        rows = (split * TILES + t) * BV + lanes
                        there = rows < DV
                        state = load_tile(
                            main_at, scales + at * SCALES, head_scales + at, rows, there, MASKED, DK, BK, ELEMENT,
                            SCALE, TILE_ROWS, GROUP,
                        )  # fmt: skip
                        # An error of a separate read copy is in the writes on record, so they are computed anew.
                        if FOLDS:
                            raw_value, u = record_rows(
                                value_at, value_step, values_at if SEPARATE else writes_at, rows, count, count, DV, LP,
                                MASKED, False,
                            )  # fmt: skip
                            if SEPARATE:
                                u = replayed_writes(state, keys, solution, factor, strengths, u, BK, INTERPRETED)
                            state = decayed_chunks(state, passed, BK, CHANNELS)
                            state = fold_records(state, u * weight[:, None], keys, BK, INTERPRETED)
                        else:
                            raw_value = fetch(value_at + rows * value_step, there, MASKED)
                            if WINDOW > 1:
                                state = replay_window(
                                    state, keys_at, norms_at, decays_at, values_at, betas_at, rows, there, WINDOW, DV,
                                    DK, BK, NORMALISE,
                                )  # fmt: skip
                                state = decayed_chunks(state, exponentials(now, BK), BK, CHANNELS)
                            else:
                                state = decayed_chunks(state, passed, BK, CHANNELS)
                        new_key = scaled_chunks(chunks(key_at, key_step, DK, BK), k_norm, BK)
                        after = delta_write(state, raw_value.to(tl.float32), strength, new_key, BK)
                        y = chunk_product(after, chunks(query_at, query_step, DK, BK), BK) * q_norm
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
