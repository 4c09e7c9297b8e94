"""Every test of the models runs on one quiet thread."""

import pytest


@pytest.fixture(autouse=True)
def _quiet(one_quiet_thread: None) -> None:
    """Ask for it once for all."""
