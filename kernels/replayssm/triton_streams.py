"""Independent launches side by side on a card."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

HIGHEST_PRIORITY = 3
"""Of streams in PyTorch, as a negative number; 0 is the lowest."""


def side_by_side(chains: Sequence[Sequence[Callable[[], None]]], device: torch.device) -> None:
    """Make chains of launches, on a CUDA device on streams of their own: one alone may not fill it.

    Memory that a launch allocates belongs to the stream of its chain, so it can be given back when the launch returns.

    Args:
        chains: Those that take longest first: their programs start before those of later ones. Launches of one chain
            run in order, those of different chains in any.
        device: Where the kernels run.
    """
    if device.type != "cuda" or len(chains) < 2:
        for chain in chains:
            for launch in chain:
                launch()
        return
    main, sides = torch.cuda.current_stream(device), _side_streams(device, len(chains))
    for side in sides:
        side.wait_stream(main)
    for rank in range(max(map(len, chains))):
        for chain, side in zip(chains, sides, strict=True):
            with torch.cuda.stream(side):
                for launch in chain[rank : rank + 1]:
                    launch()
    for side in sides:
        main.wait_stream(side)


@cache
def _side_streams(device: torch.device, count: int) -> list[Any]:
    return [torch.cuda.Stream(device, priority=min(0, place - HIGHEST_PRIORITY)) for place in range(count)]
