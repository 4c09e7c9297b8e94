"""Scaled codes of 8 and 4 bits, read as 32-bit words that hold 4 or 8 of them."""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from replayssm.decode_chunks import fetch
from replayssm.formats.triton_bits import E2M1, E4M3, INT8, decode, decode_power_of_two
from replayssm.formats.triton_payload import SCALE_E4M3, SCALE_E8M0

# Two words in, the bfloat16 of code n of both in register n: sign and code move to their places in both halves at once,
# which leaves the value off by a power of two, and a product puts that right.
_E2M1_ASM = tl.constexpr(
    """{
    .reg .b32 l, h, t, s, f;
    mov.b32 f, FACTOR;
    prmt.b32 l, $8, $9, 0x5410;
    prmt.b32 h, $8, $9, 0x7632;
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
    }"""
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
    float32 subnormals, which products keep exactly once a factor brings them back. An integer is its own value.
    """
    if ELEMENT == INT8:
        code = ((words << (24 - 8 * NUMBER)) >> 24).to(tl.float32)
    elif ELEMENT == E2M1:
        code = (((words << (28 - 4 * NUMBER)) >> 6) & -2118123520).to(tl.float32, bitcast=True)
    elif ELEMENT == E4M3:
        code = (((words << (24 - 8 * NUMBER)) >> 4) & -2014314496).to(tl.float32, bitcast=True)
    else:
        code = (((words << (24 - 8 * NUMBER)) >> 3) & -1881145344).to(tl.float32, bitcast=True)
    return code


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
        # Half of what a code is off by each time, which is no float32 as a whole.
        lift: tl.constexpr = 1.0 if ELEMENT == INT8 else 2.0**60 if ELEMENT == E4M3 else 2.0**56
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
            lift: tl.constexpr = 1.0 if ELEMENT == INT8 else 2.0**120 if ELEMENT == E4M3 else 2.0**112
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
    elif ELEMENT == INT8:
        return (
            word_code(words, 0, ELEMENT).to(tl.bfloat16), word_code(words, 1, ELEMENT).to(tl.bfloat16),
            word_code(words, 2, ELEMENT).to(tl.bfloat16), word_code(words, 3, ELEMENT).to(tl.bfloat16),
        )  # fmt: skip
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
