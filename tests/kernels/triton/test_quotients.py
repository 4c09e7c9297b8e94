"""Quotients from a shared reciprocal and one correction are those of a division, bit for bit.

Triton's interpreter has no fused operations, so the formulas are followed here with fused operations of their own, from
every estimate that a card may start with; on a card the compiled ones are compared too.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from replayssm.formats.triton_payload import quotients, reciprocal
from replayssm.launch import launch

Floats = NDArray[np.float32]
LIFTED, LIFT = np.float32(2.0**-24), np.float32(2.0**100)
ESTIMATES = (-1, 0, 1)
SIGNIFICANDS = 1 << 23


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """`a * b + c`, rounded once: in float64 to the odd neighbour where it is inexact, then to float32."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where((lost > 0) == (total > 0), 1, -1)
    return np.where((lost != 0) & even, (total.view(np.int64) + toward).view(np.float64), total).astype(np.float32)


def estimates(x: Floats, off: int) -> Floats:
    """Reciprocals that are off by some units of the last place."""
    return ((np.float32(1) / x).view(np.int32) + off).view(np.float32)


def reciprocal_from(x: Floats, estimate: Floats) -> Floats:
    """`reciprocal`, from an estimate."""
    odd = (estimate.view(np.int32) | 1).view(np.float32)
    rest = fused(-x, odd, np.ones_like(x))
    return fused(fused(rest, rest, rest), odd, odd)


def quotients_from(values: Floats, over: Floats, inverse: Floats) -> Floats:
    """`quotients`."""
    quotient = values * inverse
    return fused(fused(-over, quotient, values), inverse, quotient)


def one_step(x: Floats, estimate: Floats) -> Floats:
    """Planted: a single step of Newton's."""
    odd = (estimate.view(np.int32) | 1).view(np.float32)
    return fused(fused(-x, odd, np.ones_like(x)), odd, odd)


def even_allowed(x: Floats, estimate: Floats) -> Floats:
    """Planted: estimates as they come."""
    rest = fused(-x, estimate, np.ones_like(x))
    return fused(fused(rest, rest, rest), estimate, estimate)


