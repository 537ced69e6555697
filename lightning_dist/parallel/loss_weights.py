"""The weight of each loss in an optimizer step: exact means over batches, accumulation and data ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class LossWeights:
    """Turns a mean of means into one mean: sum(w * loss) / sum(w) over one optimizer step's batches on all data ranks.

    Data parallelism averages gradients over ranks and Lightning divides losses by the accumulation window, so equal
    weights need nothing. Otherwise each batch's loss is scaled by ``w / reference`` before backward, and the gradients
    once, before unscaling and clipping, by what is left of the exact factor. The reference only keeps numbers in a
    good range: it cancels.

    Args:
        data_group: The data ranks; None if there is only one.
        equal_on_all_ranks: The weights are whole numbers known to be the same on every data rank at each batch, so
            nothing has to be exchanged.
    """

    def __init__(self, data_group: dist.ProcessGroup | None, equal_on_all_ranks: bool) -> None:
        self._group = data_group
        self._exchange = data_group is not None and not equal_on_all_ranks
        self._ranks = dist.get_world_size(data_group) if data_group is not None else 1
        self._reference: Any = 1.0
        self._window: list[Any] = []

    @property
    def batches(self) -> int:
        """How many batches of the present window have been added."""
        return len(self._window)

    def begin(self) -> None:
        """A new window begins."""
        self._window = []

    def truncate(self, batches: int) -> None:
        """Forgets the batches after the first ``batches``: a closure that is called again starts from there."""
        del self._window[batches:]

    def add(self, weight: Tensor | float, device: torch.device) -> Tensor | float:
        """Adds a batch to the window and returns the factor for its loss.

        Collectives: on the very first call, one all-reduce of a scalar over the data ranks, where their weights may
        differ.

        Args:
            weight: Number of samples, or what ``loss_weight`` gave (a scalar; it may be 0).
            device: Where the loss lives.
        """
        if not self._exchange and not isinstance(weight, Tensor):
            if not self._window:
                self._reference = float(weight) or 1.0
            self._window.append(weight)
            return weight / self._reference
        weight = torch.as_tensor(weight, device=device).detach().to(_widest(device)).reshape(())
        if not isinstance(self._reference, Tensor):
            self._reference = self._power_of_two(weight)
        self._window.append(weight)
        return weight / self._reference

    def factor(self, weight: Tensor | float) -> Tensor | float:
        """The factor for a part's loss, where the batch that was added last is made of parts with weights."""
        if isinstance(weight, Tensor):
            weight = weight.detach().to(_widest(weight.device)).reshape(())
        return weight / self._reference

    def gradient_factor(self, window: int) -> Tensor | float:
        """The factor for the gradients of the window's batches.

        Collectives: one all-reduce of a scalar over the data ranks, where their weights may differ.

        Args:
            window: The number by which Lightning divided each loss (``accumulate_grad_batches``).

        Returns:
            A number, or a scalar on the losses' device that the host has not read; 0 if all weights are 0.
        """
        if not self._window:
            return 1.0
        reference, batches = self._reference, self._window
        if not isinstance(reference, Tensor):
            total = sum(batches)
            return window * reference / total if total else 0.0
        total = torch.stack(batches).sum()
        if self._exchange:
            dist.all_reduce(total, group=self._group)
        factor = window * self._ranks * reference / total
        return torch.where(total > 0, factor, torch.zeros_like(factor))

    def _power_of_two(self, weight: Tensor) -> Tensor:
        """The mean first weight, rounded to a power of two so that it cancels without rounding in any run."""
        mean = weight.clone()
        if self._exchange:
            dist.all_reduce(mean, group=self._group)
            mean /= self._ranks
        return torch.where(mean > 0, torch.exp2(torch.round(torch.log2(mean))), torch.ones_like(mean))


class UndefinedGradients:
    """Stops the undefined gradient of a batch that counts nothing: a masked mean over no label is 0/0.

    Multiplying such a loss by 0 leaves NaN. What is right is a gradient of 0 at the network's outputs, so that is
    where it is put: at the outputs of the module's parts and of their parts.

    Args:
        module: The module with the parts.
    """

    def __init__(self, module: nn.Module) -> None:
        self.counts: Tensor | None = None
        """Whether the present batch counts (a boolean scalar on the device); None outside training steps."""
        parts = {part: None for child in module.children() for part in (child, *child.children())}
        for part in parts:
            if any(True for _ in part.parameters()):
                part.register_forward_hook(self._watch_outputs)

    def _watch_outputs(self, _module: nn.Module, _args: Any, output: Any) -> None:
        counts = self.counts
        if counts is None or not torch.is_grad_enabled():
            return
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: torch.where(counts, gradient, torch.zeros_like(gradient)))


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
