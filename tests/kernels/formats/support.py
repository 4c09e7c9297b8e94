"""Bridges between tensors and the oracle, and states that visit every regime of a format."""

from collections.abc import Callable

import torch
from torch import Tensor

from replayssm.formats import Format, Rounding, random_bits, store_and_load
from tests.oracles import formats as oracle

Store = Callable[[Tensor, Format, Tensor | None], Tensor]

HEADS, D_V, D_K = 2, 4, 32
ELEMENTS = HEADS * D_V * D_K


def product_store(state: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    return store_and_load(state, fmt, bits=bits)


def oracle_format(fmt: Format) -> oracle.OracleFormat:
    return oracle.OracleFormat(
        element=fmt.element.value,
        granularity=fmt.granularity.value,
        group=fmt.group,
        scale=fmt.scale.value,
        divisor=fmt.divisor,
        stochastic=fmt.rounding is Rounding.STOCHASTIC,
    )


def oracle_store(state: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    """The oracle, one row of `[rows, heads, d_v, d_k]` at a time."""
    rows, heads, d_v, d_k = state.shape
    loaded = [
        oracle.store_and_load(
            state[row].flatten().tolist(),
            oracle_format(fmt),
            heads=heads,
            d_v=d_v,
            d_k=d_k,
            words=None if bits is None else bits[row].tolist(),
        )
        for row in range(rows)
    ]
    return torch.tensor(loaded, dtype=torch.float64).to(torch.float32).view(state.shape)


def words_for(rows: int, elements: int = ELEMENTS, *, seed: int = 3) -> Tensor:
    index = torch.arange(rows)
    return random_bits(seed=seed, layer=1, copy=0, sequences=index, tokens=index + 5, elements=elements, device="cpu")


def deciding_words(states: Tensor, fmt: Format) -> Tensor:
    """Words on either side of the decision: every other element just goes up, the others just do not."""
    rows, heads, d_v, d_k = states.shape
    words = torch.tensor(
        [
            oracle.threshold_words(state.flatten().tolist(), oracle_format(fmt), heads=heads, d_v=d_v, d_k=d_k)
            for state in states
        ]
    )
    return (words - torch.arange(words.shape[1]) % 2).clamp_(min=0)


def mismatches(got: Tensor, expected: Tensor) -> list[str]:
    """Every place where two float32 tensors differ in bits; all NaN count as one value."""
    assert got.dtype == expected.dtype == torch.float32 and got.shape == expected.shape
    same = got.view(torch.int32) == expected.view(torch.int32)
    same |= got.isnan() & expected.isnan()
    where = (~same).nonzero().tolist()
    return [f"{place}: got {got[tuple(place)].item()!r}, expected {expected[tuple(place)].item()!r}" for place in where]


def regimes() -> dict[str, Tensor]:
    """Named states `[1, HEADS, D_V, D_K]`."""
    generator = torch.Generator().manual_seed(11)
    shape = (1, HEADS, D_V, D_K)
    normal = torch.randn(shape, generator=generator)
    wide = normal * torch.exp2(torch.randint(-30, 8, shape, generator=generator).float())
    # Multiples of a 64th of a binade: many are halfway between neighbours of an 8-bit or 4-bit grid.
    halfway = torch.randint(-1024, 1025, shape, generator=generator) / 64
    patterns = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).view(torch.float32)
    spoiled = normal.clone()
    spoiled[0, 0, 0, 3] = float("inf")
    spoiled[0, 0, 2, 17] = float("nan")
    spoiled[0, 1, 3, 31] = float("-inf")
    zeros = normal.clone()
    zeros[0, 0] = 0.0
    zeros[0, 1, 1] = -0.0
    zeros[0, 1, 2, :16] = 0.0
    return {
        "normal": normal * 0.04,
        "wide": wide,
        "halfway": halfway,
        "zeros": zeros,
        "tiny": normal * 1e-36,
        "subnormal": normal * 1e-41,
        "large": normal * 6e4,
        "beyond": normal * 1e38,
        "patterns": patterns,
        "finite patterns": patterns.nan_to_num(0.0, 0.0, 0.0),
        "not finite": spoiled,
    }
