"""The optimiser of the built-in models: orthogonalised momentum for matrices, AdamW for everything else."""

# torch and its companions ship partial types: what comes out of them is unknown by no fault of this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from replayeval.models.builtin.config import TrainConfig

_MOMENTUM = 0.95


def orthogonalise(
    matrices: Float[Tensor, "stack height width"], *, steps: int = 5
) -> Float[Tensor, "stack height width"]:
    """Move the singular values of each matrix towards 1 by a quintic Newton-Schulz iteration.

    Args:
        matrices: A stack of equally shaped matrices.
        steps: Iterations.

    Returns:
        The stack; singular values end between about 0.7 and 1.2.

    Rounding:
        On a GPU the iteration runs in bfloat16.
    """
    work = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = work.shape[-2] > work.shape[-1]
    work = work.transpose(-1, -2) if tall else work
    work = work / (work.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = work @ work.transpose(-1, -2)
        work = 3.4445 * work + (-4.7750 * gram + 2.0315 * gram @ gram) @ work
    return (work.transpose(-1, -2) if tall else work).to(matrices.dtype)


class SplitOptimiser:
    """Trains the inner matrices by orthogonalised momentum and the rest by AdamW.

    Args:
        model: The model; parameters of 2 axes with at least 16 rows, except embedding and output head, are matrices.
        config: Rates and decay.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        """Sort the parameters and start with empty moments."""
        self._config = config
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            inner = parameter.ndim == 2 and min(parameter.shape) >= 16 and "embed" not in name and "lm_head" not in name
            if inner:
                by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                others.append(parameter)
        self._stacks = list(by_shape.values())
        self._momenta = [torch.zeros_like(torch.stack([p.detach() for p in stack])) for stack in self._stacks]
        self._adam = torch.optim.AdamW(others, lr=config.rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
        self._parameters = [p for stack in self._stacks for p in stack] + others

    def step(self, factor: float) -> None:
        """Apply the gradients and clear them.

        Args:
            factor: Share of the peak rates.
        """
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._adam.param_groups:
            group["lr"] = self._config.rate * factor
        self._adam.step()
        rate = self._config.matrix_rate * factor
        with torch.no_grad():
            for stack, momentum in zip(self._stacks, self._momenta, strict=True):
                self._step_stack(stack, momentum, rate)
        for parameter in self._parameters:
            parameter.grad = None

    def _step_stack(self, stack: list[nn.Parameter], momentum: Tensor, rate: float) -> None:
        gradient = torch.stack([p.grad if p.grad is not None else torch.zeros_like(p) for p in stack])
        momentum.lerp_(gradient, 1.0 - _MOMENTUM)
        update = orthogonalise(gradient.lerp(momentum, _MOMENTUM))
        height, width = momentum.shape[-2:]
        scale = max(1.0, height / width) ** 0.5
        for parameter, change in zip(stack, update.unbind(0), strict=True):
            parameter.mul_(1.0 - rate * self._config.weight_decay).add_(change, alpha=-rate * scale)

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to go on."""
        return {"momenta": self._momenta, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        saved: Iterable[Tensor] = state["momenta"]
        for momentum, value in zip(self._momenta, saved, strict=True):
            momentum.copy_(value)
        self._adam.load_state_dict(state["adam"])
