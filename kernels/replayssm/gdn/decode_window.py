"""What a window of records does in a decode step of a gated delta rule: overlaps, writes computed anew, replays."""

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
    decayed_chunks,
    exponentials,
    fetch,
    multiplied,
    scaled_chunks,
    written,
)
from replayssm.decode_records import exact_product, later_decays, record_chunk, record_products
from replayssm.decode_tiles import MATRIX, WIDE
from replayssm.decode_words import vector_pairs

UNROLL = tl.constexpr(4)
"""Records of a window that are on their way at a time where they are replayed one by one."""


@triton.jit
def delta_write(state, value, strength, key, BK: tl.constexpr):
    """The delta rule on a tile in chunks that has decayed already, with a key of unit length in chunks."""
    return written(state, strength * (value - chunk_product(state, key, BK)), key, BK)


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
    DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """The state after all records of a full window, their writes computed anew from this state; decays per channel."""
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
            decay = masked_chunks(decays_at + j * DK, inside, DK, BK)
            strength = tl.load(betas_at + j, mask=inside, other=0.0)
            loaded = loaded + ((norm, value, key, decay, strength),)
        for n in tl.static_range(UNROLL):
            norm, value, key, decay, strength = loaded[n]
            kept = decayed_chunks(state, exponentials(decay, BK), BK, True)
            state = delta_write(kept, value.to(tl.float32), strength, scaled_chunks(key, norm, BK), BK)
    return state


@triton.jit
def record_weights(
    norms_at, decays_at, now, count, held, LP: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr
):  # fmt: skip
    """What the write of each record is multiplied with: its decay since (without channels) and the norm of its key."""
    record = tl.arange(0, LP)
    weight = tl.full((LP,), 1.0, tl.float32)
    if not CHANNELS:
        weight = tl.exp(later_decays(decays_at, now, count, held, LP))
    if NORMALISE:
        weight = weight * tl.load(norms_at + record, mask=record < held, other=0.0)
    return tl.where(record < count, weight, 0.0)


@triton.jit
def append_solution(solution_at, overlap, strength, count, WINDOW: tl.constexpr, LP: tl.constexpr):
    """The next row of the inverse `R` of the unit lower triangle `I + β_j G_{l→j} (k_l·k_j)`, by forward substitution.

    With it the writes of a window are `u = R (β v − β G S k)` for any state `S` (Yang et al., 2024, the WY form).
    """
    record = tl.arange(0, LP)
    before = (record < count)[:, None] & (record < WINDOW)[None, :]
    rows = tl.load(solution_at + record[:, None] * WINDOW + record[None, :], mask=before, other=0.0)
    known = strength * tl.sum(overlap[:, None] * rows, axis=0)
    row = tl.where(record == count, 1.0, 0.0) - known
    tl.store(solution_at + count * WINDOW + record, row, mask=record < WINDOW)


@triton.jit
def load_solution(
    solution_at, betas_at, norms_at, decays_at, count, WINDOW: tl.constexpr, LP: tl.constexpr, NORMALISE: tl.constexpr
):  # fmt: skip
    """`R` transposed, the strength of each record, and what its `S k` is multiplied with."""
    record = tl.arange(0, LP)
    past = record < count
    square = past[:, None] & past[None, :]
    solution = tl.load(solution_at + record[:, None] + record[None, :] * WINDOW, mask=square, other=0.0)
    strengths = tl.load(betas_at + record, mask=past, other=0.0)
    factor = tl.exp(tl.cumsum(tl.load(decays_at + record, mask=past, other=0.0), axis=0))
    if NORMALISE:
        factor = factor * tl.load(norms_at + record, mask=past, other=0.0)
    return solution, strengths, factor


@triton.jit
def replayed_writes(
    state, keys, solution, factor, beta, values, BK: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """The writes `[records, rows]` of a window, computed anew from the state that carries the recurrence."""
    recalled = exact_product(state[0], tl.trans(keys[0]), INTERPRETED)
    for c in tl.static_range(1, BK // (32 if BK >= 32 else BK)):
        recalled += exact_product(state[c], tl.trans(keys[c]), INTERPRETED)
    wanted = beta[None, :] * (tl.trans(values.to(tl.float32)) - factor[None, :] * recalled)
    return tl.trans(tl.dot(wanted, solution, input_precision="ieee"))


@triton.jit
def delta_overlaps(
    key_at, key_step, query_at, query_step, now, keys_at, norms_at, decays_at, k_norm, q_norm, count, held,
    LP: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """What all rows of a head share: products of the records' keys with the token's key and its query, decayed."""
    record = tl.arange(0, LP)
    weight = record_weights(norms_at, decays_at, now, count, held, LP, CHANNELS, NORMALISE)
    if CHANNELS:
        CHUNK: tl.constexpr = 32 if BK >= 32 else BK
        overlaps = tl.zeros((LP, CHUNK), tl.float32)
        similar = tl.zeros((LP, CHUNK), tl.float32)
        for c in tl.static_range(BK // CHUNK):
            present = now[c].to(tl.float32)
            one = record_chunk(keys_at, decays_at, present, record, count, c, DK, BK, True)
            overlaps += one * chunk(key_at, key_step, c, DK, BK).to(tl.float32)[None, :]
            similar += one * chunk(query_at, query_step, c, DK, BK).to(tl.float32)[None, :]
        with_key, with_query = tl.sum(overlaps, axis=1), tl.sum(similar, axis=1)
    else:
        with_key, with_query = record_products(
            keys_at, key_at, key_step, query_at, query_step, held, LP, DK, BK, INTERPRETED
        )
    past = record < count
    overlap = tl.where(past, with_key * (weight * k_norm), 0.0)
    score = tl.where(past, with_query * (weight * q_norm), 0.0)
    return overlap, score


@triton.jit
def delta_vectors(
    key_at, key_step, query_at, query_step, decay_at, decay_step, decays_at, gain, count,
    LP: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, CHANNELS: tl.constexpr, ELEMENT: tl.constexpr,
    FORM: tl.constexpr,
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
            record = tl.arange(0, LP)
            where = decays_at + record[:, None] * DK + channel[None, :]
            inside = (record < count)[:, None] & real[None, :]
            passed += tl.sum(tl.load(where, mask=inside, other=0.0), axis=0)
            ahead = ahead * tl.exp(passed)
            asked = asked * tl.exp(passed)
        return ahead, asked
