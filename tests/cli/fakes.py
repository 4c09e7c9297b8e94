"""A stand-in for the measurement, so that the command line is tested by itself."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from replayeval.report.result import KLResult
from tests.report.samples import two_arms


class FakeMeasure:
    """Records how it was called and returns a hand-made result, or does what it was told."""

    def __init__(self, action: Callable[[dict[str, Any]], KLResult] | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._action = action

    def __call__(self, model: str, **options: Any) -> KLResult:
        self.calls.append((model, options))
        if self._action is not None:
            return self._action(options)
        options["progress"](1024, 4096)
        options["progress"](4096, 4096)
        return KLResult(report=two_arms(), scores=())

    @property
    def options(self) -> dict[str, Any]:
        (call,) = self.calls
        return call[1]


@contextmanager
def measuring(monkeypatch: pytest.MonkeyPatch, fake: FakeMeasure) -> Iterator[FakeMeasure]:
    module = ModuleType("replayeval.measure")
    module.measure_kl = fake  # pyright: ignore[reportAttributeAccessIssue]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "replayeval.measure", module)
        yield fake
