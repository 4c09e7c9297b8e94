"""Settings of the whole test suite."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import config, install_import_hook

# Shapes and dtypes in the annotations of the numerical core are checked whenever a test calls it.
install_import_hook(["replayssm"], "beartype.beartype")

# Shared machines are slow at times, so no test fails on its clock; on CI the examples are the same in every run.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    """Let wrong shapes through to the messages that users see, who run without checks of annotations."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
