"""Programs that wait for each other take their places in the order in which they start."""

# pyright: reportGeneralTypeIssues=false

import pytest
import torch
import triton
import triton.language as tl

from replayssm.launch import launch
from replayssm.triton_pieces import place_in_grid

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def place_kernel(started_ptr, places_ptr, heads, PARTS: tl.constexpr):
    part, head, row = place_in_grid(tl.program_id(0), tl.program_id(1), tl.program_id(2), started_ptr, heads, PARTS)
    tl.atomic_add(places_ptr + (row * heads + head) * PARTS + part, 1)


@pytest.mark.parametrize(("started", "times"), [(0, [1] * 42), (6, [0] * 6 + [1] * 36)])
def test_every_place_is_taken_once(started: int, times: list[int]) -> None:
    """Of 7 rows and 3 heads; planted: a count that does not begin with zero leaves places free."""
    count = torch.full((1,), started, dtype=torch.int32, device=DEVICE)
    places = torch.zeros(48, dtype=torch.int32, device=DEVICE)
    launch(place_kernel, (2, 3, 7), count, places, 3, PARTS=2, num_warps=1)
    assert places[:42].tolist() == times
    assert count.tolist() == [started + 42]


def test_without_sharing_the_grid_says_which() -> None:
    count, places = (torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in (1, 21))
    launch(place_kernel, (1, 3, 7), count, places, 3, PARTS=1, num_warps=1)
    assert places.tolist() == [1] * 21
    assert count.tolist() == [0]
