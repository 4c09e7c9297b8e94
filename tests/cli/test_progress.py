import io

from rich.console import Console

from replayeval.cli.progress import RunProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_off_a_terminal_there_is_one_line_about_every_half_minute() -> None:
    stream, clock = io.StringIO(), Clock()
    with RunProgress(console=Console(file=stream, width=60), clock=clock) as progress:
        for step in range(200):
            progress(100 * step, 20_000)
            clock.now += 1.0
    lines = stream.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[0] == "replayeval: 3,000/20,000 tokens, 100 tokens/s, 170 s left"


def test_tokens_from_before_a_resumed_run_do_not_count_as_speed() -> None:
    stream, clock = io.StringIO(), Clock()
    with RunProgress(console=Console(file=stream), clock=clock) as progress:
        progress(1_000_000, 2_000_000)
        clock.now += 40.0
        progress(1_000_400, 2_000_000)
    assert ", 10 tokens/s" in stream.getvalue()


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind() -> None:
    stream = io.StringIO()
    with RunProgress(console=Console(file=stream, force_terminal=True, width=100)) as progress:
        progress(512, 1024)
        progress(1024, 1024)
    assert "1,024/1,024 tokens" in stream.getvalue()
