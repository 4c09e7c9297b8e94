"""Conventional kernels of the field, in the layout and launch configuration that suits each best on this card."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayeval.engine.kernel_cases import Clock, LayerSets, event_seconds
from replayeval.errors import ConfigError, NumericsError
from replayssm.decode import DecodeToken
from replayssm.records import Recurrence
from replayssm.slots import DecodeSlots

FLA = "FLA fused_recurrent_gated_delta_rule, value-first, in place"
SSU = "selective_state_update design, in place"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A conventional kernel with one launch configuration.

    Attributes:
        name: What it is.
        configuration: Its launch configuration, in words.
        run: Updates the float32 states `[batch, heads, d_v, d_k]` in place and writes the outputs.
    """

    name: str
    configuration: str
    run: Callable[[DecodeSlots, DecodeToken, Tensor, Tensor], None]


def peers(recurrence: Recurrence) -> Iterator[Peer]:
    """Every configuration of the peer of a recurrence.

    Raises:
        ConfigError: When its package is missing.
    """
    if recurrence is Recurrence.MAMBA2:
        for rows in (4, 8, 16, 32, 64):
            for warps in (1, 2, 4, 8):
                # Fewer than 8 or more than 128 numbers per thread waste threads or spill.
                if 8 <= rows * 4 // warps <= 128:
                    yield Peer(name=SSU, configuration=f"{rows} rows, {warps} warps", run=_state_update(rows, warps))
        return
    kernel = _fla_kernel()
    for rows in (8, 16, 32, 64):
        for warps in (1, 2, 4):
            if rows * 4 // warps <= 128:
                yield Peer(name=FLA, configuration=f"{rows} rows, {warps} warps", run=_fla(kernel, rows, warps))


def check_peer(peer: Peer, slots: DecodeSlots, token: DecodeToken, expected: Tensor, limit: float) -> float:
    """Run a peer once on the states of `slots` and compare its outputs with float64.

    Returns:
        The error relative to the norm of the outputs.

    Raises:
        NumericsError: When it is above `limit`; nothing is timed then.
    """
    state = slots.copies[0].payload.clone()
    out = torch.full_like(token.value, torch.nan, dtype=torch.float32)
    peer.run(slots, token, state, out)
    error = relative_error(out, expected)
    if not error <= limit:
        raise NumericsError(
            f"expected {peer.name} ({peer.configuration}) to agree with float64 within {limit:.1e} of its norm, got "
            f"{error:.2e}; nothing was timed"
        )
    return error


def relative_error(got: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over that of what was expected, in float64."""
    wrong = (got.double() - expected.double()).square().sum()
    return float((wrong / expected.double().square().sum()).sqrt())


def best_peer(sets: LayerSets, clock: Clock) -> tuple[Peer, float]:
    """The fastest configuration, and the time of one layer step."""
    found: list[tuple[float, Peer]] = []
    for peer in peers(sets.slots[0].shape.recurrence):

        def run(peer: Peer = peer) -> None:
            for slots in sets.slots:
                peer.run(slots, sets.token, slots.copies[0].payload, sets.out)

        found.append((clock.seconds(run) / sets.count, peer))
    seconds, peer = min(found, key=lambda pair: pair[0])
    return peer, seconds


def ceilings(size_bytes: int = 2**31) -> dict[str, float]:
    """Bytes per second of streams that read, copy, and update in place, read and written bytes together."""
    module = importlib.import_module("replayeval.engine.peers_triton")
    count = size_bytes // 4
    source = torch.zeros(count, device="cuda")
    target = torch.zeros(count, device="cuda")
    found: dict[str, float] = {}
    for name, passes in (("read", 1), ("copy", 2), ("read_modify_write", 2)):
        kernel: Any = getattr(module, f"{name}_kernel")
        best = 0.0
        for block, warps in ((1024, 4), (2048, 4), (4096, 8), (8192, 8)):
            grid = (-(-count // block),)

            def run(kernel: Any = kernel, grid: tuple[int] = grid, block: int = block, warps: int = warps) -> None:
                kernel[grid](source, target, count, BLOCK=block, num_warps=warps)

            run()
            best = max(best, passes * size_bytes / event_seconds(run, 10))
        found[name] = best
    return found


def _state_update(rows: int, warps: int) -> Callable[[DecodeSlots, DecodeToken, Tensor, Tensor], None]:
    kernel: Any = importlib.import_module("replayeval.engine.peers_triton").state_update_kernel

    def run(slots: DecodeSlots, token: DecodeToken, state: Tensor, out: Tensor) -> None:
        shape, constants = slots.shape, slots.constants
        if constants is None:
            raise ValueError("expected the constants of a Mamba-2 layer, got none")
        kernel[(-(-shape.d_v // rows), out.shape[0], shape.heads)](
            state, token.value, token.dt, constants.dt_bias, constants.decay_rate, token.key, token.query,
            constants.skip, out, HEADS=shape.heads, GROUPS=shape.key_heads, DV=shape.d_v, DK=shape.d_k, BM=rows,
            num_warps=warps,
        )  # fmt: skip

    return run


def _fla_kernel() -> Any:
    try:
        module = importlib.import_module("fla.ops.gated_delta_rule.fused_recurrent")
    except ImportError as error:
        raise ConfigError(
            f"the comparison needs FLA's kernels, which cannot be imported ({error}); install them with "
            "`pip install flash-linear-attention==0.6.0`, or pass --shape with Mamba-2 layers only"
        ) from None
    return module.fused_recurrent_gated_delta_rule_fwd_kernel


def _fla(kernel: Any, rows: int, warps: int) -> Callable[[DecodeSlots, DecodeToken, Tensor, Tensor], None]:
    def run(slots: DecodeSlots, token: DecodeToken, state: Tensor, out: Tensor) -> None:
        shape = slots.shape
        channels = shape.recurrence is Recurrence.KDA
        batch = out.shape[0]
        kernel[(-(-shape.d_v // rows) * batch * shape.heads,)](
            q=token.query, k=token.key, v=token.value, g=None if channels else token.log_decay,
            gk=token.log_decay if channels else None, gv=None, beta=token.beta, A_log=None, dt_bias=None, o=out,
            h0=state, ht=state, cu_seqlens=None, scale=shape.d_k**-0.5, T=1, H=shape.key_heads, HV=shape.heads,
            K=shape.d_k, V=shape.d_v, BK=shape.d_k, BV=rows, IS_BETA_HEADWISE=True, USE_QK_L2NORM_IN_KERNEL=True,
            APPLY_BETA_SIGMOID=False, ALLOW_NEG_EIGVAL=False, STATE_V_FIRST=True, num_warps=warps, num_stages=3,
        )  # fmt: skip

    return run
