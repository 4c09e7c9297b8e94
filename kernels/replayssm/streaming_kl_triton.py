"""Projection, softmax statistics and divergence terms of a block of tokens in one pass over a range of the vocabulary.

The rows of one token (the reference, the arms, padding up to a power of two) lie next to each other in the tile of
logits, so that comparing an arm with the reference stays within a warp. No logit is written to memory.
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
def excess(d):
    """`exp(d) - 1 - d` for `d <= 1`, to a relative error of a few float32 epsilons."""
    series = 1.0 / 3628800.0
    series = series * d + 1.0 / 362880.0
    series = series * d + 1.0 / 40320.0
    series = series * d + 1.0 / 5040.0
    series = series * d + 1.0 / 720.0
    series = series * d + 1.0 / 120.0
    series = series * d + 1.0 / 24.0
    series = series * d + 1.0 / 6.0
    series = series * d + 0.5
    return tl.where(tl.abs(d) <= 1.0, series * d * d, tl.exp(tl.minimum(d, 1.0)) - 1.0 - d)


@triton.jit
def streaming_kl_kernel(
    hidden, weight, bias, targets, statistics, places,
    rows, time, width, vocabulary, per_split,
    hidden_row, hidden_time, hidden_step, weight_row, weight_step,
    multiplier, divisor, cap,
    ROWS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    HAS_BIAS: tl.constexpr, FINISH: tl.constexpr, HAS_CAP: tl.constexpr, RAISE: tl.constexpr,
):  # fmt: skip
    """`replayssm.streaming_kl.StreamedStatistics` says what is written where."""
    M: tl.constexpr = ROWS * BT
    block = tl.program_id(0)
    split = tl.program_id(1)
    lane = tl.arange(0, M)
    token = block * BT + lane // ROWS
    row = lane % ROWS
    used = (token < time) & (row < rows)
    from_here = hidden + row.to(tl.int64) * hidden_row + token.to(tl.int64) * hidden_time

    tokens = block * BT + tl.arange(0, BT)
    number = tl.arange(0, ROWS)
    is_reference = (number == 0)[None, :, None]
    target = tl.load(targets + tokens, mask=tokens < time, other=-1)

    top = tl.full((BT, ROWS), float("-inf"), tl.float32)
    best = tl.full((BT, ROWS), 2147483647, tl.int32)
    mass = tl.zeros((BT, ROWS), tl.float32)
    chosen = tl.zeros((BT, ROWS), tl.float32)
    centre = tl.zeros((BT, ROWS), tl.float32)
    first = tl.zeros((BT, ROWS), tl.float32)
    second = tl.zeros((BT, ROWS), tl.float32)
    begin = split * per_split
    end = tl.minimum(begin + per_split, vocabulary)
    for start in tl.range(begin, end, BN):
        words = start + tl.arange(0, BN)
        there = words < end
        z = tl.zeros((M, BN), tl.float32)
        for at in tl.range(0, width, BD):
            channel = at + tl.arange(0, BD)
            inside = channel < width
            h = tl.load(
                from_here[:, None] + channel[None, :] * hidden_step, mask=used[:, None] & inside[None, :], other=0.0
            )
            w = tl.load(
                weight + words.to(tl.int64)[None, :] * weight_row + channel[:, None] * weight_step,
                mask=inside[:, None] & there[None, :],
                other=0.0,
            )
            if RAISE:
                h = h.to(tl.float32)
                w = w.to(tl.float32)
            z = tl.dot(h, w, z, input_precision="ieee")
        if HAS_BIAS:
            z += tl.load(bias + words, mask=there, other=0.0).to(tl.float32)[None, :]
        if FINISH:
            z = finished_logits(z, multiplier, divisor, cap, HAS_CAP)
        z = tl.reshape(z, (BT, ROWS, BN))
        real = there[None, None, :]
        shown = tl.where(real, z, float("-inf"))

        # Running maximum, its first place, sum of exponentials, logit of the true next token.
        highest = tl.max(shown, axis=2)
        place = tl.min(tl.where(shown == highest[:, :, None], words[None, None, :], 2147483647), axis=2)
        best = tl.where(highest > top, place, best)
        new_top = tl.maximum(top, highest)
        mass = mass * tl.exp(top - new_top) + tl.sum(tl.exp(shown - new_top[:, :, None]), axis=2)
        chosen += tl.sum(tl.where(words[None, None, :] == target[:, None, None], z, 0.0), axis=2)

        # Moments, under the reference, of the difference of logits to it.
        of_reference = tl.sum(tl.where(is_reference, shown, 0.0), axis=1)
        old_reference = tl.sum(tl.where((number == 0)[None, :], top, 0.0), axis=1)
        new_reference = tl.sum(tl.where((number == 0)[None, :], new_top, 0.0), axis=1)
        p = tl.exp(of_reference - new_reference[:, None])[:, None, :]
        difference = tl.where(real, z - tl.sum(tl.where(is_reference, z, 0.0), axis=1)[:, None, :], 0.0)
        if start == begin:
            # Any centre will do; near the mean the least is lost.
            centre = tl.sum(p * difference, axis=2) / tl.sum(p, axis=2)
        d = difference - centre[:, :, None]
        # Where an arm has far more mass than the reference, p may be 0 and exp(d) infinite; their product is neither.
        far = tl.exp(shown - centre[:, :, None] - new_reference[:, None, None]) - p * (1.0 + d)
        term = tl.where(d > 1.0, far, p * excess(d))
        shrink = tl.exp(old_reference - new_reference)[:, None]
        first = first * shrink + tl.sum(tl.where(real, p * d, 0.0), axis=2)
        second = second * shrink + tl.sum(tl.where(real, term, 0.0), axis=2)
        top = new_top

    size = time.to(tl.int64) * rows
    where = tokens.to(tl.int64)[:, None] * rows + number[None, :]
    keep = (tokens < time)[:, None] & (number < rows)[None, :]
    out = statistics + split.to(tl.int64) * 6 * size + where
    tl.store(out, top, mask=keep)
    tl.store(out + size, mass, mask=keep)
    tl.store(out + 2 * size, chosen, mask=keep)
    tl.store(out + 3 * size, centre, mask=keep)
    tl.store(out + 4 * size, first, mask=keep)
    tl.store(out + 5 * size, second, mask=keep)
    tl.store(places + split.to(tl.int64) * size + where, best, mask=keep)
