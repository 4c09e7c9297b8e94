"""What the decode kernels of all recurrences share: tiles of stored states, suffix sums of decays, cursors.

A tile holds `BV` value rows of one head, all keys of each, and is read in one of three ways:

- WIDE: as chunks `[BV, 32]`, a tuple of them. Eight neighbouring threads share a row, 16 bytes each at a time, and hold
  their part of every chunk: a warp sums over four rows with three exchanges, where rows spread over whole warps would
  need five each. Vectors over keys come in the same chunks, loaded where they are needed: a tensor that is reshaped
  would drag the whole tile into its layout.
- MATRIX: scaled float codes of 8 or 4 bits, in words of 4 or 8, meet bfloat16 vectors on the tensor cores. A code times
  the scale of its block has at most 6 significant bits, so it is a bfloat16 and every product is exact.
- FLAT: everything else, as `[BV, BK]`; words are turned into float32 by integer instructions that leave each code off
  by a power of two, which the vector makes up for.
"""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from replayssm.formats.triton_bits import (
    E2M1,
    E4M3,
    FP32,
    decode,
    decode_power_of_two,
    magnitude_bits,
    philox_bits,
)
from replayssm.formats.triton_ops import SCALE_E4M3, SCALE_E8M0, SCALE_NONE, load_state, store_state

WIDE = tl.constexpr(0)
FLAT = tl.constexpr(1)
MATRIX = tl.constexpr(2)

UNROLL = tl.constexpr(4)
"""Records of a window that a flush works on at a time, so that their loads overlap."""

ALL_STEPS = tl.constexpr(0)
READS_ONLY = tl.constexpr(1)
FLUSHES_ONLY = tl.constexpr(2)

# Two words in, the bfloat16 of code n of both in register n: sign and code move to their places in both halves at once,
# which leaves the value off by a power of two, and a product puts that right.
_E2M1_ASM = tl.constexpr(
    """{
    .reg .b32 l, h, t, s, f;
    mov.b32 f, FACTOR;
    prmt.b32 l, WORD0, WORD1, 0x5410;
    prmt.b32 h, WORD0, WORD1, 0x7632;
    shl.b32 t, l, 6; and.b32 t, t, 0x01C001C0; shl.b32 s, l, 12; lop3.b32 t, s, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $0, t, f;
    shl.b32 t, l, 2; and.b32 t, t, 0x01C001C0; shl.b32 s, l, 8; lop3.b32 t, s, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $1, t, f;
    shr.b32 t, l, 2; and.b32 t, t, 0x01C001C0; shl.b32 s, l, 4; lop3.b32 t, s, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $2, t, f;
    shr.b32 t, l, 6; and.b32 t, t, 0x01C001C0; lop3.b32 t, l, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $3, t, f;
    shl.b32 t, h, 6; and.b32 t, t, 0x01C001C0; shl.b32 s, h, 12; lop3.b32 t, s, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $4, t, f;
    shl.b32 t, h, 2; and.b32 t, t, 0x01C001C0; shl.b32 s, h, 8; lop3.b32 t, s, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $5, t, f;
    shr.b32 t, h, 2; and.b32 t, t, 0x01C001C0; shl.b32 s, h, 4; lop3.b32 t, s, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $6, t, f;
    shr.b32 t, h, 6; and.b32 t, t, 0x01C001C0; lop3.b32 t, h, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $7, t, f;
    }""".replace("WORD0", "$8").replace("WORD1", "$9")
)
_E2M1_SCALED_ASM = tl.constexpr(_E2M1_ASM.value.replace("FACTOR", "$10"))
_E2M1_PLAIN_ASM = tl.constexpr(_E2M1_ASM.value.replace("FACTOR", "0x7E807E80"))


