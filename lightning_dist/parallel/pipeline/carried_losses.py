"""Losses that a stage's layers leave behind (routers' auxiliary losses) travel with the hidden state to the last one.

``auxiliary_loss(network)`` in the user's step, which only the last stage reaches, then finds those of all stages, with
their graph: value and gradient are those of one process, whatever factor the step gives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dist.parallel.expert.losses import PendingLosses


@dataclass
class CarriedLoss:
    """A stage's output, and the sum of the losses of all stages up to it."""

    output: Any
    loss: Tensor


pytree.register_pytree_node(
    CarriedLoss,
    lambda carried: ([carried.output, carried.loss], None),
    lambda parts, _: CarriedLoss(*parts),
    serialized_type_name="lightning_dist.CarriedLoss",
)


class LossCarrier:
    """Takes pending losses off the layers of a module, and puts them back on another stage.

    Args:
        module: The whole module; layers of other stages keep their plain attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        pending = (getattr(layer, "pending_losses", None) for layer in module.modules())
        self._pending = [losses for losses in pending if isinstance(losses, PendingLosses)]

    def arrive(self, received: Any) -> Any:
        """What a stage was handed, without the losses, which the first layer holds from now on."""
        if not isinstance(received, CarriedLoss):
            return received
        self._pending[0].add(received.loss)
        return received.output

    def leave(self, output: Any) -> Any:
        """What a stage hands on: its output, with the losses that wait, if there are any."""
        losses = [loss for pending in self._pending for loss in pending.collect()]
        return CarriedLoss(output, torch.stack(losses).sum()) if losses else output
