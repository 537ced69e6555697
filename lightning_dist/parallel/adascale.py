"""AdaScale: the learning rate of a small batch carried over to a large one, by how much the gradients agree."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from lightning_dist import _compat
from lightning_dist.parallel.gradients import norms

STATE = "adascale"
"""The entry that AdaScale adds to the optimizer's state dict."""


class AdaScale(Optimizer):
    """Wraps an optimizer and multiplies its learning rate, at each step, by the gain of the present batch size.

    With gradients that are mostly noise, a batch that is S times as large is worth up to S steps of the small one;
    with gradients that agree, no more than one. The gain r, between 1 and S, is estimated from what data parallelism
    and accumulation compute anyway: the gradient of each rank and batch, and their mean. Keep the learning rate of the
    small batch, and let its schedule count ``scale_invariant_steps``, which grow by r: :class:`ScaleInvariantSchedule`.

    Follows Johnson et al., *AdaScale SGD* (ICML 2020), with the estimators of fairscale's AdaScale, which inside a
    Trainer silently becomes the plain optimizer, uses the gain of the step before, and needs every parameter to get
    a gradient. Works without fairscale, under any strategy that keeps whole parameters on each rank.

    Collectives: in :meth:`step`, one all-reduce of two numbers for each parameter group over the world. The host reads
    them: learning rates live there.

    Args:
        optimizer: The optimizer, usually SGD, with the learning rate of the small batch.
        scale: S, how much larger the batch of a step is than the one the learning rate was chosen for; None is
            ranks x ``num_gradients_to_accumulate``: the learning rate of one batch of one rank.
        smoothing: How much of an estimate is kept at each step, from 0 up to 1; None is
            ``max(0, 1 - ranks x num_gradients_to_accumulate / 1000)``.
        num_gradients_to_accumulate: ``Trainer(accumulate_grad_batches=…)``.

    Raises:
        ValueError: A scale below 1, or above 1 where a step has one gradient only and there is nothing to compare;
            parameters of which a rank holds a part only (DTensor).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
    ) -> None:
        gradients = _world_size() * num_gradients_to_accumulate
        scale = float(gradients if scale is None else scale)
        if scale < 1 or (gradients < 2 and scale > 1):
            raise ValueError(
                f"scale={scale:g} does not fit {gradients} gradient(s) in a step (ranks x num_gradients_to_accumulate):"
                " give 1 or more, and at least two gradients to compare if it is above 1."
            )
        if smoothing is not None and not 0 <= smoothing < 1:
            raise ValueError(f"smoothing={smoothing} does not fit: give a number from 0 up to, not including, 1.")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise ValueError(
                "AdaScale compares the whole gradients of ranks, but this strategy gives each rank a part of them"
                " (DTensor); use strategy='ddp' or FairScaleShardedStrategy."
            )
        self.optimizer = optimizer
        self.gradients_sharded = False  # Set by a strategy that reduces each gradient to one rank only.
        self._scale_per_gradient = scale / gradients
        self._gradients = gradients
        self._smoothing = max(0.0, 1 - gradients / 1000) if smoothing is None else smoothing
        self._estimates = _Estimates(len(optimizer.param_groups))
        self._window = _Window(optimizer)
        # Not __del__: Lightning wraps optimizers in objects of a subclass, whose end is not the end of this one.
        weakref.finalize(self, _remove, self._window.handles)

    # What Optimizer keeps is the wrapped optimizer's, so that schedulers and loops work on either.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def gain(self, group: int | None = None) -> float:
        """The latest gain, of one parameter group or of all together; 1 before there is an estimate."""
        return self._estimates.gain(self._scale_per_gradient * self._gradients, group)

    @property
    def scale_invariant_steps(self) -> float:
        """How many steps of the small batch the steps until now were worth: the sum of their gains."""
        return self._estimates.steps

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Evaluates the closure, takes in the gradients of this step, and steps with learning rates times gains."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = self._take_in()
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for number, group in enumerate(groups):
                group["lr"] = group["lr"] * self._estimates.gain(scale, number)
            self.optimizer.step(**kwargs)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        self._estimates.steps += self._estimates.gain(scale)
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # Schedulers made for this object ask for it.
    _opt_called = True

    def _take_in(self) -> float:
        """Updates the estimates and returns the scale of this step, whose window may be shorter than usual."""
        window, ranks = self._window, _world_size()
        batches = window.backwards
        if batches == 0:
            return self._scale_per_gradient * self._gradients
        count = ranks * batches
        scale = max(1.0, self._scale_per_gradient * count)
        single, mean = window.single_square, window.reduced_square
        window.begin()
        assert single is not None and mean is not None
        sums = torch.stack([single, mean if self.gradients_sharded else mean / ranks])
        if ranks > 1:
            dist.all_reduce(sums)
        if count > 1:
            # Lightning divides each loss by the whole window's length; units cancel in the gain.
            self._estimates.update(sums[0].tolist(), (sums[1] / batches**2).tolist(), count, scale, self._smoothing)
        return scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._window.begin()
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError("AdaScale's groups are fixed: give the optimizer all its groups before wrapping it.")

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The optimizer's state dict with AdaScale's estimates beside, as tensors; torch's optimizers ignore those."""
        return {**self.optimizer.state_dict(), STATE: self.estimates()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave; estimates begin anew from that of an optimizer without AdaScale."""
        self.load_estimates(state_dict.get(STATE))
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != STATE})

    def estimates(self) -> dict[str, Tensor]:
        """AdaScale's own state."""
        return self._estimates.state_dict()

    def load_estimates(self, state: dict[str, Tensor] | None) -> None:
        """Takes what :meth:`estimates` gave, or begins anew."""
        if state is None:
            self._estimates = _Estimates(len(self.param_groups))
        else:
            self._estimates.load_state_dict(state)


class ScaleInvariantSchedule(LRScheduler):
    """Advances a schedule by whole scale-invariant steps, so that it is the small batch's schedule.

    Return it from ``configure_optimizers`` with ``"interval": "step"``, and write the wrapped schedule in steps of the
    small batch.

    Args:
        scheduler: A schedule of ``adascale``, or of the optimizer in it.
        adascale: The optimizer whose ``scale_invariant_steps`` count.
    """

    def __init__(self, scheduler: LRScheduler, adascale: AdaScale) -> None:
        self.scheduler = scheduler
        self.adascale = adascale
        self.optimizer = scheduler.optimizer
        self._done = 0

    def step(self, epoch: int | None = None) -> None:
        while self._done < math.floor(self.adascale.scale_invariant_steps):
            self.scheduler.step()
            self._done += 1

    def get_last_lr(self) -> list[float | Tensor]:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict(), "done": self._done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self._done = state_dict["done"]


class _Estimates:
    """Moving averages of the squared norm of the true gradient and of the small batch's variance, by group."""

    def __init__(self, groups: int) -> None:
        self.square = [0.0] * groups
        self.variance = [0.0] * groups
        self.weight = 0.0
        self.steps = 0.0

    def update(self, single: list[float], mean: list[float], count: int, scale: float, smoothing: float) -> None:
        """Takes in one step.

        Args:
            single: For each group, the sum over all ``count`` gradients of the squared norm.
            mean: For each group, the squared norm of their mean.
            count: How many gradients there are, ranks x batches.
            scale: How many small batches they are worth in size.
            smoothing: The part of the averages that is kept.
        """
        for group, (of_each, of_mean) in enumerate(zip(single, mean, strict=True)):
            one_gradient = (of_each - count * of_mean) / (count - 1)
            variance = one_gradient * scale / count
            square = of_mean - variance / scale
            self.variance[group] = smoothing * self.variance[group] + (1 - smoothing) * max(variance, 0.0)
            self.square[group] = smoothing * self.square[group] + (1 - smoothing) * max(square, 0.0)
        self.weight = smoothing * self.weight + 1 - smoothing

    def gain(self, scale: float, group: int | None = None) -> float:
        chosen = slice(None) if group is None else slice(group, group + 1)
        # Both averages lack the same weight of the past, which cancels.
        variance, square = sum(self.variance[chosen]), sum(self.square[chosen])
        worth = variance / scale + square
        return (variance + square) / worth if worth > 0 else 1.0

    def state_dict(self) -> dict[str, Tensor]:
        values = {"square": self.square, "variance": self.variance, "weight": self.weight, "steps": self.steps}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if len(state["square"]) != len(self.square):
            raise ValueError(
                f"The saved AdaScale has {len(state['square'])} parameter groups, this one {len(self.square)}."
            )
        self.square, self.variance = state["square"].tolist(), state["variance"].tolist()
        self.weight, self.steps = float(state["weight"]), float(state["steps"])


class _Window:
    """What the backwards since the last step gave: the gradients of each, and what they were reduced to."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._running: list[list[Tensor]] | None = None
        self.handles: list[RemovableHandle] = []
        self.begin()
        this = weakref.ref(self)
        for number, parameters in enumerate(self._groups):
            for parameter in parameters:
                trains = parameter.requires_grad
                parameter.requires_grad_(True)  # A frozen one may train later, and takes no hook as it is.
                self.handles.append(parameter.register_hook(partial(_measure, this, number)))
                parameter.requires_grad_(trains)

    def begin(self) -> None:
        self.backwards = 0
        self.single_square: Tensor | None = None
        self.reduced_square: Tensor | None = None
        self._running = None

    def measure(self, group: int, gradient: Tensor) -> None:
        """From a hook, before any reduction."""
        if self._running is None:
            self._running = [[] for _ in self._groups]
            _compat.after_backward(self._end_backward)
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        self._running[group].append(torch.linalg.vector_norm(gradient.detach(), dtype=dtype))

    def _end_backward(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        device = next(norm.device for group in running for norm in group)
        single = torch.stack([_sum_of_squares(group, device) for group in running])
        self.single_square = single if self.single_square is None else self.single_square + single
        # Earlier backwards of a window leave unreduced gradients behind, so the last one's word counts.
        reduced = ([p.grad.detach() for p in parameters if p.grad is not None] for parameters in self._groups)
        self.reduced_square = torch.stack(
            [_sum_of_squares(norms(grads, 2.0, _widest(device)), device) for grads in reduced]
        )
        self.backwards += 1


def _measure(window: weakref.ref[_Window], group: int, gradient: Tensor) -> None:
    alive = window()
    if alive is not None:
        alive.measure(group, gradient)


def _sum_of_squares(values: list[Tensor], device: torch.device) -> Tensor:
    if not values:
        return torch.zeros((), dtype=_widest(device), device=device)
    return torch.stack([value.to(_widest(device)) for value in values]).square().sum()


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
