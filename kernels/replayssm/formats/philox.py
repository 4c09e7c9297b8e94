"""Counter-based random bits for stochastic rounding.

The bits of a store are a pure function of (seed, layer, copy, sequence, token, element). So a result does not depend on
device, batch, chunking or the order of stores, and any other implementation of Philox4x32-10 can reproduce it.
"""

import torch
from jaxtyping import Int64
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10

# Counters computed together on a CPU: large enough to hide the cost of a call, small enough for a core's caches.
_PIECE_COUNTERS = 16384


def random_bits(
    *,
    seed: int,
    layer: int,
    copy: int,
    sequences: Int64[Tensor, " rows"],
    tokens: Int64[Tensor, " rows"],
    elements: int,
    device: torch.device | str,
) -> Int64[Tensor, "rows elements"]:
    """Random 32-bit words that decide the stochastic rounding of one store per row.

    The generator is Philox4x32-10 with key `(seed mod 2**32, seed // 2**32)` and counter words
    `(element // 4, token, sequence, layer + copy * 2**24)`; output word `element % 4` belongs to the element.

    Args:
        seed: 64-bit seed of the run.
        layer: Index of the layer, below 2**24.
        copy: Which stored copy of the state the bits are for, below 256.
        sequences: Sequence id of each row, below 2**32.
        tokens: Index of the last token folded into each row's state, below 2**32.
        elements: Elements per row; element indices are C-order in `[heads, d_v, d_k]`.
        device: Where the bits are made.

    Returns:
        Words in `[0, 2**32)`. Rows may share memory, so treat them as read-only.

    Raises:
        ValueError: If a number is out of range, or `sequences` and `tokens` are not two int64 vectors of one length.
    """
    _check_scalars(seed=seed, layer=layer, copy=copy, elements=elements)
    _check_vectors(sequences, tokens)
    where = torch.device(device)
    counters = (elements + 3) // 4
    key = (seed & _WORD, seed >> 32)
    fourth = layer | copy << 24
    if sequences.device.type != "cpu" or tokens.device.type != "cpu":
        _check_range_without_waiting(sequences)
        _check_range_without_waiting(tokens)
        sequences, tokens = sequences.to(where), tokens.to(where)
        return _philox(key, fourth, sequences, tokens, counters, where)[:, :elements]

    pairs: list[tuple[int, int]] = list(zip(_integers(sequences), _integers(tokens), strict=True))
    _check_range("sequences", [pair[0] for pair in pairs])
    _check_range("tokens", [pair[1] for pair in pairs])
    # Rows that hold the same sequence at the same token draw the same words: arms of one document are drawn once.
    order = {pair: index for index, pair in enumerate(dict.fromkeys(pairs))}
    distinct = torch.tensor(list(order), dtype=torch.int64).reshape(-1, 2).to(where)
    words = _philox(key, fourth, distinct[:, 0], distinct[:, 1], counters, where)[:, :elements]
    if len(order) == len(pairs):
        return words
    if len(order) == 1:
        return words.expand(len(pairs), elements)
    return words.index_select(0, torch.tensor([order[pair] for pair in pairs]).to(where))


def _check_scalars(*, seed: int, layer: int, copy: int, elements: int) -> None:
    limits = {
        "seed": (seed, 1 << 64),
        "layer": (layer, 1 << 24),
        "copy": (copy, 1 << 8),
        "elements": (elements, 1 << 34),
    }
    wrong = [f"{name}={value} (below {limit})" for name, (value, limit) in limits.items() if not 0 <= value < limit]
    if wrong:
        raise ValueError(f"random_bits expects non-negative numbers within their limits, got {', '.join(wrong)}")


def _check_vectors(sequences: Tensor, tokens: Tensor) -> None:
    good = sequences.ndim == 1 and sequences.shape == tokens.shape and sequences.dtype == tokens.dtype == torch.int64
    if not good:
        raise ValueError(
            "random_bits expects sequences and tokens as two int64 vectors of one length, got "
            f"{sequences.dtype}{list(sequences.shape)} and {tokens.dtype}{list(tokens.shape)}"
        )


def _integers(vector: Tensor) -> list[int]:
    return vector.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _check_range(name: str, values: list[int]) -> None:
    wrong = [value for value in values if not 0 <= value <= _WORD]
    if wrong:
        raise ValueError(f"random_bits expects {name} in [0, 2**32), got {wrong[0]} (and {len(wrong) - 1} more)")


