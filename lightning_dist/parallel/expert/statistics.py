"""How healthy the routing is: load, entropy and drops of each layer, as torchmetrics."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dist import _compat


class RouterStatistics(Metric):
    """Load of the experts of one layer, over all microbatches and ranks since the last reset.

    :meth:`compute` gives ``load`` (each expert's share of the choices ``[experts]``), ``entropy`` of that load (1 is
    even, 0 all on one expert), ``max_over_mean`` of it, ``drop_rate`` (of all choices), ``tokens``, and
    ``exchanged_bytes`` (what left its rank in the all-to-alls of the forward passes, all ranks together).

    Args:
        num_experts: Number of experts.
        kwargs: Arguments of ``torchmetrics.Metric``; ``process_group`` is the ranks with other tokens.
    """

    full_state_update = False
    choices: Tensor
    tokens: Tensor
    dropped: Tensor
    exchanged_bytes: Tensor

    def __init__(self, num_experts: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_experts = num_experts
        for name, size in (("choices", (num_experts,)), ("tokens", ()), ("dropped", ()), ("exchanged_bytes", ())):
            self.add_state(name, torch.zeros(size, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, top_k_index: Tensor, exchanged_bytes: int = 0) -> None:
        """Counts the choices of a batch. No host read, no collectives.

        Args:
            top_k_index: Chosen experts ``[tokens, k]``; ``num_experts`` for a choice that was dropped.
            exchanged_bytes: What this rank sent to others for it.
        """
        flat = top_k_index.reshape(-1)
        counts = flat.new_zeros(self.num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
        self.choices += counts[:-1]
        self.dropped += counts[-1]
        self.tokens += top_k_index.shape[0]
        self.exchanged_bytes += exchanged_bytes

    def compute(self) -> dict[str, Tensor]:
        kept = self.choices.sum()
        load = self.choices / kept.clamp(min=1)
        entropy = torch.special.entr(load).sum() / torch.tensor(float(self.num_experts)).log().clamp(min=1e-12)
        return {
            "load": load,
            "entropy": entropy,
            "max_over_mean": load.max() * self.num_experts,
            "drop_rate": self.dropped / (kept + self.dropped).clamp(min=1),
            "tokens": self.tokens,
            "exchanged_bytes": self.exchanged_bytes,
        }


def watch_routing(network: nn.Module, names: list[str], **kwargs: Any) -> dict[str, RouterStatistics]:
    """Counts the routing of experts in training: each forward once, not its recomputation, and not evaluation.

    Args:
        network: The network.
        names: Its experts (see :func:`~lightning_dist.parallel.expert.find_experts`), of our layer or of a Hugging
            Face model, spread over ranks or not.
        kwargs: Arguments of :class:`RouterStatistics`.

    Returns:
        A metric for each name; not part of the network, so neither are its states of the network's.
    """
    watched = {}
    for name in names:
        experts = network.get_submodule(name)
        device = next(experts.parameters()).device
        watched[name] = RouterStatistics(int(experts.num_experts), **kwargs).to(device)  # type: ignore[arg-type]
        experts.register_forward_hook(functools.partial(_count, watched[name]), with_kwargs=True)
    return watched


def _count(statistics: RouterStatistics, experts: nn.Module, args: tuple, kwargs: dict, _output: Any) -> None:
    if not experts.training or _compat.in_backward():
        return
    index = args[1] if len(args) > 1 else list(kwargs.values())[1 - len(args)]
    statistics.update(index.detach(), vars(experts).get("exchanged_bytes", 0))
