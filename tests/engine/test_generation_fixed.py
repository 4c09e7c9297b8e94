"""Rows in places of their own, through the decode kernels: each sequence alone is the truth, and mistakes must show.

Kernels run in Triton's interpreter, and what a CUDA graph would replay runs as it is; `test_generation_gpu.py` has the
rest.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from replayeval.engine import generation_graph, generation_slots
from replayeval.engine.generation import Finish, Generation, Generator, Graphs, Request
from replayeval.engine.generation_batch import PolicyDecoder
from replayeval.engine.generation_fixed import FixedCache
from replayeval.engine.generation_graph import FixedRows, capacity_for, kernel_problem
from replayeval.engine.generation_sampling import GREEDY, Sampling
from replayeval.engine.generation_slots import SlotStates
from replayeval.errors import NumericsError, UnsupportedArmError
from replayeval.models.head import OutputHead
from replayeval.models.hook import HookReport
from replayssm.backend import Execution
from replayssm.policy import Policy
from tests.engine import four_sequences
from tests.engine.four_sequences import LENGTHS, SEQUENCES, STEPS, gaps, texts
from tests.models import tiny

TRITON = Execution.parse("triton")
LIMIT = 1e-4
"""As in `test_generation_batch`: float32 sums in another order. The decode kernels carry a window's writes where the
oracle replays its inputs, which is one more such sum per token of a window of three."""

PLANTED = 10 * LIMIT
REFERENCE = Policy.parse("conventional:fp32")
SHARED = Policy.parse("shared:bf16+sr@L=3")
SEPARATE = Policy.parse("separate:nvfp4/fp16+sr@L=3")
COARSE = Policy.parse("shared:fp8+sr@L=3")
pytestmark = pytest.mark.usefixtures("one_quiet_thread")

SEED = 2**40 + 9
truth = functools.partial(four_sequences.truth, seed=SEED)
FAST = ("nemotron_h", "qwen3_5", "kimi_linear")
SLIDING = "lara_mini"
SMALL = "nemotron_h"
"""Convolutions, states and attention in the fewest layers: the interpreter is slow."""

ALL = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in tiny.NAMES if n != SLIDING]


@pytest.fixture(autouse=True)
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rooms be so small that rows outgrow them."""
    monkeypatch.setattr(generation_graph, "CAPACITY_STEP", 4)
    monkeypatch.setattr(generation_graph, "SPARE_TOKENS", 2)


def fixed_rows(head: OutputHead, policy: Policy, *, places: int = 3, graphs: Graphs = Graphs.AUTO) -> FixedRows:
    # Prompts are read with PyTorch, which is faster than kernels in the interpreter; places do not look at it.
    decoder = PolicyDecoder(head, policy, seed=SEED, merge_lossless=False, pass_tokens=10)
    return FixedRows(decoder, places=places, seed=SEED, graphs=graphs)


def come_and_go(head: OutputHead, policy: Policy, rows: FixedRows | None = None) -> dict[int, Tensor]:
    """Logits of each sequence while others join and leave; four sequences pass through three places."""
    rows = fixed_rows(head, policy) if rows is None else rows
    decoder = rows._decoder
    ids = texts()
    seen: dict[int, list[Tensor]] = {i: [] for i in range(len(LENGTHS))}
    members: list[int] = []

    def admit(fresh: Sequence[int]) -> None:
        for group in decoder.groups([LENGTHS[m] for m in fresh]):
            chosen = [fresh[i] for i in group]
            part, last = rows.prefill([ids[m][: LENGTHS[m]] for m in chosen], [SEQUENCES[m] for m in chosen])
            for m, logits in zip(chosen, head.logits(last), strict=True):
                seen[m].append(logits)
            rows.admit([part], [list(range(len(chosen)))])
            members.extend(chosen)

    def step(count: int) -> None:
        for _ in range(count):
            found = rows.step([ids[m][LENGTHS[m] + len(seen[m]) - 1] for m in members]).logits
            for m, logits in zip(members, found, strict=True):
                seen[m].append(logits.clone())

    def leave(gone: int) -> None:
        rows.keep([i for i, m in enumerate(members) if m != gone])
        members.remove(gone)

    with decoder.running():
        rows.clear(max(LENGTHS) + STEPS)
        admit([0, 1])
        step(2)
        admit([2])
        step(1)
        leave(0)
        admit([3])
        step(2)
        leave(1)
        step(1)
    return {m: torch.stack(logits) for m, logits in seen.items()}