def _check_range_without_waiting(values: Tensor) -> None:
    torch._assert_async(((values >= 0) & (values <= _WORD)).all())  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _philox(
    key: tuple[int, int], fourth: int, sequences: Tensor, tokens: Tensor, counters: int, device: torch.device
) -> Tensor:
    """Words `[rows, 4 * counters]` of the counters `(0..counters-1, token, sequence, fourth)`."""
    words = torch.empty((sequences.shape[0], counters, 4), dtype=torch.int64, device=device)
    keys = round_keys(*key)
    columns = max(1, min(counters, _PIECE_COUNTERS)) if device.type == "cpu" else max(1, counters)
    rows = max(1, _PIECE_COUNTERS // columns) if device.type == "cpu" else max(1, sequences.shape[0])
    for row in range(0, sequences.shape[0], rows):
        for column in range(0, counters, columns):
            index = torch.arange(column, min(column + columns, counters), dtype=torch.int64, device=device)
            part = slice(row, row + rows)
            fill_words(keys, fourth, sequences[part], tokens[part], index, words[part, column : column + columns])
    return words.view(sequences.shape[0], counters * 4)


def round_keys(low: int, high: int) -> list[tuple[int, int]]:
    """The key of each round.

    Args:
        low: Lower key word.
        high: Upper key word.

    Returns:
        Pairs of 32-bit words.
    """
    return [((low + _WEYL[0] * step) & _WORD, (high + _WEYL[1] * step) & _WORD) for step in range(_ROUNDS)]


def fill_words(
    keys: list[tuple[int, int]], fourth: int, sequences: Tensor, tokens: Tensor, index: Tensor, out: Tensor
) -> None:
    """Write the words of the counters `(index, token, sequence, fourth)` into `out`.

    Args:
        keys: What `round_keys` returns.
        fourth: Fourth counter word.
        sequences: Third counter word, per row.
        tokens: Second counter word, per row.
        index: First counter word, per column.
        out: int64 of shape `[rows, columns, 4]`. Overwritten.

    A round maps (c0, c1, c2, c3) to (hi1^c1^k0, lo1, hi0^c3^k1, lo0) of the products c0*M0 and c2*M1. Products are
    taken modulo 2**64 as int64; c1 and c3 are only ever XORed, so they stay unmasked and one mask per half clears both
    the sign extension of the shift and their upper halves. In the first two rounds half of the words depend on the row
    only or on the element only, so those are computed as vectors.
    """
    m0, m1 = _MULTIPLIERS
    element_product = index.mul(m0)
    row_product = sequences.mul(m1).unsqueeze(1)
    row_first = (row_product >> 32).bitwise_xor_(tokens.unsqueeze(1)).bitwise_xor_(keys[0][0]).bitwise_and_(_WORD)
    element_third = (element_product >> 32).bitwise_xor_(fourth ^ keys[0][1]).bitwise_and_(_WORD)

    next_row_product = row_first.mul(m0)
    next_element_product = element_third.mul(m1)
    by_element = (next_element_product >> 32).bitwise_and_(_WORD)
    by_row = row_product.bitwise_xor_(keys[1][0]).bitwise_and_(_WORD)
    first_and_third = torch.empty((2, sequences.shape[0], index.shape[0]), dtype=torch.int64, device=index.device)
    torch.bitwise_xor(by_element, by_row, out=first_and_third[0])
    by_row = (next_row_product >> 32).bitwise_xor_(keys[1][1]).bitwise_and_(_WORD)
    by_element = element_product.bitwise_and_(_WORD)
    torch.bitwise_xor(by_element, by_row, out=first_and_third[1])
    second, fourth_word = next_element_product.unsqueeze(0), next_row_product

    multipliers = torch.tensor([m0, m1], device=index.device).view(2, 1, 1)
    swapped = torch.tensor([m1, m0], device=index.device).view(2, 1, 1)
    products, spare = torch.empty_like(first_and_third), torch.empty_like(first_and_third)
    flipped = False  # whether first_and_third holds (c2, c0) instead of (c0, c2)
    for k0, k1 in keys[2:]:
        torch.mul(first_and_third, swapped if flipped else multipliers, out=products)
        torch.bitwise_right_shift(products, 32, out=first_and_third)
        one, zero = (0, 1) if flipped else (1, 0)
        first_and_third[one].bitwise_xor_(second).bitwise_xor_(k0)
        first_and_third[zero].bitwise_xor_(fourth_word).bitwise_xor_(k1)
        first_and_third.bitwise_and_(_WORD)
        second, fourth_word = products[one], products[zero]
        products, spare = spare, products
        flipped = not flipped
    out[..., 0].copy_(first_and_third[1 if flipped else 0])
    torch.bitwise_and(second, _WORD, out=out[..., 1])
    out[..., 2].copy_(first_and_third[0 if flipped else 1])
    torch.bitwise_and(fourth_word, _WORD, out=out[..., 3])
