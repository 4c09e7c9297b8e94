"""How many programs share a head, and how many registers they have."""

from replayssm.triton_tiles import fold_registers, head_parts, serve_registers


def test_two_programs_share_a_head_where_heads_are_few() -> None:
    assert [head_parts(heads, 132) for heads in (32, 132, 133, 192)] == [2, 2, 1, 1]


def test_registers_are_limited_where_more_programs_fit_then() -> None:
    assert [fold_registers(products) for products in (0, 4)] == [None, 128]
    assert serve_registers(4, 4, several=False, stochastic=False) == 168
    assert serve_registers(8, 4, several=False, stochastic=False) == 128
    assert serve_registers(2, 4, several=False, stochastic=False) is None
    assert serve_registers(4, 4, several=True, stochastic=False) is None
    assert serve_registers(4, 4, several=False, stochastic=True) is None
    assert serve_registers(4, 0, several=False, stochastic=False) is None