def gaps_of(head: OutputHead, policy: Policy) -> dict[int, float]:
    found = come_and_go(head, policy)
    return gaps(found, truth(head, policy, {m: len(logits) for m, logits in found.items()}))


@pytest.mark.parametrize("name", ALL)
def test_rows_that_come_and_go_equal_each_sequence_alone(name: str) -> None:
    found = gaps_of(OutputHead(tiny.shared(name)), SHARED)
    # A store may round an element the other way where the two sums straddle a tie, to one unit of bfloat16.
    assert sum(not gap <= LIMIT for gap in found.values()) <= 1, found
    assert all(gap <= 100 * LIMIT for gap in found.values()), found


@pytest.mark.parametrize("policy", [REFERENCE, SEPARATE], ids=str)
def test_other_policies(policy: Policy) -> None:
    assert max(gaps_of(OutputHead(tiny.shared("qwen3_5")), policy).values()) <= LIMIT


def test_attention_that_takes_sums_as_masks() -> None:
    head = OutputHead(tiny.shared(SMALL))
    before = head.config._attn_implementation
    head.config._attn_implementation = "eager"
    try:
        assert kernel_problem(head, TRITON, watched=False) is None
        assert max(gaps_of(head, REFERENCE).values()) <= LIMIT
    finally:
        head.config._attn_implementation = before


def beside_others(head: OutputHead, graphs: Graphs) -> list[Tensor]:
    """Logits of one row's steps: alone, and beside two other ones."""
    ids = texts()

    def answer(beside: int | None) -> Tensor:
        rows = fixed_rows(head, SHARED, places=2, graphs=graphs)
        with rows._decoder.running():
            rows.clear(20)
            for number in (1, *([] if beside is None else [beside])):
                part, _ = rows.prefill([ids[number][:4]], [number])
                rows.admit([part], [[0]])
            return torch.stack([rows.step([7, 9][: len(rows._places)]).logits[0].cpu() for _ in range(4)])

    return [answer(None), answer(0), answer(3)]


def test_a_step_of_a_row_depends_on_no_other_row_at_all() -> None:
    alone, *others = beside_others(OutputHead(tiny.shared(SMALL)), Graphs.AUTO)
    assert all(torch.equal(other, alone) for other in others)


