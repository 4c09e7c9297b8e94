"""Settings of the whole test suite."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import config, install_import_hook

# Without a GPU, Triton kernels run in Triton's interpreter; the choice is made before Triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _checkable_modules() -> list[str]:
    """Modules of the numerical core, but for device code: Triton reads its source and does not run it."""
    spec = importlib.util.find_spec("replayssm")
    if spec is None or spec.origin is None:
        raise ImportError("replayssm is not installed; run: pip install -e .")
    root = Path(spec.origin).parent
    files = [p for p in sorted(root.rglob("*.py")) if "import triton.language" not in p.read_text(encoding="utf-8")]
    return [".".join(("replayssm", *p.relative_to(root).with_suffix("").parts)) for p in files if p.stem != "__init__"]


# Shapes and dtypes in the annotations of the numerical core are checked whenever a test calls it.
install_import_hook(_checkable_modules(), "beartype.beartype")

# Shared machines are slow at times, so no test fails on its clock; on CI the examples are the same in every run.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture
def one_quiet_thread() -> Iterator[None]:
    """One thread, for tensors that are too small to share, and no messages from transformers."""
    from replayeval.models.quiet import quiet

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with quiet():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    """Let wrong shapes through to the messages that users see, who run without checks of annotations."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
