"""What only a card can show of decode steps: launches that are set up early, in graphs and beside other streams."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replayssm.decode import DecodeToken, advance, prepare_step
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.slots import DecodeCursors, DecodeSlots, LayerShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = LayerShape(recurrence=Recurrence.GDN, key_heads=2, heads=4, d_k=128, d_v=128)
POLICIES = ("shared:fp32@L=4", "separate:nvfp4/fp32@L=4", "conventional:fp32", "shared:fp32@L=4")
TOKENS = 11


def run(batch: int, *, early: bool, graph: bool, between: bool) -> list[Tensor]:
    """Outputs of a few tokens through layers, and the states after them.

    With `between`, layers feed each other: what makes the input of the next runs between them, and is wrong until its
    last element is written. Without, one step follows directly on another, which may be two launches side by side.
    """
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device="cuda")

    cursors = {window: DecodeCursors(slots=batch, device="cuda") for window in (1, 4)}
    layers: list[DecodeSlots] = []
    for text in POLICIES:
        policy = Policy.parse(text)
        slots = DecodeSlots(SHAPE, policy, slots=batch, device="cuda")
        states = draw(batch, *SHAPE.state)
        slots.admit(torch.arange(batch, device="cuda"), states, cursors[policy.window_tokens])
        layers.append(slots)
    keys = draw(TOKENS, 2, batch, SHAPE.key_heads, SHAPE.d_k).bfloat16()
    values = draw(TOKENS, batch, SHAPE.heads, SHAPE.d_v).bfloat16()
    strengths = draw(TOKENS, batch, SHAPE.heads).sigmoid()
    number = torch.zeros(1, dtype=torch.int64, device="cuda")
    index = torch.arange(batch, dtype=torch.int32, device="cuda")
    beta = torch.empty_like(strengths[0])
    token = DecodeToken(
        query=torch.empty_like(keys[0, 0]),
        key=torch.empty_like(keys[0, 1]),
        value=torch.empty_like(values[0]),
        log_decay=torch.full((batch, SHAPE.heads), -0.1, device="cuda"),
        beta=beta,
    )
    out = torch.zeros_like(token.value)
    steps = [
        prepare_step(slots, cursors[slots.policy.window_tokens], token, index, out=out, launch=None) for slots in layers
    ]
    assert [step.early for step in steps] == [True, False, True, True]
    if not early:
        steps = [replace(step, arguments={**step.arguments, "EARLY": False}) for step in steps]

    def one_token() -> None:
        query, key = keys.index_select(0, number)[0]
        token.query.copy_(query)
        token.key.copy_(key)
        beta.copy_(strengths.index_select(0, number)[0])
        token.value.copy_(values.index_select(0, number)[0])
        for step in steps:
            step.run()
            if between:
                token.value.copy_(out.roll(1, dims=-1))
        for window, of_window in cursors.items():
            advance(of_window, index, window=window)
        number.add_(1)

    saved: list[Tensor] = []
    if not graph:
        for _ in range(TOKENS):
            one_token()
            saved.append(out.clone())
    else:
        captured = torch.cuda.CUDAGraph()
        # Compiled before anything is captured; what this changes is put back.
        before = [x.clone() for x in _held(layers, cursors)]
        one_token()
        torch.cuda.synchronize()
        number.zero_()
        for held, old in zip(_held(layers, cursors), before, strict=True):
            held.copy_(old)
        with torch.cuda.graph(captured):
            one_token()
        for _ in range(TOKENS):
            captured.replay()
            saved.append(out.clone())
    torch.cuda.synchronize()
    return [*saved, *(copy.payload for slots in layers for copy in slots.copies)]


def _held(layers: list[DecodeSlots], cursors: dict[int, DecodeCursors]) -> list[Tensor]:
    copies = [x for slots in layers for c in slots.copies for x in (c.payload, c.scales, c.head_scales)]
    records = [x for slots in layers for x in slots.records.values()]
    return [*copies, *records, *(x for c in cursors.values() for x in (c.records, c.tokens))]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("batch", [1, 96])
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs programmatic launches"
)
def test_steps_that_are_set_up_early_wait_for_what_they_read(batch: int, graph: bool, between: bool) -> None:
    expected = run(batch, early=False, graph=False, between=between)
    got = run(batch, early=True, graph=graph, between=between)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    # Outputs of one token are no outputs of the next: a step that reads too early has something wrong to read.
    assert not torch.equal(expected[0], expected[1])