class Pretend:
    """Stands in for a recorded step: does what a replay would do, and fails as a capture does."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.replays = 0
        self._fails = fails

    def record(self, rows: FixedRows) -> None:
        rows._body()
        fixed = rows._body()
        if self._fails is not None:
            layer = next(iter(rows._decoder._report.calls))  # pyright: ignore[reportOptionalMemberAccess]
            rows._decoder._report.calls[layer] += 1  # pyright: ignore[reportOptionalMemberAccess]
            try:
                raise self._fails
            except RuntimeError:
                raise RuntimeError("the capture was broken off")  # noqa: B904
        rows._prediction = fixed
        rows.captures += 1
        pretend = self

        class Graph:
            def replay(self) -> None:
                pretend.replays += 1
                found = rows._body()
                fixed.logits.copy_(found.logits)
                fixed.choices.copy_(found.choices)

        rows._graph = Graph()  # pyright: ignore[reportAttributeAccessIssue]


def pretended(head: OutputHead, monkeypatch: pytest.MonkeyPatch, pretend: Pretend) -> FixedRows:
    monkeypatch.setattr(FixedRows, "_record", lambda rows: pretend.record(rows))
    rows = fixed_rows(head, SHARED)
    assert rows._reason is not None
    rows._reason = None
    return rows


def test_recording_a_step_leaves_the_rows_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(tiny.shared(SMALL))
    plain = come_and_go(head, SHARED)
    pretend = Pretend()
    rows = pretended(head, monkeypatch, pretend)
    got = come_and_go(head, SHARED, rows)
    assert all(torch.equal(got[m], plain[m]) for m in plain)
    assert pretend.replays == 6 and rows.steps.graphs
    # Once at first, and once when the rows had outgrown their room.
    assert (rows.captures, rows.capacity) == (2, 16)


def test_a_step_that_cannot_be_recorded_is_computed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(tiny.shared(SMALL))
    plain = come_and_go(head, SHARED)
    refused = RuntimeError("operation not permitted\nmore")
    rows = pretended(head, monkeypatch, Pretend(refused))
    got = come_and_go(head, SHARED, rows)
    assert all(torch.equal(got[m], plain[m]) for m in plain)
    assert str(rows.steps) == "decode kernels (the step of this model cannot be captured: operation not permitted)"
    with pytest.raises(torch.OutOfMemoryError, match="too little"):
        come_and_go(head, SHARED, pretended(head, monkeypatch, Pretend(torch.OutOfMemoryError("too little"))))
    rows = pretended(head, monkeypatch, Pretend(refused))
    rows._wanted = Graphs.ON
    with pytest.raises(UnsupportedArmError, match="graphs on: .*operation not permitted; use graphs auto or off"):
        come_and_go(head, SHARED, rows)


def test_a_planted_step_that_is_not_undone_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(tiny.shared(SMALL))
    plain = come_and_go(head, SHARED)
    monkeypatch.setattr(FixedCache, "restore", lambda *_: None)
    got = come_and_go(head, SHARED, pretended(head, monkeypatch, Pretend()))
    assert max(gaps(got, plain).values()) > PLANTED


def _see_a_slot_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = FixedCache.mask
    monkeypatch.setattr(FixedCache, "mask", lambda self, *a, **k: mask(self, *a, **k).roll(1, -1))


def _see_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = FixedCache.mask
    monkeypatch.setattr(FixedCache, "mask", lambda self, *a, **k: mask(self, *a, **k) | True)


def _swap_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = FixedCache.admit

    def swapped(self: FixedCache, *args: Any, **kwargs: Any) -> None:
        admit(self, *args, **kwargs)
        layers: list[Any] = self.cache.layers
        for layer in layers:
            for state in getattr(layer, "conv_states", {}).values():
                state.copy_(state.flip(0))

    monkeypatch.setattr(FixedCache, "admit", swapped)


def _keep_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = FixedCache.admit

    def padded(self: FixedCache, part: Any, *args: Any, **kwargs: Any) -> None:
        admit(self, part, *args, **kwargs)
        layers: list[Any] = self.cache.layers
        for layer in layers:
            if hasattr(layer, "positions"):
                layer.keys = layer.keys.roll(1, dims=2)

    monkeypatch.setattr(FixedCache, "admit", padded)


def _stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotStates, "advance", lambda _: None)


def _seed_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = SlotStates.admit

    def numbered(self: SlotStates, bank: Any, rows: Any, places: Tensor, **kwargs: Any) -> None:
        admit(self, bank, rows, places, **{**kwargs, "sequences": places.tolist()})

    monkeypatch.setattr(SlotStates, "admit", numbered)


def _store_a_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = SlotStates.admit

    def late(self: SlotStates, *args: Any, **kwargs: Any) -> None:
        admit(self, *args, **kwargs)
        self.cursors.records.add_(1).remainder_(self.policy.window_tokens)

    monkeypatch.setattr(SlotStates, "admit", late)


def _never_round_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = generation_slots.DecodeSlots
    admit = slots.admit

    def exact(self: Any, places: Tensor, state: Tensor, cursors: Any) -> None:
        admit(self, places, state * 1.25, cursors)

    monkeypatch.setattr(slots, "admit", exact)


MISTAKES: list[Callable[[pytest.MonkeyPatch], None]] = [
    _see_a_slot_too_many,
    _see_everything,
    _swap_convolutions,
    _keep_the_padding,
    _stand_still,
    _seed_by_place,
    _store_a_token_late,
    _never_round_the_prompt,
]


@pytest.fixture(scope="module")
def wanted() -> dict[int, Tensor]:
    head = OutputHead(tiny.shared(SMALL))
    counts = {0: 4, 1: 6, 2: 5, 3: 4}
    found = truth(head, COARSE, counts)
    assert max(gaps(come_and_go(head, COARSE), found).values()) <= LIMIT
    return found


@pytest.mark.parametrize("plant", MISTAKES, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_mistake_shows(
    plant: Callable[[pytest.MonkeyPatch], None], wanted: dict[int, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = come_and_go(OutputHead(tiny.shared(SMALL)), COARSE)
    assert {m: len(x) for m, x in found.items()} == {m: len(x) for m, x in wanted.items()}
    assert max(gaps(found, wanted).values()) > PLANTED


def requests(sampling: Sampling = GREEDY) -> list[Request]:
    lengths, most = (5, 11, 3, 1, 11), (4, 2, 6, 5, 3)
    return [
        Request(prompt=tiny.token_ids(1, n, seed=i)[0].tolist(), sequence=900 + i, max_tokens=m, sampling=sampling)
        for i, (n, m) in enumerate(zip(lengths, most, strict=True))
    ]


@pytest.mark.parametrize(
    ("sampling", "slots"),
    [
        (GREEDY, 2),
        pytest.param(GREEDY, 5, marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=1.3, top_k=40), 2, marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=1.3, top_k=40), 5, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_answers_are_those_of_the_other_backend_for_any_number_of_slots(sampling: Sampling, slots: int) -> None:
    head = OutputHead(tiny.shared("nemotron_h"))
    asked = requests(sampling)
    want = Generator(head, SHARED, seed=SEED, slots=1).generate(asked)
    engine = Generator(head, SHARED, seed=SEED, slots=slots, execution=TRITON)
    assert engine.generate(asked) == want
    assert isinstance(engine._rows, FixedRows) and engine._rows.places == slots
    # A second call finds places, slots and room as the first one left them.
    assert engine.generate(asked[:1:-1]) == want[:1:-1]
    assert str(engine.steps) == "decode kernels (CUDA graphs need a CUDA device, got cpu)"


def test_a_row_that_diverged_leaves_nothing_to_the_next_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(tiny.shared(SMALL))
    asked = requests()
    want = Generator(head, SHARED, seed=SEED, slots=2).generate(asked)
    ill = asked[1].sequence
    step = SlotStates._step

    def broken(self: SlotStates, *args: Any) -> Tensor:
        outputs = step(self, *args)
        sick = (self.slot_index >= 0) & (self.cursors.sequences == ill)
        return outputs.masked_fill(sick[:, None, None], torch.nan)

    monkeypatch.setattr(SlotStates, "_step", broken)
    answers = Generator(head, SHARED, seed=SEED, slots=2, execution=TRITON).generate(asked)
    assert answers[1] == Generation(tokens=want[1].tokens[:1], finish=Finish.DIVERGED)
    assert [a for i, a in enumerate(answers) if i != 1] == [a for i, a in enumerate(want) if i != 1]
    with pytest.raises(NumericsError, match="although no state was rounded"):
        Generator(head, REFERENCE, seed=SEED, slots=2, execution=TRITON).generate(asked)


def test_what_keeps_rows_from_fixed_places_is_said() -> None:
    head = OutputHead(tiny.shared(SMALL))
    sliding = OutputHead(tiny.shared(SLIDING))
    ways = {
        "windows (backend torch)": Generator(head, SHARED),
        "windows (stores are watched, and the decode kernels do not show theirs)": Generator(
            head, SHARED, execution=TRITON, observer=lambda _: None
        ),
        "windows (DynamicSlidingWindowLayer of the cache keeps no fixed slots)": Generator(
            sliding, SHARED, execution=TRITON
        ),
        "decode kernels (graphs are off)": Generator(head, SHARED, execution=TRITON, graphs=Graphs.OFF),
    }
    assert {str(engine.steps): engine for engine in ways.values()} == ways
    with pytest.raises(UnsupportedArmError, match="graphs on: steps need the decode kernels: backend torch; use"):
        Generator(head, SHARED, graphs=Graphs.ON)
    with pytest.raises(UnsupportedArmError, match="graphs on: CUDA graphs need a CUDA device, got cpu; use graphs"):
        Generator(head, SHARED, execution=TRITON, graphs=Graphs.ON)


def test_a_pass_outside_its_block_is_refused() -> None:
    rows = fixed_rows(OutputHead(tiny.shared(SMALL)), SHARED)
    with pytest.raises(RuntimeError, match="running"):
        rows._decoder.step(
            rows._ids,
            rows._decoder.head.new_cache(1),
            mask=torch.ones(3, 1, 1, 4),
            positions=rows._positions[:, None],
            states=rows._states,
        )


def test_an_attempt_that_fails_is_forgotten() -> None:
    decoder = PolicyDecoder(OutputHead(tiny.shared(SMALL)), SHARED, seed=0, merge_lossless=False)
    with decoder.running():
        decoder.prefill([[1, 2, 3]], sequences=[0])
        report = decoder._report
        assert isinstance(report, HookReport)
        with pytest.raises(KeyError), decoder.attempt():
            report.calls[0] += 1
            raise KeyError
        report.verify()


def test_room_grows_by_a_quarter_and_never_beyond_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert capacity_for(10, 20) == 64
    assert capacity_for(129, 10_000) == 384
    assert capacity_for(129, 300) == 320
    assert capacity_for(4000, 10_000) == 5056
    assert capacity_for(9999, 10_000) == 10_048
    grown = [capacity_for(1, 1 << 20)]
    while grown[-1] < 1 << 20:
        grown.append(capacity_for(grown[-1] + 1, 1 << 20))
    assert len(grown) < 45
