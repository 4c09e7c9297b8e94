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

from replayssm.decode_chunks import (
    chunk,
    chunk_product,
    chunks,
    decoded,
    fetch,
    inner_product,
)
from replayssm.decode_records import (
    FLUSHES_ONLY,
    READS_ONLY,
    due_rows,
    fold_window,
    later_decays,
    record_chunk,
    record_chunks,
)
from replayssm.decode_tiles import (
    MATRIX,
    WIDE,
    fetch_tile,
    load_tile,
    read_tile,
    store_tile,
)
from replayssm.decode_words import (
    matrix_products,
    vector_pairs,
)
from replayssm.formats.triton_bits import E2M1
from replayssm.formats.triton_ops import SCALE_NONE

UNROLL = tl.constexpr(4)
"""Records of a window that are on their way at a time where they are replayed one by one."""


@triton.jit
def delta_token(state, value, strength, decay, key, norm, BK: tl.constexpr, CHANNELS: tl.constexpr):
    """The recurrence itself, in chunks: a tile, log-decays (one number without channels), a key of norm `1 / norm`."""
    kept = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        kept = kept + (state[c] * (tl.exp(decay[c].to(tl.float32))[None, :] if CHANNELS else tl.exp(decay)),)
    write = strength * (value - norm * chunk_product(kept, key, BK))
    moved = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        moved = moved + (kept[c] + write[:, None] * (key[c].to(tl.float32) * norm)[None, :],)
    return moved


@triton.jit
def multiplied(vector, factor, BK: tl.constexpr):
    """The elementwise product of two vectors in chunks."""
    found = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        found = found + (vector[c].to(tl.float32) * factor[c],)
    return found


