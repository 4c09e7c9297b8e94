"""Products of float32 numbers as sums of bfloat16 products, against float64 and a bound that is derived."""

from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm.launch import is_interpreted, launch

triton: Any = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")

from replayssm import triton_window  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
product: Any = triton_window.product
in_parts: Any = triton_window.in_parts
ROWS, INNER, COLUMNS = 16, 32, 16


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, PRODUCTS: tl.constexpr):  # pyright: ignore  # noqa: ANN001, ANN201, N803
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], product(a, b, PRODUCTS))


@triton.jit
def parts_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, PRODUCTS: tl.constexpr):  # pyright: ignore  # noqa: ANN001, ANN201, N803
    at = tl.arange(0, SIZE)
    first, second, third = in_parts(tl.load(x_ptr + at), PRODUCTS)
    tl.store(out_ptr + at, first.to(tl.float32))
    tl.store(out_ptr + SIZE + at, second.to(tl.float32))
    tl.store(out_ptr + 2 * SIZE + at, third.to(tl.float32))


def code(name: str) -> int:
    """The number by which the kernels know the products of a name, where they run."""
    return {"ieee": 0, "bf16": 3 if is_interpreted() else 2, "bf16x6": 5 if is_interpreted() else 4}[name]


def multiply(a: Tensor, b: Tensor, name: str) -> Tensor:
    out = torch.full((ROWS, COLUMNS), torch.nan, device=DEVICE)
    launch(
        product_kernel, (1,), a.to(DEVICE), b.to(DEVICE), out,
        M=ROWS, K=INNER, N=COLUMNS, PRODUCTS=code(name), num_warps=1,
    )  # fmt: skip
    return out.cpu()


def operands(spread: float) -> tuple[Tensor, Tensor]:
    """Numbers with all 24 bits in use, over so many powers of two, of both signs so that sums cancel."""
    make = torch.Generator().manual_seed(int(spread))

    def draw(*size: int) -> Tensor:
        exponent = spread * (torch.rand(size, generator=make) - 0.5)
        return torch.randn(size, generator=make) * exponent.exp2()

    return draw(ROWS, INNER), draw(INNER, COLUMNS)


@pytest.mark.parametrize("spread", [0.0, 40.0])
def test_six_products_are_a_float32_product(spread: float) -> None:
    """At most 2**-23 of each product is left out, and each of 6 * 32 sums errs by 2 units at most of the magnitudes.

    A tensor core cuts sums off where others round them, hence 2 units. Measured, errors are far below that bound.
    """
    a, b = operands(spread)
    truth, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    bound = magnitude * (2.0**-23 * (1 + 2.0**-8) + 6 * INNER * 2.0**-23)
    error = (multiply(a, b, "bf16x6").double() - truth).abs()
    assert bool((error <= bound).all())
    # Typical errors are a few units, as those of float32 products; a product left out would leave 2**-16.
    typical = float((error / magnitude).mean())
    assert typical < 4 * 2.0**-24
    without = sum(
        x.double() @ y.double() for x, y in [(p(a, i), p(b, j)) for i, j in ((0, 0), (0, 1), (1, 0), (0, 2), (2, 0))]
    )
    planted = (without - truth).abs() / magnitude
    assert float(planted.mean()) > 4 * 2.0**-24
    coarse = (multiply(a, b, "bf16").double() - truth).abs()
    assert float((coarse / magnitude).mean()) > 2.0**-14


def p(x: Tensor, part: int) -> Tensor:
    """The parts of a number, from PyTorch's own rounding."""
    for _ in range(part):
        x = x - x.bfloat16().float()
    return x.bfloat16().float()


def test_three_parts_are_the_number() -> None:
    bits = torch.randint(0, 1 << 31, (1008,), generator=torch.Generator().manual_seed(0)).int()
    numbers = bits.view(torch.float32)
    edge = torch.tensor([0.0, -0.0, 1.0, 2.0**-100, -3.1415927, 1.0 + 2.0**-23, 2.0 - 2.0**-23, 255.99998, 2.0**100])
    x = torch.cat([numbers, edge, torch.ones(1024 - 1008 - len(edge))])
    # The third part of a number below 2**-102 is below the smallest bfloat16 number.
    x = torch.where(x.isfinite() & (x.abs() > 2.0**-100) & (x.abs() < 2.0**127), x, torch.ones_like(x))
    out = torch.full((3, len(x)), torch.nan, device=DEVICE)
    launch(parts_kernel, (1,), x.to(DEVICE), out, SIZE=len(x), PRODUCTS=code("bf16x6"), num_warps=1)
    parts = out.cpu()
    assert torch.equal(parts, parts.bfloat16().float())
    assert torch.equal(parts.double().sum(0), x.double())
    assert torch.equal(parts[0], x.bfloat16().float())
    assert not torch.equal(parts[:2].double().sum(0), x.double())
