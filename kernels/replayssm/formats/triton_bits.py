"""Random words and single numbers in Triton: Philox, rounding to a grid, codes of stored numbers and back.

Everything is integer arithmetic, comparisons and exact products with powers of two, so the bits are those of the
PyTorch path on every device, and on cards without conversion instructions for a type.
"""

# pyright: basic, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton import knobs

FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
E4M3 = tl.constexpr(3)
E5M2 = tl.constexpr(4)
E2M1 = tl.constexpr(5)
INT8 = tl.constexpr(6)
INT16 = tl.constexpr(7)

_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_BIAS = tl.constexpr(127)
_SHIFT = tl.constexpr(23)


@triton.jit
def magnitude_bits(values):
    """Bit patterns of the magnitudes of float32 values, which order as the magnitudes do, NaN above infinity."""
    return values.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def with_sign(magnitudes, patterns):
    """Magnitudes with the sign bits of int32 patterns; a negative zero stays one, which `-x` would not keep."""
    return (magnitudes.to(tl.int32, bitcast=True) | (patterns & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def philox(seed_low, seed_high, first, token, sequence, fourth):
    """The four words of Philox4x32-10 for the counter `(first, token, sequence, fourth)`; every argument is uint32."""
    k0 = seed_low
    k1 = seed_high
    c0 = first
    c1 = tl.zeros_like(first) + token
    c2 = tl.zeros_like(first) + sequence
    c3 = tl.zeros_like(first) + fourth
    for _ in tl.static_range(10):
        wide0 = c0.to(tl.uint64) * 0xD2511F53
        wide2 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (wide2 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (wide0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = (wide2 & 0xFFFFFFFF).to(tl.uint32)
        c3 = (wide0 & 0xFFFFFFFF).to(tl.uint32)
        k0 = ((k0.to(tl.uint64) + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)
        k1 = ((k1.to(tl.uint64) + 0xBB67AE85) & 0xFFFFFFFF).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def philox_bits(seed_low, seed_high, layer_copy, sequence, token, rows, D_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Random words of the elements of some rows of a state, as `replayssm.formats.random_bits` gives them.

    Args:
        seed_low: Lower half of the seed, uint32.
        seed_high: Upper half of the seed, uint32.
        layer_copy: `layer + copy * 2**24`, uint32.
        sequence: Sequence id, uint32.
        token: Index of the last token folded into the state, uint32.
        rows: `head * d_v + row` of each row of the tile, int32 `[BLOCK_V]`.
        D_K: Keys per row.
        BLOCK_K: Power of two of at least `D_K` and 4.

    Returns:
        uint32 `[BLOCK_V, BLOCK_K]`; unspecified beyond `D_K`.
    """
    if D_K % 4 == 0:
        # One counter gives the words of four neighbours.
        first = rows[:, None] * (D_K // 4) + tl.arange(0, BLOCK_K // 4)[None, :]
        w0, w1, w2, w3 = philox(seed_low, seed_high, first.to(tl.uint32), token, sequence, layer_copy)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        words = tl.reshape(words, (rows.shape[0], BLOCK_K))
    else:
        element = rows[:, None] * D_K + tl.arange(0, BLOCK_K)[None, :]
        w0, w1, w2, w3 = philox(seed_low, seed_high, (element // 4).to(tl.uint32), token, sequence, layer_copy)
        place = element % 4
        words = tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))
    return words


@triton.jit
def _cut_sum(a, factor: tl.constexpr, b):
    """`a * factor + b` for a product that is exact, rounded towards zero; every number is positive."""
    if _INTERPRETED:
        total = a * factor + b
        # Where rounding to nearest went up, the float32 below.
        up = total - a * factor > b
        total = (total.to(tl.int32, bitcast=True) - up.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        total = tl.inline_asm_elementwise(
            "fma.rz.f32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, tl.full(a.shape, factor, tl.float32), b],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return total


@triton.jit
def _add_carry(x, a, b):
    """int32 `x`, and one more where the uint32 `a + b` leaves 32 bits."""
    if _INTERPRETED:
        total = x + ((a ^ 0xFFFFFFFF) < b).to(tl.int32)
    else:
        total = tl.inline_asm_elementwise(
            "{ .reg .u32 low; add.cc.u32 low, $2, $3; addc.u32 $0, $1, 0; }",
            "=r,r,r,r",
            [x, a, b],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return total


@triton.jit
def round_to_grid(
    magnitudes,
    words,
    SMALLEST: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    INTEGER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Round magnitudes to the grid of a type, to nearest even or stochastically.

    Between grid neighbours `lo <= x < hi`, with `f` the distance from `lo` in units of `2**-32` of the gap and cut to a
    whole number, the result is `hi` if `word + f >= 2**32`.

    Args:
        magnitudes: Non-negative float32 values, below 2**18 (2**22 for integers), or NaN, which stays NaN.
        words: uint32, one per value; ignored unless STOCHASTIC.
        SMALLEST: Exponent of the smallest normal value; 0 for integers.
        MANTISSA_BITS: Width of the fraction; 0 for integers.
        INTEGER: Whether the gap is 1 everywhere.
        STOCHASTIC: Whether the words decide.

    Returns:
        float32 grid values; the grid continues beyond the largest value of the type.
    """
    # At this multiple of the power of two below a value, the neighbours of a float32 are one gap apart, so a sum rounds
    # to the grid. Products with powers of two are exact, so fused or not is the same.
    ANCHOR: tl.constexpr = 2.0 ** (23 - MANTISSA_BITS)
    if INTEGER:
        power = tl.full(magnitudes.shape, 1.0, tl.float32)
    else:
        normal = tl.maximum(magnitudes, 2.0**SMALLEST)
        power = (normal.to(tl.int32, bitcast=True) & _INFINITY).to(tl.float32, bitcast=True)
    anchor = tl.full(power.shape, ANCHOR, tl.float32)
    if STOCHASTIC:
        # The last bit of this sum counts gaps.
        total = _cut_sum(power, ANCHOR, magnitudes)
        low = tl.fma(power, -anchor, total)
        # 2**(32 + MANTISSA_BITS) / power: its exponent, of which 512 falls out of 32 bits.
        inverse_gap = ((2 * _BIAS + 32 + MANTISSA_BITS - 512) << _SHIFT) - power.to(tl.int32, bitcast=True)
        beyond = (magnitudes - low) * inverse_gap.to(tl.float32, bitcast=True)
        if _INTERPRETED:
            # NumPy warns when it converts NaN.
            beyond = tl.where(beyond != beyond, 0.0, beyond)
        total = _add_carry(total.to(tl.int32, bitcast=True), words, beyond.to(tl.uint32)).to(tl.float32, bitcast=True)
    else:
        total = tl.fma(power, anchor, magnitudes)
    return tl.fma(power, -anchor, total)


@triton.jit
def round_to_bfloat16(values, words, stochastic):
    """Round float32 values to bfloat16, to nearest even or stochastically; NaN stays NaN.

    A bfloat16 is the upper half of a float32, so a lower half is added and cut off; the carry out of the largest finite
    value is an infinity.
    """
    patterns = values.to(tl.int32, bitcast=True)
    # NaN payloads are cut so that the addition cannot carry out of them.
    kept = tl.minimum(patterns & _MAGNITUDE, 0x7FFF0000)
    lower = tl.where(stochastic, (words >> 16).to(tl.int32), ((patterns >> 16) & 1) + 0x7FFF)
    rounded = (kept + lower) & -65536
    return (rounded | (patterns & ~_MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def encode(payload, ELEMENT: tl.constexpr):
    """The code of each payload, which must be a value of the type: what PyTorch's casts store.

    Args:
        payload: float32.
        ELEMENT: Element type.

    Returns:
        float32 for fp32, float16 for fp16, int16 for int16 and bf16 (its bit pattern), int8 for int8, and uint8 for
        e4m3, e5m2 and e2m1 (in the low half). NaN is 0 in types without one.
    """
    bits = payload.to(tl.int32, bitcast=True)
    sign = (bits >> 31) & 1
    magnitude = bits & _MAGNITUDE
    is_nan = magnitude > _INFINITY
    if ELEMENT == FP32:
        codes = payload
    elif ELEMENT == FP16:
        codes = payload.to(tl.float16)
    elif ELEMENT == BF16:
        codes = (bits >> 16).to(tl.int16)
    elif ELEMENT == INT16:
        codes = tl.where(is_nan, 0.0, payload).to(tl.int16)
    elif ELEMENT == INT8:
        codes = tl.where(is_nan, 0.0, payload).to(tl.int8)
    elif ELEMENT == E4M3:
        code = (magnitude.to(tl.float32, bitcast=True) * 2.0**-120).to(tl.int32, bitcast=True) >> 20
        codes = (tl.where(is_nan, 0x7F, code) | (sign << 7)).to(tl.uint8)
    elif ELEMENT == E5M2:
        code = (magnitude.to(tl.float32, bitcast=True) * 2.0**-112).to(tl.int32, bitcast=True) >> 21
        code = tl.where(magnitude == _INFINITY, 0x7C, code)
        codes = (tl.where(is_nan, 0x7F, code) | (sign << 7)).to(tl.uint8)
    else:
        code = (magnitude.to(tl.float32, bitcast=True) * 2.0**-126).to(tl.int32, bitcast=True) >> 22
        codes = tl.where(is_nan, 0, code | (sign << 3)).to(tl.uint8)
    return codes


@triton.jit
def decode(codes, ELEMENT: tl.constexpr):
    """The float32 value of each code, the inverse of `encode`."""
    if ELEMENT == FP32:
        values = codes
    elif ELEMENT == BF16:
        values = (codes.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif ELEMENT == E4M3:
        code = codes.to(tl.int32)
        values = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
        values = tl.where((code & 0x7F) == 0x7F, float("nan"), values)
        values = with_sign(values, code << 24)
    elif ELEMENT == E5M2:
        # A half-precision float without its lower byte.
        values = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif ELEMENT == E2M1:
        code = codes.to(tl.int32)
        values = with_sign(((code & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126, code << 28)
    else:
        values = codes.to(tl.float32)
    return values


@triton.jit
def encode_power_of_two(scale):
    """The E8M0 code of a scale that is a power of two or NaN, uint8."""
    bits = scale.to(tl.int32, bitcast=True)
    return tl.where(bits > _INFINITY, 0xFF, bits >> _SHIFT).to(tl.uint8)


@triton.jit
def decode_power_of_two(codes):
    """The float32 value of each E8M0 code."""
    code = codes.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, code << _SHIFT)
    return tl.where(code == 0xFF, float("nan"), bits.to(tl.float32, bitcast=True))
