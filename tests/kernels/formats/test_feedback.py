"""Error feedback: what one store loses, the next one gets back."""

import pytest
import torch

from replayssm.formats import Format, store_and_load, store_and_load_with_feedback
from tests.kernels.formats.support import mismatches, regimes, words_for


def test_first_store_is_a_plain_store_and_its_loss_is_kept() -> None:
    state = regimes()["normal"]
    loaded, lost = store_and_load_with_feedback(state, None, Format.parse("int8[ef=fp16]"))
    plain = store_and_load(state, Format.parse("int8"))
    assert mismatches(loaded, plain) == []
    assert mismatches(lost, store_and_load(state - plain, Format.parse("fp16"))) == []


def test_second_store_adds_the_loss_back() -> None:
    state, later = regimes()["normal"], regimes()["halfway"]
    fmt = Format.parse("fp8[ef=int8]+sr")
    bits = words_for(1)
    _, lost = store_and_load_with_feedback(state, None, fmt, bits=bits)
    loaded, lost_later = store_and_load_with_feedback(later, lost, fmt, bits=bits)
    plain = store_and_load(later + lost, Format.parse("fp8+sr"), bits=bits)
    assert mismatches(loaded, plain) == []
    assert mismatches(lost_later, store_and_load(later + lost - plain, Format.parse("int8"))) == []
    assert mismatches(loaded, store_and_load(later, Format.parse("fp8+sr"), bits=bits)) != []


def _drift(text: str) -> float:
    """Mean error of what loads back over 64 stores of a state whose true value never changes."""
    state = regimes()["normal"]
    fmt, residual, total = Format.parse(text), None, torch.zeros_like(state)
    for _ in range(64):
        if fmt.error_feedback is None:
            loaded = store_and_load(state, fmt)
        else:
            loaded, residual = store_and_load_with_feedback(state, residual, fmt)
        total += loaded - state
    return (total / 64).abs().max().item()


def test_feedback_averages_the_error_away() -> None:
    # The losses telescope: with an exact residual the 64 errors add up to one residual, at most half a step.
    step = regimes()["normal"].abs().max().item() / 127
    assert _drift("int8[tensor,ef=fp32]") <= 1.01 * step / 2 / 64 + 1e-8
    assert _drift("int8[tensor]") > 0.4 * step


def test_dtype_is_kept_and_arithmetic_is_float32() -> None:
    state = regimes()["normal"].double()
    fmt = Format.parse("int8[ef=int8]")
    loaded, lost = store_and_load_with_feedback(state, None, fmt)
    single, single_lost = store_and_load_with_feedback(state.float(), None, fmt)
    assert loaded.dtype == lost.dtype == torch.float64
    assert torch.equal(loaded, single.double()) and torch.equal(lost, single_lost.double())


def test_a_state_that_diverged_shows() -> None:
    loaded, lost = store_and_load_with_feedback(regimes()["not finite"], None, Format.parse("int8[ef=int8]"))
    assert not loaded[0, 0, 0, 3].isfinite() and not lost[0, 0, 0, 3].isfinite()


@pytest.mark.usefixtures("unchecked_annotations")
def test_refusals() -> None:
    state, fmt = regimes()["normal"], Format.parse("int8[ef=int8]")
    with pytest.raises(ValueError, match="expected a format with error feedback, .* got int8; use store_and_load"):
        store_and_load_with_feedback(state, None, Format.parse("int8"))
    with pytest.raises(ValueError, match="expected a residual like the state"):
        store_and_load_with_feedback(state, state[:, :1], fmt)
    with pytest.raises(ValueError, match="expected a residual like the state"):
        store_and_load_with_feedback(state, state.double(), fmt)
