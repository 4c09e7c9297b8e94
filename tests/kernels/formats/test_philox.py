"""The random bits against the published answers of Philox4x32-10 and a scalar version."""

import pytest
import torch

from replayssm.formats import philox, random_bits
from tests.oracles import formats as oracle

# Known answers that Random123 publishes for philox4x32-10: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
LARGEST = 2**32 - 1


def draw(sequences: list[int], tokens: list[int], **changes: int) -> torch.Tensor:
    arguments = {"seed": 0x299F31D0A4093822, "layer": 11, "copy": 2, "elements": 50} | changes
    return random_bits(sequences=torch.tensor(sequences), tokens=torch.tensor(tokens), device="cpu", **arguments)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_oracle_gives_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    assert oracle.philox(counter, key) == answer


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_rounds_give_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    out = torch.empty((1, 1, 4), dtype=torch.int64)
    index, token, sequence = (torch.tensor([word]) for word in counter[:3])
    philox.fill_words(philox.round_keys(*key), counter[3], sequence, token, index, out)
    assert tuple(out.flatten().tolist()) == answer


def test_counter_layout() -> None:
    sequences, tokens = [0, 5, LARGEST, 5], [7, 0, LARGEST, 1]
    words = draw(sequences, tokens, elements=777)
    for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
        for element in (0, 1, 2, 3, 4, 401, 776):
            counter = (element // 4, token, sequence, 11 | 2 << 24)
            assert words[row, element] == oracle.philox(counter, (0xA4093822, 0x299F31D0))[element % 4]


def test_every_address_matters() -> None:
    base = draw([1], [2])
    others = [
        draw([2], [2]), draw([1], [3]), draw([2], [1]), draw([1], [2], layer=12), draw([1], [2], copy=3),
        draw([1], [2], seed=0x299F31D0A4093823), draw([1], [2], seed=0x299F31D1A4093822),
    ]  # fmt: skip
    for other in others:
        # 50 independent 32-bit words: even one chance match has probability near 1e-8.
        assert not (other == base).any()


def test_words_do_not_depend_on_batch_pieces_or_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, tokens = [3, 1, 3, 3, 1], [9, 9, 9, 4, 9]
    together = draw(sequences, tokens, elements=1001)
    alone = torch.cat([draw([s], [t], elements=1001) for s, t in zip(sequences, tokens, strict=True)])
    assert torch.equal(together, alone)
    assert torch.equal(draw([3, 3, 3], [9, 9, 9], elements=1001), alone[:1].expand(3, -1))
    assert torch.equal(draw([3], [9], elements=10), alone[:1, :10])
    for piece in (3, 64, 300):
        monkeypatch.setattr(philox, "_PIECE_COUNTERS", piece)
        assert torch.equal(draw(sequences, tokens, elements=1001), together)


def test_words_are_uniform_32_bit_numbers() -> None:
    words = draw([0], [0], elements=40_000)
    assert words.dtype == torch.int64 and words.min() >= 0 and words.max() <= LARGEST
    # The mean of n uniform numbers has the standard deviation 1/sqrt(12 n); each bit's share has 1/sqrt(4 n).
    assert abs(words.double().mean().item() / 2**32 - 0.5) < 5 / (12 * 40_000) ** 0.5
    for bit in range(32):
        share = (words >> bit & 1).double().mean().item()
        assert abs(share - 0.5) < 5 / (4 * 40_000) ** 0.5


def test_no_rows_and_no_elements() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert random_bits(seed=0, layer=0, copy=0, sequences=empty, tokens=empty, elements=8, device="cpu").shape == (0, 8)
    assert draw([1], [1], elements=0).shape == (1, 0)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed="),
        ({"layer": 2**24}, "layer=16777216"),
        ({"copy": 256}, "copy=256"),
        ({"elements": -4}, "elements=-4"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, int], hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        draw([0], [0], **changes)


@pytest.mark.usefixtures("unchecked_annotations")
def test_vectors_out_of_range_or_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sequences in \[0, 2\*\*32\), got -1"):
        draw([0, -1], [0, 0])
    with pytest.raises(ValueError, match=r"tokens in \[0, 2\*\*32\), got 4294967296"):
        draw([0], [2**32])
    with pytest.raises(ValueError, match="two int64 vectors of one length"):
        draw([0, 1], [0])