@triton.jit
def masked_chunks(pointer, inside, DK: tl.constexpr, BK: tl.constexpr):
    """All chunks of a vector over keys; zeros unless `inside`."""
    WIDTH: tl.constexpr = 32 if BK >= 32 else BK
    found = ()
    for c in tl.static_range(BK // WIDTH):
        place = c * WIDTH + tl.arange(0, WIDTH)
        found = found + (tl.load(pointer + place, mask=inside & (place < DK), other=0.0),)
    return found


@triton.jit
def replay_window(
    state, keys_at, norms_at, decays_at, values_at, betas_at, rows, there, WINDOW: tl.constexpr,
    DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
    CHANNELS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """The state after all records of a full window, their writes computed anew from this state."""
    for group in tl.range(0, (WINDOW + UNROLL - 2) // UNROLL):
        loaded = ()
        for n in tl.static_range(UNROLL):
            # A record too many has neither strength nor decay, so it changes nothing.
            j = group * UNROLL + n
            inside = j < WINDOW - 1
            norm = 1.0
            if NORMALISE:
                norm = tl.load(norms_at + j, mask=inside, other=0.0)
            value = tl.load(values_at + j * DV + rows, mask=there & inside, other=0.0)
            key = masked_chunks(keys_at + j * DK, inside, DK, BK)
            decay = (
                masked_chunks(decays_at + j * DK, inside, DK, BK)
                if CHANNELS
                else tl.load(decays_at + j, mask=inside, other=0.0)
            )
            strength = tl.load(betas_at + j, mask=inside, other=0.0)
            loaded = loaded + ((norm, value, key, decay, strength),)
        for n in tl.static_range(UNROLL):
            norm, value, key, decay, strength = loaded[n]
            state = delta_token(state, value.to(tl.float32), strength, decay, key, norm, BK, CHANNELS)
    return state


@triton.jit
def delta_prologue(
    key_at, key_step, query_at, query_step, now, keys_at, norms_at, decays_at, k_norm, q_norm, count, held,
    WINDOW: tl.constexpr, LP: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, CHANNELS: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    """What all rows of a head share: weights of the records, their products with the token's key and its query, decays.

    Of the decays up to this token (with channels: in chunks) comes the exponential.
    """
    CHUNK: tl.constexpr = 32 if BK >= 32 else BK
    record = tl.arange(0, LP)
    past = record < count
    weight = tl.full((LP,), 1.0, tl.float32)
    overlaps = tl.zeros((LP, CHUNK), tl.float32)
    similar = tl.zeros((LP, CHUNK), tl.float32)
    gain = ()
    if not CHANNELS:
        if WINDOW > 1:
            later, total = later_decays(decays_at, now, count, held, LP)
            weight = tl.exp(later)
            gain = tl.exp(total)
        else:
            gain = tl.exp(now)
    if WINDOW > 1:
        if NORMALISE:
            weight = weight * tl.load(norms_at + record, mask=record < held, other=0.0)
        weight = tl.where(past, weight, 0.0)
    for c in tl.static_range(BK // CHUNK):
        if WINDOW > 1:
            present = now[c].to(tl.float32) if CHANNELS else now
            loaded = count if CHANNELS else held
            one = record_chunk(keys_at, decays_at, present, record, loaded, c, DK, BK, CHANNELS)
            if CHANNELS:
                where = record[:, None] * DK + (c * CHUNK + tl.arange(0, CHUNK))[None, :]
                inside = past[:, None] & (c * CHUNK + tl.arange(0, CHUNK) < DK)[None, :]
                passed = present + tl.sum(tl.load(decays_at + where, mask=inside, other=0.0), axis=0)
                gain = gain + (tl.exp(passed),)
            one = one.to(tl.float32)
            overlaps += one * chunk(key_at, key_step, c, DK, BK).to(tl.float32)[None, :]
            similar += one * chunk(query_at, query_step, c, DK, BK).to(tl.float32)[None, :]
        elif CHANNELS:
            gain = gain + (tl.exp(now[c].to(tl.float32)),)
    overlap = tl.where(past, tl.sum(overlaps, axis=1) * (weight * k_norm), 0.0)
    score = tl.where(past, tl.sum(similar, axis=1) * (weight * q_norm), 0.0)
    return weight, overlap, score, gain


@triton.jit
def delta_vectors(
    key_at, key_step, query_at, query_step, decay_at, decay_step, decays_at, gain, count,
    LP: tl.constexpr, WINDOW: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, CHANNELS: tl.constexpr,
    ELEMENT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The token's key and its query as tiles of this form meet them, decayed where each channel has its own decay."""
    if FORM == MATRIX:
        pairs = vector_pairs(key_at, key_step, query_at, query_step, DK, BK, ELEMENT)
        return pairs, pairs
    elif FORM == WIDE:
        ahead = chunks(key_at, key_step, DK, BK)
        asked = chunks(query_at, query_step, DK, BK)
        if CHANNELS:
            return multiplied(ahead, gain, BK), multiplied(asked, gain, BK)
        else:
            return ahead, asked
    else:
        channel = tl.arange(0, BK)
        real = channel < DK
        ahead = fetch(key_at + channel * key_step, real, BK != DK).to(tl.float32)
        asked = fetch(query_at + channel * query_step, real, BK != DK).to(tl.float32)
        if CHANNELS:
            passed = fetch(decay_at + channel * decay_step, real, BK != DK).to(tl.float32)
            if WINDOW > 1:
                record = tl.arange(0, LP)
                where = decays_at + record[:, None] * DK + channel[None, :]
                inside = (record < count)[:, None] & real[None, :]
                passed += tl.sum(tl.load(where, mask=inside, other=0.0), axis=0)
            ahead = ahead * tl.exp(passed)
            asked = asked * tl.exp(passed)
        return ahead, asked


@triton.jit(do_not_specialize=["count_rows"])
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
    EAGER: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    READ_ELEMENT: tl.constexpr, READ_SCALE: tl.constexpr, READ_TILE_ROWS: tl.constexpr, READ_GROUP: tl.constexpr,
    READ_STOCHASTIC: tl.constexpr, READ_SCALES: tl.constexpr, WORDS: tl.constexpr, FORM: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr, SCALES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`replayssm.decode.decode_step` says what it computes, `replayssm.slots` what the tensors are."""
    PACKED: tl.constexpr = READ_ELEMENT == E2M1
    READ_WIDTH: tl.constexpr = DK // 2 if PACKED else DK
    WIDTH: tl.constexpr = DK // 2 if ELEMENT == E2M1 else DK
    WORD_WIDTH: tl.constexpr = READ_WIDTH // 4 if WORDS else READ_WIDTH
    READS: tl.constexpr = STEPS != FLUSHES_ONLY or not SEPARATE
    OUTPUTS: tl.constexpr = WINDOW > 1 and STEPS != FLUSHES_ONLY
    FOLDS: tl.constexpr = not SEPARATE and STEPS != READS_ONLY
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
        own_score = inner_product(query_at, query_step, key_at, key_step, DK, BK) * (q_norm * k_norm)
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
            if READS and TILES == 1:
                # Its address is known before the cursor is: a single tile sets out before everything else.
                only_rows = split * BV + tl.arange(0, BV)
                only_codes, only_scales = fetch_tile(
                    words_at, read_scales_at, only_rows, only_rows < DV, MASKED, DK, BK, READ_GROUP, READ_SCALE,
                    READ_TILE_ROWS, PACKED, WORDS, FORM,
                )  # fmt: skip
            count = 0
            if WINDOW > 1:
                count = tl.load(cursors + slot)
            flush = count == WINDOW - 1
            # Loads of records that do not wait for the cursor: more bytes, and one trip to memory less.
            held = WINDOW if EAGER else count
            keys_at = key_records + (slot * KEY_HEADS + of_key) * (WINDOW * DK)
            norms_at = norm_records + (slot * KEY_HEADS + of_key) * WINDOW
            decays_at = decay_records + at * (WINDOW * DK if CHANNELS else WINDOW)
            writes_at = write_records + at * (WINDOW * DV)
            values_at = value_records + at * (WINDOW * DV)
            betas_at = beta_records + at * WINDOW
            record = tl.arange(0, LP)

            # A flush of a separate checkpoint looks at nothing but the copy that carries the recurrence.
            if READS:
                through = True
                if SEPARATE or STEPS == READS_ONLY:
                    through = count != WINDOW - 1
                if through:
                    weight, overlap, score, gain = delta_prologue(
                        key_at, key_step, query_at, query_step, now, keys_at, norms_at, decays_at, k_norm, q_norm,
                        count, held, WINDOW, LP, DK, BK, CHANNELS, NORMALISE,
                    )  # fmt: skip
                    ahead, asked = delta_vectors(
                        key_at, key_step, query_at, query_step, decay_at, decay_step, decays_at, gain, count, LP,
                        WINDOW, DK, BK, CHANNELS, READ_ELEMENT, FORM,
                    )  # fmt: skip
                    # Steps that only read, then those that flush, in loops of their own: a flush needs more registers.
                    for phase in tl.static_range(2):
                        if (OUTPUTS and phase == 0) or (FOLDS and phase == 1):
                            wanted = flush if phase == 1 else count < WINDOW - 1
                            if wanted:
                                if phase == 1:
                                    own_key = chunks(key_at, key_step, DK, BK)
                                    if WINDOW > 1:
                                        fold_keys = record_chunks(
                                            keys_at, decays_at, now, record, count, DK, BK, CHANNELS
                                        )
                                for t in tl.range(0, TILES, num_stages=STAGES):
                                    rows = (split * TILES + t) * BV + tl.arange(0, BV)
                                    there = rows < DV
                                    if TILES == 1:
                                        codes, stored = only_codes, only_scales
                                    else:
                                        codes, stored = fetch_tile(
                                            words_at, read_scales_at, rows, there, MASKED, DK, BK, READ_GROUP,
                                            READ_SCALE, READ_TILE_ROWS, PACKED, WORDS, FORM,
                                        )  # fmt: skip
                                    raw_value = fetch(value_at + rows * value_step, there, MASKED)
                                    if WINDOW > 1:
                                        written = (record < held)[:, None] & there[None, :]
                                        where = writes_at + record[:, None] * DV + rows[None, :]
                                        u = tl.load(where, mask=written, other=0.0)
                                        u = tl.where((record < count)[:, None], u, 0.0)
                                    if FORM == MATRIX:
                                        recalled, y = matrix_products(
                                            codes, stored, of_head, ahead, BK, READ_ELEMENT, READ_SCALE, INTERPRETED
                                        )
                                    else:
                                        recalled = read_tile(
                                            codes, stored, of_head, ahead, BK, READ_ELEMENT, READ_SCALE, PACKED, WORDS,
                                            FORM,
                                        )  # fmt: skip
                                        y = read_tile(
                                            codes, stored, of_head, asked, BK, READ_ELEMENT, READ_SCALE, PACKED, WORDS,
                                            FORM,
                                        )  # fmt: skip
                                    recalled = recalled * (k_norm if CHANNELS else k_norm * gain)
                                    y = y * (q_norm if CHANNELS else q_norm * gain)
                                    if WINDOW > 1:
                                        recalled += tl.sum(u * overlap[:, None], axis=0)
                                        y += tl.sum(u * score[:, None], axis=0)
                                    write = strength * (raw_value.to(tl.float32) - recalled)
                                    y += own_score * write
                                    tl.store(out_at + rows * out_step, y.to(out.dtype.element_ty), mask=there)
                                    if phase == 0:
                                        tl.store(writes_at + count * DV + rows, write, mask=there)
                                        if SEPARATE:
                                            tl.store(values_at + count * DV + rows, raw_value, mask=there)
                                    else:
                                        if FORM != WIDE or READ_SCALE != SCALE_NONE:
                                            before = load_tile(
                                                read_at, read_scales_at, of_head, rows, there, MASKED, DK, BK,
                                                READ_ELEMENT, READ_SCALE, READ_TILE_ROWS, READ_GROUP,
                                            )  # fmt: skip
                                        else:
                                            before = decoded(codes, READ_ELEMENT, BK)
                                        folded_state = fold_window(
                                            before, gain, write, own_key, k_norm,
                                            u * weight[:, None] if WINDOW > 1 else 0.0,
                                            fold_keys if WINDOW > 1 else (), WINDOW, BK, CHANNELS, INTERPRETED,
                                        )  # fmt: skip
                                        store_tile(
                                            folded_state, philox, tl.load(sequences + slot), tl.load(tokens + slot),
                                            main_at, scales + at * SCALES, head_scales + at, divisor, head, rows,
                                            there, 0, MASKED, DV, DK, BK, ELEMENT, SCALE, TILE_ROWS, GROUP, STOCHASTIC,
                                        )  # fmt: skip
                    if OUTPUTS and split == 0:
                        if count < WINDOW - 1:
                            channel = tl.arange(0, BK)
                            real = channel < DK
                            if CHANNELS:
                                own = fetch(decay_at + channel * decay_step, real, BK != DK).to(tl.float32)
                                tl.store(decays_at + count * DK + channel, own, mask=real)
                            else:
                                tl.store(decays_at + count, now)
                            if SEPARATE:
                                tl.store(betas_at + count, strength)
                            if head % (HEADS // KEY_HEADS) == 0:
                                kept_key = fetch(key_at + channel * key_step, real, BK != DK)
                                tl.store(keys_at + count * DK + channel, kept_key, mask=real)
                                if NORMALISE:
                                    tl.store(norms_at + count, k_norm)
            if REPLAYS:
                if flush:
                    for t in tl.range(0, TILES, num_stages=1):
                        rows = (split * TILES + t) * BV + tl.arange(0, BV)
                        there = rows < DV
                        state = load_tile(
                            main_at, scales + at * SCALES, head_scales + at, rows, there, MASKED, DK, BK, ELEMENT,
                            SCALE, TILE_ROWS, GROUP,
                        )  # fmt: skip
                        replayed = replay_window(
                            state, keys_at, norms_at, decays_at, values_at, betas_at, rows, there, WINDOW, DV, DK, BK,
                            MASKED, CHANNELS, NORMALISE,
                        )  # fmt: skip
                        raw_value = fetch(value_at + rows * value_step, there, MASKED)
                        new_key = chunks(key_at, key_step, DK, BK)
                        after = delta_token(
                            replayed, raw_value.to(tl.float32), strength, now, new_key, k_norm, BK, CHANNELS
                        )
                        y = chunk_product(after, chunks(query_at, query_step, DK, BK), BK) * q_norm
                        tl.store(out_at + rows * out_step, y.to(out.dtype.element_ty), mask=there)
                        token = tl.load(tokens + slot)
                        sequence = tl.load(sequences + slot)
                        store_tile(
                            after, philox, sequence, token, read_at, read_scales_at, of_head, read_divisor, head, rows,
                            there, 1, MASKED, DV, DK, BK, READ_ELEMENT, READ_SCALE, READ_TILE_ROWS, READ_GROUP,
                            READ_STOCHASTIC,
                        )  # fmt: skip
                        store_tile(
                            after, philox, sequence, token, main_at, scales + at * SCALES, head_scales + at, divisor,
                            head, rows, there, 0, MASKED, DV, DK, BK, ELEMENT, SCALE, TILE_ROWS, GROUP, STOCHASTIC,
                        )  # fmt: skip
