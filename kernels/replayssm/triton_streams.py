"""Independent launches side by side on a card."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

HIGHEST_PRIORITY = 3
"""Of streams in PyTorch, as a negative number; 0 is the lowest."""


def side_by_side(launches: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Make independent launches, on a CUDA device on streams of their own: one alone may not fill it.

    Args:
        launches: Those that take longest first: programs of an earlier one start before those of a later one. Each
            returns the memory that its kernels use, which is kept until the streams have joined.
        device: Where the kernels run.
    """
    if device.type != "cuda" or len(launches) < 2:
        for launch_all in launches:
            launch_all()
        return
    main, sides = torch.cuda.current_stream(device), _side_streams(device, len(launches))
    kept: list[object] = []
    for launch_all, side in zip(launches, sides, strict=True):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            kept.append(launch_all())
    for side in sides:
        main.wait_stream(side)
    del kept


@cache
def _side_streams(device: torch.device, count: int) -> list[Any]:
    return [torch.cuda.Stream(device, priority=min(0, place - HIGHEST_PRIORITY)) for place in range(count)]
