"""Activations cast to float32 tokens by the kernel, against float64 and against PyTorch, and the room in front."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from replayssm.records import TokenInputs
from replayssm.token_inputs import ROOM, float32_tokens, run_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6


def activations(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What a convolution leaves, channels before time: rows 2, tokens 70, heads 3, width 20."""
    drawn = torch.randn(2, 60, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    return drawn.transpose(1, 2).unflatten(-1, (3, 20)).to(DEVICE)


def kernel(x: Tensor, *, eps: float | None = None, scale: float = 1.0, factor: Tensor | None = None) -> Tensor:
    return run_kernel(x, eps=eps, scale=scale, factor=factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_are_exact(dtype: torch.dtype) -> None:
    x = activations(dtype)
    assert not x.is_contiguous()
    assert torch.equal(kernel(x), x.float())
    factor = torch.rand(2, 70, 3, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(kernel(x, factor=factor), x.float() * factor.unsqueeze(-1))
    assert not torch.equal(kernel(x, factor=factor.flip(1)), x.float() * factor.unsqueeze(-1))


def test_lengths_are_one() -> None:
    x = activations()
    truth = x.double() / (x.double().square().sum(-1, keepdim=True) + EPS).sqrt() * 0.25
    got = kernel(x, eps=EPS, scale=0.25)
    # Ten roundings of 2**-24 or so: of 20 squares added up in 5 levels, halved by the root, and of four operations.
    assert float((got / truth - 1).abs()[truth != 0].max()) < 10 * 2.0**-24
    assert float((kernel(x, eps=4 * EPS, scale=0.25) / truth - 1).abs()[truth != 0].max()) > 10 * 2.0**-24 / 100
    assert float((kernel(x, eps=1e-3, scale=0.25) / truth - 1).abs()[truth != 0].max()) > 10 * 2.0**-24
    assert float((float32_tokens(x, eps=EPS, scale=0.25) - got).abs().max()) < 10 * 2.0**-24


def test_earlier_tokens_go_into_the_room_and_no_others_do() -> None:
    x = activations()
    vectors = torch.zeros(2, 70, 3, device=DEVICE)

    def made(tokens: Tensor, room: int) -> TokenInputs:
        decay = torch.zeros(tokens.shape[:3], device=DEVICE)
        return TokenInputs(query=tokens, key=tokens, value=tokens, log_decay=decay, beta=None, room=room)

    for count in (ROOM, ROOM - 1):
        earlier = torch.randn(2, count, 3, 20, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        later = kernel(x)
        both = made(earlier, 0).then(made(later, ROOM))
        assert torch.equal(both.value, torch.cat([earlier, x.float()], dim=1))
        assert both.value.is_contiguous() and both.room == 0
        assert (both.value.data_ptr() == later.data_ptr() - 4 * ROOM * later.stride(1)) == (count == ROOM)
        assert both.log_decay.shape == (2, count + 70, 3)
    # Without a word of room, memory in front of a tensor is somebody's.
    whole = torch.randn(2, ROOM + 70, 3, 20).to(DEVICE)
    before = whole.clone()
    made(torch.zeros(2, ROOM, 3, 20, device=DEVICE), 0).then(made(whole[:, ROOM:], 0))
    assert torch.equal(whole, before) and vectors.sum() == 0
