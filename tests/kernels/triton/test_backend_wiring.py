"""A measurement says which backend made it, agrees between backends, and refuses what a backend cannot do."""

import subprocess
import sys
from typing import Any, cast

import numpy as np
import pytest
import torch

from replayeval.cli import main
from replayeval.engine.forcing import Forcing, forced_hidden_states
from replayeval.errors import ConfigError, UnsupportedArmError
from replayeval.measure import measure_kl
from replayeval.models.head import OutputHead
from replayssm.backend import Execution
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.replay import StateBank
from tests.kernels.against_oracle import Shape
from tests.kernels.triton.test_window_triton import exact_inputs
from tests.models import tiny

TOKENS = [token % 7 for token in range(40)]


def hidden_states(name: str, backend: str, tokens: int) -> torch.Tensor:
    parts: list[torch.Tensor] = []
    banks: list[StateBank] = []
    forced_hidden_states(
        OutputHead(tiny.shared(name)),
        [np.arange(tokens) % 7],
        Forcing(arms=(Policy.parse("shared:fp32@L=5"),), chunk_tokens=tokens, execution=Execution.parse(backend)),
        sequences=[0],
        banks=banks,
        chunk_done=lambda _, hidden: parts.append(hidden),
    )
    assert banks[0].execution == Execution.parse(backend)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_models_agree_between_backends(name: str) -> None:
    got, want = hidden_states(name, "triton", 9), hidden_states(name, "torch", 9)
    assert torch.isfinite(got).all()
    # About 170 units of float32 rounding through a few layers, doubled for two sides that round.
    assert float((got - want).abs().max() / want.abs().max()) < 4e-5
    # It is another order of sums: a result that is equal to the last bit would not come from the kernels.
    assert not torch.equal(got, want)


@pytest.mark.slow
def test_the_record_names_the_backend() -> None:
    model: Any = tiny.shared("mamba2")
    documents = [TOKENS]
    records = {
        backend: measure_kl(
            model, documents, arms=["shared:fp32@L=8", "shared:fp8@L=8"], lengths=[8], backend=backend, chunk=16
        ).report
        for backend in ("torch", "triton")
    }
    states = {backend: cast(dict[str, Any], record.provenance["states"]) for backend, record in records.items()}
    assert states["torch"] == {"backend": "torch", "products": "ieee", "interpreted": False}
    assert states["triton"]["backend"] == "triton" and states["triton"]["products"] == "bf16x6"
    assert states["triton"]["interpreted"] is not torch.cuda.is_available()
    assert records["torch"].provenance["fingerprint"] != records["triton"].provenance["fingerprint"]
    assert all(check.passed is not False for check in records["triton"].checks)


def test_what_cannot_run_is_refused_before_anything_runs() -> None:
    model: Any = tiny.shared("mamba2")
    with pytest.raises(
        UnsupportedArmError, match=r"backend triton:bf16x6: policy shared:int8\[ef=int8\]@L=16.*backend torch"
    ):
        measure_kl(model, [TOKENS], arms=["shared:int8[ef=int8]"], lengths=[8], backend="triton")
    with pytest.raises(ConfigError, match="expected a backend, one of torch, triton, .* got 'cuda'"):
        measure_kl(model, [TOKENS], arms=["shared:fp8"], lengths=[8], backend="cuda")


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayssm.launch.is_interpreted", lambda: False)
    model: Any = tiny.shared("mamba2")
    with pytest.raises(
        ConfigError, match="backend triton:bf16x6: Triton kernels need a CUDA device, got cpu; use backend"
    ):
        measure_kl(model, [TOKENS], arms=["shared:fp8"], lengths=[8], backend="triton")
    bank = StateBank([Policy.parse("shared:fp8")], sequences=[0], seed=0, execution=Execution.parse("triton"))
    with pytest.raises(ValueError, match="layer 0: Triton kernels need a CUDA device, got cpu; use backend torch"):
        bank.advance(0, Recurrence.GDN, exact_inputs(Recurrence.GDN, Shape(), 1, 2))


def test_the_command_line_refuses_other_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kl", "--model", "builtin:gdn", "--backend", "gpu"]) == 2
    assert "expected a backend, one of torch, triton, or triton:PRODUCTS" in capsys.readouterr().err


def test_everything_but_the_kernels_works_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
import replayssm.replay
from replayssm.launch import triton_problem
print(triton_problem(torch.device("cpu")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "the package triton is not installed; install it or use backend torch"
