"""A GPU stores the same bits as a CPU."""

import pytest
import torch

from replayssm.formats import Format, Rounding, pack, random_bits, store_and_load
from tests.kernels.formats.support import mismatches, regimes, words_for
from tests.kernels.formats.test_cast import texts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("text", texts())
def test_stores_equal_those_of_a_cpu(text: str) -> None:
    fmt = Format.parse(text)
    states = torch.cat([*regimes().values()])
    bits = words_for(len(states)) if fmt.rounding is Rounding.STOCHASTIC else None
    on_gpu = None if bits is None else bits.cuda()
    loaded = store_and_load(states.cuda(), fmt, bits=on_gpu)
    assert loaded.is_cuda
    assert mismatches(loaded.cpu(), store_and_load(states, fmt, bits=bits)) == []
    assert mismatches(pack(states.cuda(), fmt, bits=on_gpu).unpack().cpu(), loaded.cpu()) == []


@pytest.mark.parametrize("indices_on", ["cpu", "cuda"])
def test_random_bits_equal_those_of_a_cpu(indices_on: str) -> None:
    sequences, tokens = torch.tensor([0, 5, 2**32 - 1, 5]), torch.tensor([7, 0, 2**32 - 1, 0])
    arguments = {"seed": 2**63 + 12345, "layer": 3, "copy": 1, "elements": 70_001}
    expected = random_bits(sequences=sequences, tokens=tokens, device="cpu", **arguments)
    got = random_bits(sequences=sequences.to(indices_on), tokens=tokens.to(indices_on), device="cuda", **arguments)
    assert torch.equal(got.cpu(), expected)
