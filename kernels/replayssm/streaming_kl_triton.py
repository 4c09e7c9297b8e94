"""Softmax statistics and divergence terms of all tokens from the logits of one block of words, added to those before.

One program per token keeps the block's logits of the reference in registers and takes the arms one after another, so
that a comparison of an arm with the reference needs no other thread.
"""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def finished_logits(z, multiplier, divisor, cap, HAS_CAP: tl.constexpr):
    """What a model does to its logits after the projection."""
    z = tl.div_rn(z * multiplier, tl.zeros_like(z) + divisor)
    if HAS_CAP:
        x = tl.div_rn(z, tl.zeros_like(z) + cap)
        # tanh; beyond 20 it is 1 to float32, and the exponential stays finite.
        grown = tl.exp(2.0 * tl.minimum(tl.abs(x), 20.0))
        magnitude = 1.0 - tl.div_rn(tl.zeros_like(z) + 2.0, grown + 1.0)
        # Near zero the difference loses digits and the series does not.
        square = x * x
        small = tl.abs(x) * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        magnitude = tl.where(square < 0.01, small, magnitude)
        z = tl.where(x != x, x, tl.where(x < 0, -magnitude, magnitude)) * cap
    return z


@triton.jit
def small_excess(d):
    """`exp(d) - 1 - d` for `|d| <= 1`, to a relative error of a few float32 epsilons."""
    series = 1.0 / 3628800.0
    series = series * d + 1.0 / 362880.0
    series = series * d + 1.0 / 40320.0
    series = series * d + 1.0 / 5040.0
    series = series * d + 1.0 / 720.0
    series = series * d + 1.0 / 120.0
    series = series * d + 1.0 / 24.0
    series = series * d + 1.0 / 6.0
    series = series * d + 0.5
    return series * d * d


@triton.jit
def row_logits(
    logits, row, token, time, stride, bias, inside, word, multiplier, divisor, cap,
    HAS_BIAS: tl.constexpr, FINISH: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """The block's logits of one row and token, after everything that the model does to them."""
    z = tl.load(logits + (row * time + token) * stride + inside, mask=inside < stride, other=0.0)
    if HAS_BIAS:
        z += tl.load(bias + word, mask=inside < stride, other=0.0).to(tl.float32)
    if FINISH:
        z = finished_logits(z, multiplier, divisor, cap, HAS_CAP)
    return z


@triton.jit
def add_row(z, there, word, first_word, stride, target, fresh, at, size, place_at):
    """Add a block to the running maximum, its first place, the sum of exponentials and the target's logit of a row.

    Returns:
        The maximum before and after.
    """
    shown = tl.where(there, z, float("-inf"))
    top = tl.load(at, mask=fresh == 0, other=float("-inf"))
    mass = tl.load(at + size, mask=fresh == 0, other=0.0)
    best = tl.load(place_at, mask=fresh == 0, other=2147483647)
    chosen = tl.load(at + 2 * size, mask=fresh == 0, other=0.0)
    highest = tl.max(shown, axis=0)
    if highest > top:
        best = tl.min(tl.where(shown == highest, word, 2147483647), axis=0)
    new_top = tl.maximum(top, highest)
    mass = mass * tl.exp(top - new_top) + tl.sum(tl.exp(shown - new_top), axis=0)
    if (target >= first_word) & (target < first_word + stride):
        chosen += tl.sum(tl.where(word == target, z, 0.0), axis=0)
    tl.store(at, new_top)
    tl.store(at + size, mass)
    tl.store(at + 2 * size, chosen)
    tl.store(place_at, best)
    return top, new_top


@triton.jit(do_not_specialize=["first_word", "fresh"])
def streaming_kl_kernel(
    logits, bias, targets, statistics, places,
    rows, time, stride, first_word, fresh,
    multiplier, divisor, cap,
    BN: tl.constexpr, HAS_BIAS: tl.constexpr, FINISH: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """`logits` is `[rows, time, stride]`; `replayssm.streaming_kl.StreamedStatistics` says what is written where."""
    token = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BN)
    there = inside < stride
    word = first_word + inside
    target = tl.load(targets + token)
    size = time.to(tl.int64) * rows
    at = statistics + token * rows
    of_reference = row_logits(
        logits, 0, token, time, stride, bias, inside, word, multiplier, divisor, cap, HAS_BIAS, FINISH, HAS_CAP
    )
    old, new = add_row(of_reference, there, word, first_word, stride, target, fresh, at, size, places + token * rows)
    p = tl.exp(tl.where(there, of_reference, float("-inf")) - new)
    shrink = tl.exp(old - new)
    mass = tl.sum(p, axis=0)
    for moment in tl.static_range(3, 6):
        tl.store(at + moment * size, 0.0)
    for row in range(1, rows):
        z = row_logits(
            logits, row, token, time, stride, bias, inside, word, multiplier, divisor, cap, HAS_BIAS, FINISH, HAS_CAP
        )
        add_row(z, there, word, first_word, stride, target, fresh, at + row, size, places + token * rows + row)
        # Moments, under the reference, of the difference of logits to it.
        difference = tl.where(there, z - of_reference, 0.0)
        centre = tl.load(at + 3 * size + row, mask=fresh == 0, other=0.0)
        first = tl.load(at + 4 * size + row, mask=fresh == 0, other=0.0)
        second = tl.load(at + 5 * size + row, mask=fresh == 0, other=0.0)
        if fresh != 0:
            # Any centre will do; near the mean the least is lost.
            centre = tl.sum(p * difference, axis=0) / mass
        d = difference - centre
        term = p * small_excess(d)
        if tl.max(tl.where(there, tl.abs(d), 0.0), axis=0) > 1.0:
            # Rare in a block. Where an arm has far more mass, p may be 0 and exp(d) infinite; their product is neither.
            far = tl.exp(z - centre - new) - p * (1.0 + d)
            below = p * (tl.exp(tl.minimum(d, 1.0)) - 1.0 - d)
            term = tl.where(tl.abs(d) <= 1.0, term, tl.where(d > 1.0, far, below))
        first = first * shrink + tl.sum(tl.where(there, p * d, 0.0), axis=0)
        second = second * shrink + tl.sum(tl.where(there, term, 0.0), axis=0)
        tl.store(at + 3 * size + row, centre)
        tl.store(at + 4 * size + row, first)
        tl.store(at + 5 * size + row, second)
