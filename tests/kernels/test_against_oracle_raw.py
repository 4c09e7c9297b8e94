"""The oracle's way from raw layer parameters to outputs agrees with the float32 cores that transformers ships.

Those cores were written from other sources, so they check the oracle itself: signs of the decays, the clamp of the time
step, where epsilon goes in the norms, the scale of the queries, and which key head serves which value head.
"""

import numpy as np
import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate, recurrent_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from tests.kernels.against_oracle import relative_error
from tests.oracles import recurrence as oracle

TOKENS, HEADS, KEY_HEADS, D_V, D_K = 45, 6, 3, 8, 16

# float32 sums of d_k products, folded over the tokens: 2**-24 * 16 * 45 in the worst case.
TOLERANCE = D_K * TOKENS * 2.0**-24


def as_batch(x: oracle.Array) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.float32))[None]


def draw(seed: int, *shape: int) -> oracle.Array:
    return np.random.default_rng([99, seed]).standard_normal(shape).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.4, 0.9)])
def test_mamba2(limit: tuple[float, float]) -> None:
    x, dt = draw(0, TOKENS, HEADS, D_V), draw(1, TOKENS, HEADS)
    b, c = draw(2, TOKENS, KEY_HEADS, D_K), draw(3, TOKENS, KEY_HEADS, D_K)
    dt_bias, a_log, d = draw(4, HEADS), draw(5, HEADS) - 2, draw(6, HEADS)
    result = mamba2_chunk_scan(
        as_batch(x),
        as_batch(dt),
        -torch.exp(as_batch(a_log)[0]),
        as_batch(b),
        as_batch(c),
        chunk_size=16,
        D=as_batch(d)[0],
        dt_bias=as_batch(dt_bias)[0],
        dt_softplus=True,
        dt_limit=limit,
        return_final_states=True,
    )
    outputs, state = result
    inputs, skip = oracle.mamba2_inputs(x=x, dt=dt, dt_bias=dt_bias, a_log=a_log, b=b, c=c, d=d, time_step_limit=limit)
    trace = oracle.plain(inputs)
    assert relative_error(outputs[0].double().numpy(), trace.outputs + skip) < TOLERANCE
    assert relative_error(state[0].double().numpy(), trace.working) < TOLERANCE
    assert relative_error(outputs[0].double().numpy(), trace.outputs) > 10 * TOLERANCE


