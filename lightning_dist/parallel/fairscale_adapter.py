"""The only door to FairScale (0.4.13): optimizer states and gradients in parts, without what is silently wrong there.

Importing this module imports fairscale, so it is imported where it is needed and not before. Everything else of
FairScale is left alone; docs/fairscale.md says what was found of each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from fairscale.nn.data_parallel.sharded_ddp import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.parallel.optimizer_shards import ClosureFirst, local_part

__all__ = ["ShardedModule", "ShardedOptimizer"]


class ShardedOptimizer(ClosureFirst, OSS):
    """FairScale's OSS around an optimizer that exists already: each rank keeps the state of its part of the parameters.

    The optimizer itself is not made anew from its options, so it may be of any class, and its parameter groups stay
    the same dicts: who holds them (the module, a scheduler) sees what is used. Differences from OSS, each of which is
    silently wrong there under Lightning:

    * a closure runs before the options of the groups are passed on (:class:`ClosureFirst`);
    * parameters whose memory was replaced are an error: OSS would go on broadcasting the memory they had;
    * groups added later are refused: their gradients would not be reduced;
    * nothing is cast to 16 bit for the broadcast.

    Collectives: in :meth:`step`, one broadcast for each rank's parameters. The constructor issues none; parameters
    become views of one buffer for each rank.

    Args:
        optimizer: The optimizer to shard. It keeps its groups and, of its state, this rank's part.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._memory: list[tuple[Tensor, int]] = []
        super().__init__(optimizer.param_groups, optim=partial(local_part, optimizer))  # type: ignore[call-arg]
        self.defaults = optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Evaluates the closure, steps this rank's part, and broadcasts each part from its rank."""
        if any(parameter.data_ptr() != memory for parameter, memory in self._memory):
            raise RuntimeError(
                "The memory of a parameter was replaced after FairScale had made it part of a buffer, so the ranks"
                " would drift apart; change parameters in place (copy_) and move or cast the module before fit."
            )
        return super().step(closure, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not self.in_super_constructor:
            raise RuntimeError(
                "A parameter group can't be added after FairScale has divided the optimizer among the ranks: the"
                " group's gradients would not be reduced. Give all groups in configure_optimizers, and freeze by"
                " requires_grad what trains later."
            )
        super().add_param_group(param_group)

    def _setup_flat_buffers(self) -> None:
        super()._setup_flat_buffers()
        trainable = (p for group in self.param_groups for p in group["params"] if p.requires_grad)
        self._memory = [(parameter, parameter.data_ptr()) for parameter in trainable]


class ShardedModule(ShardedDataParallel):
    """FairScale's ShardedDataParallel: each gradient is reduced to the one rank that needs it, and freed on the others.

    Always without the reduce buffer, which FairScale has by default: gradients that are zeroed to None leave the
    buffer, which is then reduced in their place, and they are not. Differences from ShardedDataParallel:

    * ranks that reduce different parameters, or in another order, are an error (see ``agree``) instead of a mixture;
    * gradients that stay unreduced are an error (:meth:`check_reduced`).

    Collectives: in forward, a broadcast of each of the module's buffers; in backward, a reduction of each parameter's
    gradient, none within ``no_sync()``.

    Args:
        module: What to wrap; the same on all ranks.
        optimizers: Its optimizers.
        agree: Called before a reduction that is not the one of the last backward, with a running number and the
            parameter's name: it raises on all ranks unless all of them call it with the same.
    """

    def __init__(
        self, module: nn.Module, optimizers: Iterable[ShardedOptimizer], agree: Callable[[int, str], None]
    ) -> None:
        super().__init__(module, list(optimizers), sync_models_at_startup=False, reduce_buffer_size=0)
        self._agree = agree
        self._agreements = 0
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._last_order: list[str] = []
        self._order: list[str] = []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module, in whatever mode its parts are; the hooks that reduce exist afterwards."""
        self._order = []
        output = super().forward(*inputs, **kwargs)
        if not self._grad_hooks and any(parameter.requires_grad for parameter in self._all_params):
            raise RuntimeError("FairScale's wrapper is in evaluation mode, in which no gradient would be reduced.")
        return output

    def check_reduced(self) -> None:
        """After the backward of an optimizer step: every gradient is reduced, and is where it belongs.

        Raises:
            RuntimeError: Naming the parameters that got a gradient which no reduction has seen.
            DisagreementError: When this rank has reduced fewer gradients than the others.
        """
        if len(self._order) < len(self._last_order):
            self._ask("the end of backward")
        self._last_order = self._order
        left = [
            self._names.get(id(parameter), "?")
            for parameter, waits in zip(self._trainable_params, self._grad_to_be_reduced, strict=True)
            if parameter.grad is not None and (waits or self._trainable_param_to_rank[parameter] != self._rank)
        ]
        if left:
            raise RuntimeError(
                f"The gradients of {', '.join(left)} were not reduced over the ranks: FairScale reduces each once"
                " in the last backward of an optimizer step, so each must be part of that batch's loss if it was part"
                " of an earlier one's, and backward must run once."
            )

    @property
    def accumulating(self) -> bool:
        """Whether gradients stay on this rank now, within ``no_sync()``."""
        return self._should_accumulate_grads

    def detach(self) -> None:
        """Takes the hooks off the parameters, which outlive this object."""
        while self._grad_hooks:
            self._grad_hooks.pop().remove()

    def _get_reduce_fn(self, index: int, param: Tensor, dst_rank: int) -> Callable[..., None]:
        reduce = super()._get_reduce_fn(index, param, dst_rank)
        name = self._names.get(id(param), "?")

        def checked(*_: Any) -> None:
            if not self._should_accumulate_grads and self._grad_to_be_reduced[index]:
                place = len(self._order)
                self._order.append(name)
                if place >= len(self._last_order) or self._last_order[place] != name:
                    self._ask(name)
            reduce()

        return checked

    def _ask(self, what: str) -> None:
        self._agreements += 1
        self._agree(self._agreements, what)