def hard_pairs(significands: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs in `[1, 2)` whose quotient is within 3/2 units of `1 / divisor` of a tie between neighbours.

    With dividend `A`, divisor `B` and quotient `Q = k + 1/2 + D/(2B)` in units of their last places, `A * 2**s = D`
    modulo `B` for `s` 24 or 25. An error of the corrected quotient is below `3/(2B)`, so `|D|` up to 3 covers all.

    Args:
        significands: Those of the divisors, int64 in `[2**23, 2**24)`.
    """
    dividends: list[Tensor] = []
    divisors: list[Tensor] = []
    for shift, distance, twos in product((24, 25), (-3, -2, -1, 1, 2, 3), range(3)):
        if distance % (1 << twos):
            continue
        # Where the divisor is even, the congruence can be halved.
        here = significands[significands & ((2 << twos) - 1) == 1 << twos]
        modulus = here >> twos
        x = torch.remainder(torch.full_like(here, distance >> twos), modulus)
        for _ in range(shift - twos):
            x = (x + modulus * (x & 1)) >> 1
        for turn in range(2 << twos):
            dividend = x + turn * modulus
            inside = (dividend >= SIGNIFICANDS) & (dividend < 2 * SIGNIFICANDS)
            dividends.append(dividend[inside])
            divisors.append(here[inside])
    return torch.cat(dividends) / SIGNIFICANDS, torch.cat(divisors) / SIGNIFICANDS


def sampled_pairs(every: int = 1) -> tuple[Floats, Floats]:
    """Hard pairs of divisors at random, around powers of two and three halves, and of the hardest reciprocals."""
    drawn = torch.randint(SIGNIFICANDS, 2 * SIGNIFICANDS, (100_000,), generator=torch.Generator().manual_seed(0))
    near = torch.arange(512)
    edges = [SIGNIFICANDS + near, 3 * SIGNIFICANDS // 2 - 256 + near, 2 * SIGNIFICANDS - 1 - near]
    hardest = SIGNIFICANDS + torch.tensor([0x069913, 0x07CC45, 0x6E4BC5])
    dividends, divisors = hard_pairs(torch.cat([drawn, *edges, hardest])[::every])
    return dividends.numpy(), divisors.numpy()


def wrong(step: Callable[[Floats, Floats], Floats]) -> int:
    dividends, divisors = sampled_pairs()
    assert len(dividends) > 500_000
    return sum(
        int(
            (
                quotients_from(dividends, divisors, step(divisors, estimates(divisors, off))) != dividends / divisors
            ).sum()
        )
        for off in ESTIMATES
    )


def test_fused_operations_round_once() -> None:
    make = np.random.default_rng(1)
    a, b = (make.standard_normal(2000).astype(np.float32) for _ in range(2))
    nearly = np.where(np.arange(2000) % 2, -(a * b), make.standard_normal(2000) * 2.0**-24).astype(np.float32)
    got = fused(a, b, nearly)
    for i in range(2000):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(nearly[i]))
        near = [got[i], np.nextafter(got[i], np.float32(np.inf)), np.nextafter(got[i], np.float32(-np.inf))]
        assert min(near, key=lambda x: abs(Fraction(float(x)) - exact)) == got[i]


def test_hardest_quotients_are_rounded_correctly() -> None:
    assert wrong(reciprocal_from) == 0


@pytest.mark.slow
def test_reciprocals_that_are_off_by_one_make_no_quotient_wrong() -> None:
    """The only seven divisors that have one, with all dividends: `hard_pairs` takes reciprocals to be rounded."""
    dividends = (np.arange(SIGNIFICANDS, 2 * SIGNIFICANDS) / SIGNIFICANDS).astype(np.float32)
    seen = 0
    for significand in (0x0EFA43, 0x384A93, 0x50DD0D, 0x543D43, 0x61368B, 0x625473, 0x6E4BC5):
        divisor = np.array([(SIGNIFICANDS + significand) / SIGNIFICANDS], dtype=np.float32)
        found = {float(reciprocal_from(divisor, estimates(divisor, off))[0]) for off in ESTIMATES}
        for inverse in found - {float(np.float32(1) / divisor[0])}:
            seen += 1
            got = quotients_from(dividends, divisor, np.array([inverse], dtype=np.float32))
            assert np.array_equal(got, dividends / divisor)
    assert seen == 7


def test_planted_shortcuts_are_seen() -> None:
    assert wrong(one_step) > 0
    assert wrong(even_allowed) > 0
    dividends, divisors = sampled_pairs()
    assert int((dividends * (np.float32(1) / divisors) != dividends / divisors).sum()) > 0


@pytest.mark.parametrize("lifted", [True, False])
def test_no_remainder_underflows(lifted: bool) -> None:
    """Scales from the smallest to the largest, quotients down to 2**-57; planted: scales as they are."""
    make = np.random.default_rng(2)
    dividends, divisors = sampled_pairs(20)
    exponent = make.integers(-126, 125, len(divisors))
    scale = np.ldexp(divisors, exponent).astype(np.float32)
    over_grid = make.integers(-57, 15, len(divisors))
    with np.errstate(over="ignore"):
        values = np.ldexp(dividends, exponent + over_grid).astype(np.float32)
        # What is subnormal may have lost digits; it is a value like any other.
        inside = np.isfinite(values) & (values > 0)
    values, scale = values[inside], scale[inside]
    want = values / scale
    lift = np.where((scale < LIFTED) & lifted, LIFT, np.float32(1))
    over = scale * lift
    got = quotients_from(values * lift, over, reciprocal_from(over, estimates(over, 0)))
    large = want >= 2.0**-57
    assert large.sum() > 10_000
    assert bool((got != want)[large].any()) is not lifted
    assert bool((got[~large] <= 2.0**-56).all())


def test_signs_do_not_come_from_quotients() -> None:
    """A corrected quotient of a negative zero has lost its sign, which is why payloads take those of the values."""
    zero, over = np.array([-0.0], dtype=np.float32), np.array([3.0], dtype=np.float32)
    quotient = quotients_from(zero, over, reciprocal_from(over, estimates(over, 0)))
    assert quotient[0] == 0
    assert not np.signbit(quotient[0])
    assert np.signbit(zero / over)[0]


@triton.jit
def quotient_kernel(values_ptr, over_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values, over = (
        tl.load(values_ptr + at, mask=at < count, other=1.0),
        tl.load(over_ptr + at, mask=at < count, other=1.0),
    )
    tl.store(out_ptr + at, quotients(values, over, reciprocal(over)), mask=at < count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_card_rounds_the_hardest_quotients_of_every_divisor_correctly() -> None:
    for first in range(SIGNIFICANDS, 2 * SIGNIFICANDS, SIGNIFICANDS // 4):
        dividends, divisors = hard_pairs(torch.arange(first, first + SIGNIFICANDS // 4, device="cuda"))
        got = torch.full_like(dividends, torch.nan)
        launch(quotient_kernel, (-(-len(got) // 1024),), dividends, divisors, got, len(got), BLOCK=1024, num_warps=4)
        # Divided in float64: a quotient of float32 numbers is never so near a tie that this rounds it twice.
        assert torch.equal(got, (dividends.double() / divisors.double()).float())
