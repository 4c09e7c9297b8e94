"""The kernel benchmark without a card: what it refuses, checks, counts and reports."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replayeval.cli import main
from replayeval.engine import bench_kernels as bench
from replayeval.engine import kernel_cases, kernel_checks, kernel_peers
from replayeval.engine.bench_kernels import KernelBench, KernelTiming, require_cuda
from replayeval.engine.kernel_cases import SHAPES, LayerSets, random_slots
from replayeval.engine.kernel_checks import OUTPUT_LIMIT, STATE_LIMIT, check, check_peers, jobs_of
from replayeval.engine.kernel_peers import Peer, check_peer, peers
from replayeval.errors import ConfigError, NumericsError
from replayssm.decode_reference import ReferenceDecoder
from replayssm.decode_traffic import cycle_traffic, floor_seconds, record_bytes, state_bytes, step_traffic
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.slots import LayerShape

pytest.importorskip("triton")

TINY = LayerShape(recurrence=Recurrence.MAMBA2, key_heads=1, heads=2, d_k=16, d_v=4)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return torch.Generator().manual_seed(3)


def test_without_a_card_it_refuses_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="CUDA device"):
        require_cuda()
    assert main(["bench", "kernels"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "CUDA device" in captured.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--shape", "Qwen3.5-5B"], "Did you mean 'Qwen3.5-4B'"),
        (["--batch", "0"], "--batch: expected a whole number from 1"),
        (["--window", "1,4"], "--window: expected a whole number from 2"),
    ],
)
def test_bad_options_are_named(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("recurrence", list(Recurrence))
@pytest.mark.parametrize("policy", ["shared:fp32@L=4", "separate:nvfp4/fp16@L=4", "separate:fp8/fp32@L=8"])
def test_counted_bytes_are_those_of_the_tensors(recurrence: Recurrence, policy: str) -> None:
    shape = LayerShape(recurrence=recurrence, key_heads=2, heads=4, d_k=32, d_v=8)
    parsed = Policy.parse(policy)
    slots, _ = random_slots(shape, parsed, 3, torch.bfloat16, torch.Generator().manual_seed(0))
    record = record_bytes(shape, parsed)
    main_bytes, read_bytes = state_bytes(shape, parsed)
    stored = main_bytes + (read_bytes if slots.separate else 0)
    assert slots.nbytes == 3 * (stored + parsed.window_tokens * record.written)
    unread = [n for n in ("value", "beta") if slots.separate and n in slots.records]
    if recurrence is Recurrence.MAMBA2:
        unread = []
    skipped = sum(slots.records[n].nbytes for n in unread)
    assert 3 * parsed.window_tokens * (record.written - record.read) == skipped
    anew = slots.records["write"].nbytes if unread else 0
    assert 3 * parsed.window_tokens * (record.written - record.flushed) == anew
    empty, fuller = step_traffic(shape, parsed, 0), step_traffic(shape, parsed, 2)
    assert fuller.read - empty.read == 2 * record.read
    assert fuller.written == empty.written
    flush = step_traffic(shape, parsed, parsed.window_tokens - 1)
    assert flush.written - empty.written == stored - record.written


def test_floors_of_the_measured_card() -> None:
    """With 4.69 and 4.2 TB/s: floors computed by others from the same shapes, theirs with records of 16 bits."""
    speeds = {"batch": 256, "read_only": 4.69e12, "mixed": 4.2e12}
    policy = Policy.parse("shared:fp32@L=16")
    for name, floor in (("Nemotron-3-Super-120B-A12B", 258e-6), ("Nemotron-3-Nano-4B", 243e-6)):
        assert floor_seconds(cycle_traffic(SHAPES[name], policy), **speeds) == pytest.approx(floor, rel=0.01)
    for name, floor in (("Qwen3.5-122B-A10B", 258e-6), ("Qwen3.5-4B", 131e-6)):
        ours = floor_seconds(cycle_traffic(SHAPES[name], policy), **speeds)
        assert floor < ours < 1.04 * floor
    rewrite = step_traffic(SHAPES["Qwen3.5-122B-A10B"], Policy.parse("conventional:fp32"), 0)
    assert floor_seconds(rewrite, **speeds) == pytest.approx(511e-6, rel=0.01)


@pytest.mark.parametrize("policy", ["shared:fp32@L=2", "separate:fp8/fp32@L=2"])
def test_kernels_are_checked_before_they_are_timed(tiny: torch.Generator, policy: str) -> None:
    found = check("tiny", policy, tiny, batch=2, steps=3)
    assert 0 < found.state_error <= STATE_LIMIT
    assert 0 < found.output_error <= OUTPUT_LIMIT
    assert 0 < check_peers("tiny", tiny).output_error <= OUTPUT_LIMIT


def test_a_wrong_kernel_stops_the_run(tiny: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    step = kernel_checks.decode_step

    def wrong(slots: object, *args: object, **kwargs: object) -> None:
        step(slots, *args, **kwargs)  # type: ignore[arg-type]
        slots.records["dt"].mul_(1.01)  # type: ignore[attr-defined]

    monkeypatch.setattr(kernel_checks, "decode_step", wrong)
    with pytest.raises(NumericsError, match="nothing was timed"):
        check("tiny", "shared:fp32@L=3", tiny, batch=2, steps=4)


def test_a_wrong_peer_stops_the_run(tiny: torch.Generator) -> None:
    slots, _ = random_slots(TINY, Policy.parse("conventional:fp32"), 2, torch.bfloat16, tiny)
    token = kernel_cases.random_token(TINY, 2, torch.bfloat16, tiny)
    expected = ReferenceDecoder(slots, tokens=[0, 0]).step(token, [0, 1])
    peer = next(peers(Recurrence.MAMBA2))
    assert check_peer(peer, slots, token, expected, OUTPUT_LIMIT) > 0
    lazy = Peer(name="lazy", configuration="none", run=lambda *_: None)
    with pytest.raises(NumericsError, match="lazy"):
        check_peer(lazy, slots, token, expected, OUTPUT_LIMIT)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(kernel_peers.importlib, "import_module", fail)
    with pytest.raises(ConfigError, match="pip install flash-linear-attention"):
        next(peers(Recurrence.GDN))


class Counter:
    """A clock that runs nothing; every launch takes 3 microseconds more than the last."""

    def __init__(self) -> None:
        self.calls = 0

    def seconds(self, run: Callable[[], None]) -> float:
        self.calls += 1
        return 3e-6 * self.calls


def test_a_case_is_timed_and_recorded(tiny: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "CACHE_BYTES", 1000)
    clock = Counter()
    case = bench._Case(
        name="tiny", batch=3, clock=clock, generator=tiny, speeds={"read": 4e12, "read_modify_write": 4e12}
    )
    assert case.conventional().startswith("selective_state_update design")
    timing = case.time(Policy.parse("shared:fp32@L=4"))
    assert timing.window == 4 and timing.batch == 3
    assert timing.speedup == pytest.approx(timing.conventional_us / timing.cycle_us)
    assert timing.floor_us < timing.flush_floor_us
    assert timing.read_us < timing.flush_us
    outcome = KernelBench(
        device="none", versions={}, ceilings={}, accuracy=(), peers={}, timings=(timing, replace(timing, batch=1))
    )
    assert outcome.to_json()["schema"] == "replayeval.bench.kernels/1"
    assert [t["batch"] for t in outcome.to_json()["timings"]] == [3, 1]


def test_tables_in_the_document_are_those_of_the_records() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "kernel_tables.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0


def test_a_record_becomes_tables(tmp_path: Path) -> None:
    times = {
        "cycle_us": 50.0, "aligned_us": 60.0, "read_us": 40.0, "flush_us": 200.0, "conventional_us": 100.0,
        "own_conventional_us": 110.0, "floor_us": 40.0, "read_floor_us": 32.0, "flush_floor_us": 100.0,
    }  # fmt: skip
    base = KernelTiming(
        shape="Qwen3.5-4B", policy="shared:fp32@L=16", batch=256, window=16, launch="", tried={}, bytes_per_step=1.0,
        speedup=2.0, **times,
    )  # fmt: skip
    low = replace(base, policy="separate:fp8/fp32@L=16", read_us=20.0, read_floor_us=10.0)
    found = KernelBench(
        device="a card", versions={"torch": "2"}, ceilings={"read": 4e12}, accuracy=(), peers={}, timings=(base, low)
    )
    path = tmp_path / "record.json"
    path.write_text(json.dumps(found.to_json()))
    script = Path(__file__).parents[2] / "benchmarks" / "kernel_tables.py"
    done = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True, check=True)
    assert "| Qwen3.5-4B, 256 | 100 | 110 | 50.0 | 2.00 | 40.0 | 1.25 | 60.0 |" in done.stdout
    assert "| Qwen3.5-4B, separate:fp8/fp32 | 20.0 | 2.00 | 10.0 | 3.20 | 200 | 2.00 | 50.0 | 2.00 |" in done.stdout
    figure = tmp_path / "figure.svg"
    words = [sys.executable, str(script.with_name("kernel_figure.py")), str(path), "--out", str(figure)]
    subprocess.run(words, check=True)
    assert figure.read_text().startswith("<?xml")


def test_sets_are_large_enough_and_cursors_staggered(tiny: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "CACHE_BYTES", 2000)
    sets = LayerSets(TINY, Policy.parse("shared:fp32@L=4"), 1, tiny, stored_bytes=512)
    assert sets.count == 4
    wide = LayerSets(TINY, Policy.parse("shared:fp32@L=4"), 6, tiny, stored_bytes=512)
    wide.place(range(4))
    assert wide.cursors.records.tolist() == [0, 1, 2, 3, 0, 1]
    ran: list[int] = []
    seconds = wide.cycle_seconds(Counter(), None, staggered=True)
    assert seconds == pytest.approx(3e-6 / (wide.count * 4)) and not ran


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", tuple(SHAPES)[:5])
@pytest.mark.parametrize("policy", ["shared:fp32@L=16", "separate:fp8/fp32@L=4", "separate:nvfp4/fp32@L=4"])
def test_kernels_on_a_card_at_the_shapes_of_the_paper(name: str, policy: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    check(name, policy, generator)
    check(name, policy, generator, launch=jobs_of(name, policy, 256)[0])
