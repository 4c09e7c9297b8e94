"""How far a run is, on stderr only."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

QUIET_INTERVAL_SECONDS = 30.0


class RunProgress:
    """A live bar on a terminal; elsewhere one line about every half minute.

    Call it with the tokens done and the total. Tokens that were done before the first call (a resumed run) do not
    count towards the speed.

    Args:
        console: Where to draw; stderr by default.
        clock: Seconds that only go forward.
        unit: What is counted.
        action: What is being done to it.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "tokens",
        action: str = "scoring",
    ) -> None:
        self._unit, self._action = unit, action
        self._console = console or Console(file=sys.stderr, stderr=True)
        self._clock = clock
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._first: tuple[float, int] | None = None
        self._last_line = clock()

    def __enter__(self) -> Self:
        """Show the bar, still without a length."""
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[detail]}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("loading", total=None, detail="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done_tokens: int, total_tokens: int) -> None:
        """Report that `done_tokens` of `total_tokens` are done."""
        now = self._clock()
        if self._first is None:
            self._first = (now, done_tokens)
        started, before = self._first
        speed = (done_tokens - before) / (now - started) if now > started else None
        rate = "" if speed is None else f", {speed:,.{0 if speed >= 10 else 2}f} {self._unit}/s"
        detail = f"{done_tokens:,}/{total_tokens:,} {self._unit}{rate}"
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task, description=self._action, total=total_tokens, completed=done_tokens, detail=detail
            )
        elif now - self._last_line >= QUIET_INTERVAL_SECONDS:
            self._last_line = now
            left = f", {(total_tokens - done_tokens) / speed:,.0f} s left" if speed else ""
            self._console.print(f"replayeval: {detail}{left}", markup=False, highlight=False, soft_wrap=True)
