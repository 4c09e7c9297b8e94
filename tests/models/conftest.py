"""Shared fixtures: one thread, since the tensors here are too small to share, and no messages from transformers."""

from collections.abc import Iterator

import pytest
import torch

from replayeval.models.quiet import quiet


@pytest.fixture(autouse=True)
def _one_quiet_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with quiet():
        yield
    torch.set_num_threads(threads)
