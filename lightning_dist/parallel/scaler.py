"""Loss scaling for float16 with one decision for the whole model."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.parallel.data import local_tensor
from lightning_dist.parallel.gradients import gradient_device, norms, scale_gradients_


class GlobalGradScaler:
    """Dynamic loss scaling in which a non-finite gradient on any rank makes every rank skip the step.

    Follows ``torch.amp.GradScaler`` (same constants, same state), which decides for each rank by itself and can't
    take gradients of several meshes, or none.

    Args:
        init_scale: The first scale.
        growth_factor: What the scale is multiplied by after ``growth_interval`` steps without overflow.
        backoff_factor: What it is multiplied by after an overflow.
        growth_interval: Number of steps.
        group: The ranks that hold the model; None is the world.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._scale = init_scale
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        self._good_steps = 0
        self._group = group
        self._overflow: dict[int, Tensor] = {}

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return loss * self._scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place, and finds out if any rank's is not finite.

        Collectives: one all-reduce of a scalar over the model's ranks.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        local = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        # The largest magnitude is finite exactly when every element is.
        largest = torch.stack([torch.zeros((), device=gradient_device(local, self._group)), *norms(local, math.inf)])
        overflow = (~largest.isfinite()).any().float()
        scale_gradients_(parameters, 1.0 / self._scale)
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self._group)
        self._overflow[id(optimizer)] = overflow

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps the optimizer unless a gradient somewhere was not finite. The host reads one value."""
        if self._overflow[id(optimizer)].item():
            return None
        return optimizer.step(*args, **kwargs)

    def update(self) -> None:
        """Adapts the scale; call once after all optimizers have stepped."""
        if any(overflow.item() for overflow in self._overflow.values()):
            self._scale *= self._backoff_factor
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self._growth_interval:
                self._scale *= self._growth_factor
                self._good_steps = 0
        self._overflow.clear()

    def get_scale(self) -> float:
        return self._scale

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scale = float(state["scale"])
        self._growth_factor, self._backoff_factor = state["growth_factor"], state["backoff_factor"]
        self._growth_interval, self._good_steps = state["growth_interval"], state["_growth_tracker"]