def _byte_asm(shift: int, mask: str, factor: str) -> str:
    lines = [
        f"prmt.b32 x, $4, $5, 0x{4 + n}0{n}0; shr.b32 t, x, {shift}; and.b32 t, t, {mask}; "
        f"lop3.b32 t, x, 0x80008000, t, 0xEA; mul.rn.bf16x2 ${n}, t, f;"
        for n in range(4)
    ]
    return "{ .reg .b32 x, t, f; mov.b32 f, " + factor + "; " + " ".join(lines) + " }"


_E4M3_ASM = tl.constexpr(_byte_asm(4, "0x07F007F0", "0x7B807B80"))
_E5M2_ASM = tl.constexpr(_byte_asm(3, "0x0FE00FE0", "0x77807780"))


@triton.jit
def fetch(pointer, mask, MASKED: tl.constexpr):
    """Load, with a mask only where one is needed."""
    if MASKED:
        return tl.load(pointer, mask=mask, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def product(low, high, vector_low, vector_high, PACKED: tl.constexpr):
    """`S x` for the rows of a tile."""
    if PACKED:
        return tl.sum(low * vector_low[None, :] + high * vector_high[None, :], axis=1)
    else:
        return tl.sum(low * vector_low[None, :], axis=1)


@triton.jit
def chunk(pointer, step, NUMBER: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr):
    """Chunk `NUMBER` of a vector over keys."""
    WIDTH: tl.constexpr = 32 if BK >= 32 else BK
    place = NUMBER * WIDTH + tl.arange(0, WIDTH)
    return fetch(pointer + place * step, place < DK, BK != DK)


@triton.jit
def chunks(pointer, step, DK: tl.constexpr, BK: tl.constexpr):
    """All chunks of a vector over keys, as they are stored."""
    found = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        found = found + (chunk(pointer, step, c, DK, BK),)
    return found


@triton.jit
def tile_chunk(
    pointer, rows, there, NUMBER: tl.constexpr, MASKED: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Chunk `NUMBER` of the rows of a tile; rows that are not there are zeros."""
    WIDTH: tl.constexpr = 32 if BK >= 32 else BK
    place = NUMBER * WIDTH + tl.arange(0, WIDTH)
    where = pointer + rows[:, None] * DK + place[None, :]
    return fetch(where, there[:, None] & (place < DK)[None, :], MASKED or BK != DK)


@triton.jit
def tile_chunks(pointer, rows, there, MASKED: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr):
    """All chunks of a tile."""
    found = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        found = found + (tile_chunk(pointer, rows, there, c, MASKED, DK, BK),)
    return found


@triton.jit
def inner_product(left, left_step, right, right_step, DK: tl.constexpr, BK: tl.constexpr):
    """The product of two vectors in memory."""
    WIDTH: tl.constexpr = 32 if BK >= 32 else BK
    total = tl.zeros((WIDTH,), tl.float32)
    for c in tl.static_range(BK // WIDTH):
        one = chunk(left, left_step, c, DK, BK).to(tl.float32)
        total += one * chunk(right, right_step, c, DK, BK).to(tl.float32)
    return tl.sum(total, axis=0)


@triton.jit
def chunk_product(state, vector, BK: tl.constexpr):
    """`S x` for the rows of a tile in chunks."""
    total = state[0] * vector[0].to(tl.float32)[None, :]
    for c in tl.static_range(1, BK // (32 if BK >= 32 else BK)):
        total += state[c] * vector[c].to(tl.float32)[None, :]
    return tl.sum(total, axis=1)


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
def to_chunks(values):
    """A tile `[BV, BK]` in chunks."""
    BV: tl.constexpr = values.shape[0]
    BK: tl.constexpr = values.shape[1]
    if BK <= 32:
        return (values,)
    else:
        low, high = tl.split(tl.permute(tl.reshape(values, (BV, 2, BK // 2)), (0, 2, 1)))
        return to_chunks(low) + to_chunks(high)


@triton.jit
def to_flat(state, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """`COUNT` chunks of a tile, from chunk `FIRST` on, side by side."""
    if COUNT == 1:
        return state[FIRST]
    else:
        low = to_flat(state, FIRST, COUNT // 2)
        high = to_flat(state, FIRST + COUNT // 2, COUNT // 2)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (low.shape[0], 2 * low.shape[1]))


@triton.jit
def decoded(codes, ELEMENT: tl.constexpr, BK: tl.constexpr):
    """The float32 values of a tile in chunks."""
    found = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        found = found + (decode(codes[c], ELEMENT),)
    return found


@triton.jit
def load_tile(
    payload_ptr, scale_ptr, head_scale_ptr, rows, mask, MASKED: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP_KEYS: tl.constexpr,
):  # fmt: skip
    """The float32 values of a stored tile, in chunks."""
    if SCALE == SCALE_NONE:
        return decoded(tile_chunks(payload_ptr, rows, mask, MASKED, DK, BK), ELEMENT, BK)
    else:
        return to_chunks(
            load_state(
                payload_ptr, scale_ptr, head_scale_ptr, rows, mask, DK, BK, ELEMENT, SCALE, TILE_ROWS, GROUP_KEYS
            )
        )


@triton.jit
def as_tile(vector, PACKED: tl.constexpr):
    """A vector over keys as a tile meets it: as it is, or (4-bit formats) its even and its odd elements."""
    if PACKED:
        low, high = tl.split(tl.reshape(vector, (vector.shape[0] // 2, 2)))
        return low, high
    else:
        return vector, vector


@triton.jit
def fetch_tile(
    payload_ptr, scale_ptr, rows, mask, MASKED: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    GROUP_KEYS: tl.constexpr, SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, PACKED: tl.constexpr, WORDS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """The codes (`[BV, keys or bytes or words]`, or chunks) and the stored scales `[BV, groups]` of a tile."""
    if FORM == WIDE:
        codes = tile_chunks(payload_ptr, rows, mask, MASKED, DK, BK)
    else:
        if WORDS:
            place = tl.arange(0, BK // (8 if PACKED else 4))
            width: tl.constexpr = DK // (8 if PACKED else 4)
        elif PACKED:
            place = tl.arange(0, BK // 2)
            width: tl.constexpr = DK // 2
        else:
            place = tl.arange(0, BK)
            width: tl.constexpr = DK
        inside = mask[:, None] & (place < width)[None, :]
        codes = fetch(payload_ptr + rows[:, None] * width + place[None, :], inside, MASKED or BK != DK)
    if SCALE == SCALE_NONE:
        scales = codes
    else:
        group = tl.arange(0, BK // GROUP_KEYS)
        per_row: tl.constexpr = (DK + GROUP_KEYS - 1) // GROUP_KEYS
        there = mask[:, None] & (group < per_row)[None, :]
        where = scale_ptr + (rows // TILE_ROWS)[:, None] * per_row + group[None, :]
        scales = fetch(where, there, MASKED or BK != DK)
    return codes, scales


@triton.jit
def scaled(values, factor):
    """Values `[BV, keys]` times factors `[BV, groups]`, each of which serves consecutive keys."""
    BV: tl.constexpr = values.shape[0]
    WIDTH: tl.constexpr = values.shape[1]
    GROUPS: tl.constexpr = factor.shape[1]
    if GROUPS == 1:
        return values * factor
    else:
        grouped = tl.reshape(values, (BV, GROUPS, WIDTH // GROUPS)) * factor[:, :, None]
        return tl.reshape(grouped, (BV, WIDTH))


@triton.jit
def stored_factor(scales, head_scale_ptr, SCALE: tl.constexpr):
    """What the payloads of each group are multiplied with, from fetched scales."""
    if SCALE == SCALE_E8M0:
        return decode_power_of_two(scales)
    elif SCALE == SCALE_E4M3:
        return decode(scales, E4M3) * tl.load(head_scale_ptr)
    else:
        return scales.to(tl.float32)


@triton.jit
def word_code(words, NUMBER: tl.constexpr, ELEMENT: tl.constexpr):
    """Code `NUMBER` of each word as a float32 `2**-126` (e2m1), `2**-120` (e4m3) or `2**-112` (e5m2) times its value.

    The sign is drawn out by an arithmetic shift that leaves exponent and fraction in their place; small codes become
    float32 subnormals, which products keep exactly once a factor brings them back.
    """
    if ELEMENT == E2M1:
        bits = ((words << (28 - 4 * NUMBER)) >> 6) & -2118123520
    elif ELEMENT == E4M3:
        bits = ((words << (24 - 8 * NUMBER)) >> 4) & -2014314496
    else:
        bits = ((words << (24 - 8 * NUMBER)) >> 3) & -1881145344
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def word_product(words, factor, vector, ELEMENT: tl.constexpr):
    """`S x` for the rows of a tile of words."""
    BK: tl.constexpr = vector.shape[0]
    if ELEMENT == E2M1:
        lifted = tl.reshape(vector * 9223372036854775808.0, (BK // 8, 2, 2, 2))
        even, odd = tl.split(lifted)
        e0, e1 = tl.split(even)
        o0, o1 = tl.split(odd)
        v0, v4 = tl.split(e0)
        v2, v6 = tl.split(e1)
        v1, v5 = tl.split(o0)
        v3, v7 = tl.split(o1)
        total = word_code(words, 0, ELEMENT) * v0[None, :]
        total += word_code(words, 1, ELEMENT) * v1[None, :]
        total += word_code(words, 2, ELEMENT) * v2[None, :]
        total += word_code(words, 3, ELEMENT) * v3[None, :]
        total += word_code(words, 4, ELEMENT) * v4[None, :]
        total += word_code(words, 5, ELEMENT) * v5[None, :]
        total += word_code(words, 6, ELEMENT) * v6[None, :]
        total += word_code(words, 7, ELEMENT) * v7[None, :]
        return tl.sum(scaled(total * 9223372036854775808.0, factor), axis=1)
    else:
        lift: tl.constexpr = 1152921504606846976.0 if ELEMENT == E4M3 else 72057594037927936.0  # pyright: ignore
        even, odd = tl.split(tl.reshape(vector * lift, (BK // 4, 2, 2)))
        v0, v2 = tl.split(even)
        v1, v3 = tl.split(odd)
        total = word_code(words, 0, ELEMENT) * v0[None, :]
        total += word_code(words, 1, ELEMENT) * v1[None, :]
        total += word_code(words, 2, ELEMENT) * v2[None, :]
        total += word_code(words, 3, ELEMENT) * v3[None, :]
        return tl.sum(scaled(total * lift, factor), axis=1)


@triton.jit
def word_values(words, factor, ELEMENT: tl.constexpr, SCALED: tl.constexpr, INTERPRETED: tl.constexpr):
    """The codes of each word times a factor per word: four or eight bfloat16 tensors (interpreted: float32)."""
    if INTERPRETED:
        if ELEMENT == E2M1:
            lifted = factor * 2.0**119 if SCALED else 2.0**126
            return (
                word_code(words, 0, ELEMENT) * lifted, word_code(words, 1, ELEMENT) * lifted,
                word_code(words, 2, ELEMENT) * lifted, word_code(words, 3, ELEMENT) * lifted,
                word_code(words, 4, ELEMENT) * lifted, word_code(words, 5, ELEMENT) * lifted,
                word_code(words, 6, ELEMENT) * lifted, word_code(words, 7, ELEMENT) * lifted,
            )  # fmt: skip
        else:
            lift: tl.constexpr = 2.0**120 if ELEMENT == E4M3 else 2.0**112
            return (
                word_code(words, 0, ELEMENT) * lift, word_code(words, 1, ELEMENT) * lift,
                word_code(words, 2, ELEMENT) * lift, word_code(words, 3, ELEMENT) * lift,
            )  # fmt: skip
    elif ELEMENT == E2M1:
        kinds: tl.constexpr = (
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
        )  # fmt: skip
        if SCALED:
            return tl.inline_asm_elementwise(
                _E2M1_SCALED_ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [words, (factor * 2.0**119).to(tl.bfloat16)],
                dtype=kinds, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _E2M1_PLAIN_ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], dtype=kinds, is_pure=True, pack=2
            )
    else:
        return tl.inline_asm_elementwise(
            _E4M3_ASM if ELEMENT == E4M3 else _E5M2_ASM, "=r,=r,=r,=r,r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def vector_pairs(
    key_at, key_step, query_at, query_step, DK: tl.constexpr, BK: tl.constexpr, ELEMENT: tl.constexpr
):  # fmt: skip
    """Two vectors as `matrix_products` takes them: for each place of a code in a word, four columns of each."""
    CODES: tl.constexpr = 8 if ELEMENT == E2M1 else 4
    word = tl.arange(0, BK // CODES)[:, None]
    # Four of each, because the tensor cores take no fewer than eight columns.
    of_key = tl.arange(0, 8)[None, :] < 4
    pairs = ()
    for n in tl.static_range(CODES):
        channel = word * CODES + n
        where = tl.where(of_key, key_at + channel * key_step, query_at + channel * query_step)
        pairs = pairs + (fetch(where, channel < DK, BK != DK),)
    return pairs


@triton.jit
def matrix_products(
    words, scales, head_scale_ptr, pairs, BK: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`S k` and `S q` for the rows of a tile of words and bfloat16 vectors."""
    BV: tl.constexpr = words.shape[0]
    WIDTH: tl.constexpr = words.shape[1]
    GROUPS: tl.constexpr = scales.shape[1]
    CODES: tl.constexpr = 8 if ELEMENT == E2M1 else 4
    OF_WORDS: tl.constexpr = SCALE == SCALE_E4M3
    factor = tl.full((1, 1), 1.0, tl.float32)
    if GROUPS > 1:
        stored = decode(scales, E4M3) if OF_WORDS else decode_power_of_two(scales)
        factor = tl.reshape(tl.broadcast_to(stored[:, :, None], (BV, GROUPS, WIDTH // GROUPS)), (BV, WIDTH))
    values = word_values(words, factor, ELEMENT, OF_WORDS, INTERPRETED)
    total = tl.zeros((BV, 8), tl.float32)
    for n in tl.static_range(CODES):
        value = values[n]
        if INTERPRETED:
            if GROUPS > 1 and not OF_WORDS:
                value = value * factor
            total = tl.dot(value, pairs[n].to(tl.float32), acc=total, input_precision="ieee")
        else:
            if GROUPS > 1 and not OF_WORDS:
                value = value * factor.to(tl.bfloat16)
            total = tl.dot(value, pairs[n], acc=total)
    recalled, inherited = tl.split(tl.sum(tl.reshape(total, (BV, 2, 4)), axis=2))
    if OF_WORDS:
        # The factor of a word left out 2**7; four equal columns were summed.
        scale = tl.load(head_scale_ptr) * 32.0
        return recalled * scale, inherited * scale
    else:
        recalled, inherited = recalled * 0.25, inherited * 0.25
        if GROUPS == 1:
            of_row = tl.sum(scales.to(tl.float32), axis=1)
            recalled, inherited = recalled * of_row, inherited * of_row
        return recalled, inherited


@triton.jit
def due_rows(slot_index, cursors, rows, WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """Which rows flush: how many, and the number of each among them (of any other row, 0), counted from 1."""
    index = tl.arange(0, ROWS)
    slot = tl.load(slot_index + index, mask=index < rows, other=-1)
    count = tl.load(cursors + slot, mask=slot >= 0, other=-1)
    due = ((slot >= 0) & (count == WINDOW - 1)).to(tl.int32)
    return tl.sum(due, axis=0), tl.cumsum(due, axis=0) * due


@triton.jit
def read_tile(
    codes, scales, head_scale_ptr, vector, BK: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    PACKED: tl.constexpr, WORDS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """`S x` for the rows of a fetched tile; `x` in chunks for a WIDE one."""
    if FORM == WIDE:
        found = chunk_product(decoded(codes, ELEMENT, BK), vector, BK)
        if SCALE != SCALE_NONE:
            found = found * tl.sum(stored_factor(scales, head_scale_ptr, SCALE), axis=1)
        return found
    elif WORDS:
        return word_product(codes, stored_factor(scales, head_scale_ptr, SCALE), vector, ELEMENT)
    else:
        low, high = decode_tile(codes, scales, head_scale_ptr, ELEMENT, SCALE, PACKED)
        vector_low, vector_high = as_tile(vector, PACKED)
        return product(low, high, vector_low, vector_high, PACKED)


@triton.jit
def decode_tile(codes, scales, head_scale_ptr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr):
    """The float32 values of fetched codes; of a 4-bit format those of the low and of the high halves of the bytes."""
    if PACKED:
        low = decode(codes & 15, ELEMENT)
        high = decode(codes >> 4, ELEMENT)
    else:
        low = decode(codes, ELEMENT)
        high = low
    if SCALE != SCALE_NONE:
        factor = stored_factor(scales, head_scale_ptr, SCALE)
        low = scaled(low, factor)
        if PACKED:
            high = scaled(high, factor)
        else:
            high = low
    return low, high


@triton.jit
def store_tile(
    state, philox, sequence, token, payload_ptr, scale_ptr, head_scale_ptr, divisor, head, rows, mask,
    COPY: tl.constexpr, MASKED: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP_KEYS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store the chunks of a tile of one head in a format; `philox` points to the seed's halves and the layer."""
    WIDTH: tl.constexpr = 32 if BK >= 32 else BK
    if ELEMENT == FP32:
        for c in tl.static_range(BK // WIDTH):
            place = c * WIDTH + tl.arange(0, WIDTH)
            where = payload_ptr + rows[:, None] * DK + place[None, :]
            if MASKED or BK != DK:
                tl.store(where, state[c], mask=mask[:, None] & (place < DK)[None, :])
            else:
                tl.store(where, state[c])
    else:
        values = to_flat(state, 0, BK // WIDTH)
        place = tl.arange(0, BK)[None, :]
        kept = tl.where(mask[:, None] & (place < DK), values, 0.0)
        if STOCHASTIC:
            words = philox_bits(
                tl.load(philox).to(tl.uint32), tl.load(philox + 1).to(tl.uint32),
                (tl.load(philox + 2) + COPY * 16777216).to(tl.uint32), sequence.to(tl.uint32), token.to(tl.uint32),
                head * DV + rows, DK, BK,
            )  # fmt: skip
        else:
            words = tl.zeros(values.shape, tl.uint32)
        largest = tl.max(tl.max(magnitude_bits(kept), axis=1), axis=0)
        store_state(
            kept, words, payload_ptr, scale_ptr, head_scale_ptr, largest, divisor, rows, mask, DK, ELEMENT, SCALE,
            TILE_ROWS, GROUP_KEYS, STOCHASTIC,
        )  # fmt: skip


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
def advance_cursors_kernel(slot_index, cursors, tokens, count, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Count the token that all layers have just read: one more record, or none after a flush."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_index + row, mask=row < count, other=-1).to(tl.int64)
    used = slot >= 0
    cursor = tl.load(cursors + slot, mask=used, other=0) + 1
    tl.store(cursors + slot, tl.where(cursor >= WINDOW, 0, cursor), mask=used)
    token = tl.load(tokens + slot, mask=used, other=0)
    tl.store(tokens + slot, token + 1, mask=used)