@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
def test_gated_delta_net(beta_scale: float) -> None:
    query, key = draw(0, TOKENS, KEY_HEADS, D_K), draw(1, TOKENS, KEY_HEADS, D_K)
    # A key of zeros has no direction; epsilon must keep it finite.
    key[7] = 0.0
    value, a, b = draw(2, TOKENS, HEADS, D_V), draw(3, TOKENS, HEADS), draw(4, TOKENS, HEADS)
    dt_bias, a_log = draw(5, HEADS), draw(6, HEADS) - 2
    outputs, state = torch_recurrent_gated_delta_rule(
        as_batch(query),
        as_batch(key),
        as_batch(value),
        g=-as_batch(a_log).exp() * torch.nn.functional.softplus(as_batch(a) + as_batch(dt_bias)),
        beta=beta_scale * as_batch(b).sigmoid(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    inputs = oracle.delta_inputs(
        query=query, key=key, value=value, a=a, dt_bias=dt_bias, a_log=a_log, b=b, beta_scale=beta_scale
    )
    trace = oracle.plain(inputs)
    assert state is not None
    assert relative_error(outputs[0].double().numpy(), trace.outputs) < TOLERANCE
    # This core keeps its state with keys first.
    assert relative_error(state[0].double().numpy().transpose(0, 2, 1), trace.working) < TOLERANCE


def test_kimi_delta_attention() -> None:
    query, key, value = draw(0, TOKENS, HEADS, D_K), draw(1, TOKENS, HEADS, D_K), draw(2, TOKENS, HEADS, D_V)
    a, b = draw(3, TOKENS, HEADS, D_K), draw(4, TOKENS, HEADS)
    dt_bias, a_log = draw(5, HEADS, D_K), draw(6, HEADS) - 2
    inputs = oracle.delta_inputs(query=query, key=key, value=value, a=a, dt_bias=dt_bias, a_log=a_log, b=b)
    gate = ForgetGate(a_log=a_log, dt_bias=dt_bias)
    with torch.no_grad():
        decay = gate(as_batch(a.reshape(TOKENS, HEADS * D_K)))
    outputs, state = recurrent_kimi_delta_attention(
        as_batch(query),
        as_batch(key),
        as_batch(value),
        g=decay,
        beta=as_batch(b).sigmoid(),
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    trace = oracle.plain(inputs)
    assert relative_error(outputs[0].double().numpy(), trace.outputs) < TOLERANCE
    assert relative_error(state[0].double().numpy().transpose(0, 2, 1), trace.working) < TOLERANCE


class ForgetGate(KimiLinearForgetGate):
    """The gate of Kimi Linear without its low-rank projection."""

    def __init__(self, *, a_log: oracle.Array, dt_bias: oracle.Array) -> None:
        torch.nn.Module.__init__(self)
        self.head_dim = D_K
        self.f_a_proj = torch.nn.Identity()
        self.f_b_proj = torch.nn.Identity()
        self.dt_bias = torch.nn.Parameter(as_batch(dt_bias)[0].flatten())
        self.A_log = torch.nn.Parameter(as_batch(a_log).view(1, 1, HEADS, 1))


def test_softplus_of_large_arguments() -> None:
    x = np.array([-800.0, -30.0, 0.0, 30.0, 800.0])
    assert np.all(np.isfinite(oracle.softplus(x)))
    assert oracle.softplus(x)[2] == pytest.approx(np.log(2.0), rel=1e-15)
    assert oracle.softplus(x)[4] == 800.0
    assert oracle.softplus(x)[1] == pytest.approx(np.exp(-30.0), rel=1e-12)


def test_unit_puts_epsilon_inside_the_root() -> None:
    tiny = np.full((1, 1, 4), 1e-3)
    assert oracle.unit(tiny)[0, 0, 0] == pytest.approx(1e-3 / np.sqrt(4e-6 + 1e-6), rel=1e-14)


def test_one_step_by_hand() -> None:
    """Two value heads on one key head, every number worked out on paper."""
    inputs = oracle.Inputs(
        query=np.array([[[1.0, 2.0]], [[3.0, 1.0]]]),
        key=np.array([[[1.0, 0.0]], [[0.0, 2.0]]]),
        value=np.array([[[4.0], [1.0]], [[2.0], [6.0]]]),
        log_decay=np.log(np.array([[0.5, 1.0], [0.25, 0.5]])),
        beta=None,
    )
    trace = oracle.plain(inputs)
    assert trace.outputs.tolist() == [[[4.0], [1.0]], [[3 * 1.0 + 4.0], [3 * 0.5 + 12.0]]]
    assert trace.working.tolist() == [[[1.0, 4.0]], [[0.5, 12.0]]]
    delta = oracle.plain(
        oracle.Inputs(
            query=inputs.query,
            key=inputs.key[[0, 0]],
            value=inputs.value,
            log_decay=inputs.log_decay,
            beta=np.array([[1.0, 0.5], [0.5, 1.0]]),
        )
    )
    # Head 0: S = 4, then u = 0.5 (2 - 0.25 * 4) = 0.5, S = 1.5. Head 1: S = 0.5, then u = 6 - 0.25, S = 6.
    assert delta.working.tolist() == [[[1.5, 0.0]], [[6.0, 0.0]]]
    assert delta.outputs.tolist() == [[[4.0], [0.5]], [[4.5], [18.0]]]


def test_a_channel_decay_multiplies_key_columns() -> None:
    inputs = oracle.Inputs(
        query=np.array([[[1.0, 10.0]]]),
        key=np.array([[[0.0, 0.0]]]),
        value=np.zeros((1, 1, 2)),
        log_decay=np.log(np.array([[[0.5, 0.25]]])),
        beta=np.ones((1, 1)),
    )
    trace = oracle.plain(inputs, state=np.array([[[2.0, 4.0], [6.0, 8.0]]]))
    assert trace.working.tolist() == [[[1.0, 1.0], [3.0, 2.0]]]
    assert trace.outputs.tolist() == [[[11.0, 23.0]]]
