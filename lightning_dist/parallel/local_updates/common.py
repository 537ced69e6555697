"""The weights that all workers have in common, and the outer optimizer that moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

OuterFactory = Callable[[Iterable[Tensor]], Optimizer]
"""Makes an outer optimizer of the common weights: ``functools.partial(torch.optim.Adam, lr=0.1)``, for example."""


def make_outer(outer: str | OuterFactory) -> OuterFactory:
    """The factory behind a name.

    ``"average"`` takes the mean update as it is (local SGD, Stich 2019; FedAvg, McMahan et al. 2017). ``"nesterov"``
    is DiLoCo's outer step (Douillard et al. 2023): SGD with Nesterov momentum 0.9 and learning rate 0.7. Any other
    optimizer is FedOpt (Reddi et al. 2021); SGD with momentum is SlowMo (Wang et al. 2020) for a constant inner
    learning rate.

    Raises:
        ValueError: ``outer`` is neither a known name nor callable.
    """
    if outer == "average":
        return lambda weights: torch.optim.SGD(weights, lr=1.0)
    if outer == "nesterov":
        return lambda weights: torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)
    if isinstance(outer, str) or not callable(outer):
        raise ValueError(
            f"outer={outer!r} does not fit: give 'average', 'nesterov', or a function that makes a torch optimizer of"
            " the weights it is given, such as functools.partial(torch.optim.SGD, lr=1.0, momentum=0.5)."
        )
    return outer


class CommonWeights:
    """What the workers agreed on when the round began; the mean update is the outer optimizer's negative gradient.

    Weights in 16 bit are kept in float32 here, so that small outer steps are not lost.

    Args:
        parameters: The worker's parameters, equal on all workers.
        buffers: Floating-point buffers (batch statistics), which are averaged and know no optimizer.
        outer: Makes the outer optimizer.
    """

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], outer: OuterFactory) -> None:
        self._local = [*parameters, *buffers]
        self._parameters = len(parameters)
        self.weights = [_wide(tensor.detach()) for tensor in self._local]
        self.optimizer = outer([weight.requires_grad_() for weight in self.weights[: self._parameters]])
        self._trained = self._trainable()
        self._swapped = False

    def _trainable(self) -> set[int]:
        parameters = self._local[: self._parameters]
        return {place for place, tensor in enumerate(parameters) if tensor.requires_grad}

    def _exchanged(self) -> list[int]:
        """Parameters that trained at the beginning or at the end of the round, then buffers."""
        return [*sorted(self._trained | self._trainable()), *range(self._parameters, len(self._local))]

    @torch.no_grad()
    def update(self) -> list[Tensor]:
        """What this worker has changed in this round, tensor by tensor, without what never trains."""
        pairs = [(self._local[place], self.weights[place]) for place in self._exchanged()]
        return [local.detach().to(weight.dtype) - weight for local, weight in pairs]

    @torch.no_grad()
    def step(self, mean: Sequence[Tensor]) -> None:
        """Moves the common weights by the workers' mean update, and begins the next round from them."""
        for place, change in zip(self._exchanged(), mean, strict=True):
            if place < self._parameters:
                self.weights[place].grad = -change
            else:
                self.weights[place] += change
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Gives up what this worker has done since the round began."""
        for local, weight in zip(self._local, self.weights, strict=True):
            local.copy_(weight)
        self._trained = self._trainable()

    @torch.no_grad()
    def agree(self) -> None:
        """Takes the worker's weights, equal on all workers, for the common ones."""
        for local, weight in zip(self._local, self.weights, strict=True):
            weight.copy_(local)

    @torch.no_grad()
    def swap(self) -> None:
        """Changes the worker's weights and the common ones round, for evaluation; a second call changes them back."""
        for local, weight in zip(self._local, self.weights, strict=True):
            mine = local.to(weight.dtype, copy=True)
            local.copy_(weight)
            weight.copy_(mine)
        self._swapped = not self._swapped

    @property
    def swapped(self) -> bool:
        """Whether the worker's tensors hold the common weights just now."""
        return self._swapped

    def state_dict(self) -> dict[str, Any]:
        return {"weights": [weight.detach() for weight in self.weights], "outer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up the state of equal parameters and the same kind of outer optimizer."""
        for weight, saved in zip(self.weights, state["weights"], strict=True):
            weight.copy_(saved)
        self.optimizer.load_state_dict(state["outer"])


def _wide(tensor: Tensor) -> Tensor:
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.to(torch.float32 if half else tensor.dtype, copy=True)
