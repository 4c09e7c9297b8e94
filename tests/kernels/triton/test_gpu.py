"""The window kernels on a card, at the shapes of real models (ReplaySSM, Table 5; Kimi Linear)."""

import importlib

import pytest
import torch

from replayeval.engine.kernel_cases import SHAPES
from replayeval.engine.precision import exact_float32
from replayssm.backend import Execution
from replayssm.policy import Policy
from replayssm.records import TokenInputs
from replayssm.replay import StateBank
from tests.kernels.against_oracle import LAYER, SEED, Shape
from tests.kernels.triton import test_triton_formats as stores
from tests.kernels.triton.test_window_triton import TRITON, bound, exact_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ARMS = (
    "conventional:fp32",
    "conventional:fp16+sr",
    "shared:nvfp4+sr@L=1",
    "shared:nvfp4@L=16",
    "shared:nvfp4+sr@L=16",
    "shared:mxfp4+sr@L=64",
    "shared:fp8[tile=16]@L=7",
    "shared:int8[head]+sr@L=16",
    "separate:nvfp4+sr/fp16+sr@L=16",
    "separate:fp8/fp32@L=40",
)


def size(name: str) -> Shape:
    layer = SHAPES[name]
    return Shape(heads=layer.heads, key_heads=layer.key_heads, d_v=layer.d_v, d_k=layer.d_k)


def normal_inputs(name: str, rows: int, tokens: int) -> TokenInputs:
    """Tokens of one sequence, the same for all rows, on the card."""
    recurrence, shape = SHAPES[name].recurrence, size(name)
    make = torch.Generator().manual_seed(0)
    like = exact_inputs(recurrence, shape, 1, tokens)

    def normal(like: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(like.shape[1:], generator=make)
        return drawn.expand(rows, *drawn.shape).contiguous().cuda()

    delta = like.beta is not None
    unit = torch.nn.functional.normalize
    query, key = normal(like.query), normal(like.key)
    return TokenInputs(
        query=unit(query, dim=-1) * shape.d_k**-0.5 if delta else query,
        key=unit(key, dim=-1) if delta else key,
        value=normal(like.value),
        log_decay=-0.05 * normal(like.log_decay).abs(),
        beta=normal(like.log_decay if like.beta is None else like.beta).sigmoid() if delta else None,
    )


@pytest.mark.parametrize("window", [16, 40])
def test_results_do_not_depend_on_how_many_programs_share_a_head(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More programs that wait for each other than run at once, beside rows with read copies; equal bits."""
    walk = importlib.import_module("replayssm.triton_walk")
    texts = ("shared:nvfp4", "shared:nvfp4+sr", "separate:nvfp4/fp32", "separate:nvfp4+sr/nvfp4")
    policies = [Policy.parse(f"{text}@L={window}") for text in texts] * 8
    inputs = normal_inputs("Qwen3.5-4B", len(policies), 1000)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for parts in (1, 2):
        monkeypatch.setattr(walk, "head_parts", lambda *_, parts=parts: parts)
        bank = StateBank(policies, sequences=[0] * len(policies), seed=SEED, execution=TRITON)
        outputs = bank.advance(LAYER, SHAPES["Qwen3.5-4B"].recurrence, inputs)
        found.append((outputs, bank.checkpoints[LAYER].states))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("products", ["bf16x6", "ieee", "tf32", "bf16"])
@pytest.mark.parametrize("name", [*SHAPES])
def test_real_shapes_follow_the_recurrence(name: str, products: str) -> None:
    recurrence, shape, tokens = SHAPES[name].recurrence, size(name), 128
    inputs = normal_inputs(name, 2, tokens)
    policies = [Policy.parse("shared:fp32@L=16"), Policy.parse("separate:fp32/fp32@L=40")]
    with exact_float32(), torch.inference_mode():
        truth = StateBank(policies, sequences=[0, 0], seed=SEED).advance(
            LAYER, recurrence, inputs.map(lambda x: x.double())
        )
        execution = Execution.parse(f"triton:{products}")
        got = StateBank(policies, sequences=[0, 0], seed=SEED, execution=execution).advance(LAYER, recurrence, inputs)
    unit_roundoff = {"ieee": 2.0**-24, "bf16x6": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8}[products]
    error = float((got - truth).abs().max() / truth.abs().max())
    assert error < bound(shape, tokens, unit=unit_roundoff)
    assert (error > bound(shape, tokens) / 200) if unit_roundoff == 2.0**-24 else (error > bound(shape, tokens))


@pytest.mark.parametrize("text", stores.TEXTS)
def test_compiled_stores_are_those_of_pytorch(text: str) -> None:
    """Every regime of magnitudes: compiled, a quotient is computed otherwise than under the interpreter."""
    stores.test_stores_are_those_of_pytorch(text)


# Last, for the CPU takes minutes, and others should not wait.
@pytest.mark.parametrize("name", [*SHAPES])
def test_real_shapes_equal_pytorch_on_a_cpu(name: str) -> None:
    """Inputs whose sums have one term that is not zero: bit for bit, every kind of store, cut where windows are not."""
    recurrence, shape = SHAPES[name].recurrence, size(name)
    inputs = exact_inputs(recurrence, shape, len(ARMS), 100)
    banks = {
        device: StateBank(
            [Policy.parse(arm) for arm in ARMS],
            sequences=range(len(ARMS)),
            seed=SEED,
            execution=TRITON if device == "cuda" else Execution(),
        )
        for device in ("cpu", "cuda")
    }
    for start, stop in ((0, 41), (41, 100)):
        outputs = {
            device: bank.advance(LAYER, recurrence, inputs.map(lambda x, d=device: x[:, start:stop].to(d)))  # noqa: B023
            for device, bank in banks.items()
        }
        assert torch.equal(outputs["cuda"].cpu(), outputs["cpu"])
    states = {device: bank.checkpoints[LAYER].states.cpu() for device, bank in banks.items()}
    assert torch.equal(states["cuda"], states["cpu"])
