"""How healthy the routing is: load, entropy and drops of each layer, and what its exchange takes, as torchmetrics."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dist import _compat
from lightning_dist.parallel.expert.exchange import Moment, seconds_of

_COUNTS = ("tokens", "dropped", "exchanged_bytes")


class RouterStatistics(Metric):
    """Load of the experts of one layer, over all microbatches and ranks since the last reset.

    :meth:`compute` gives ``load`` (each expert's share of the choices ``[experts]``), ``entropy`` of that load (1 is
    even, 0 all on one expert), ``max_over_mean`` of it, ``drop_rate`` (of all choices), ``tokens``,
    ``exchanged_bytes`` (what left its rank in the all-to-alls of the forward passes, all ranks together), and
    ``exchange_seconds`` (how long these took, waiting included, the mean of the ranks).

    Args:
        num_experts: Number of experts.
        kwargs: Arguments of ``torchmetrics.Metric``; ``process_group`` is the ranks with other tokens.
    """

    full_state_update = False
    choices: Tensor
    tokens: Tensor
    dropped: Tensor
    exchanged_bytes: Tensor
    exchange_seconds: Tensor

    def __init__(self, num_experts: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_experts = num_experts
        self.hook: torch.utils.hooks.RemovableHandle | None = None
        self._spans: list[tuple[Moment, Moment]] = []
        for name, size in (("choices", (num_experts,)), *((name, ()) for name in _COUNTS)):
            self.add_state(name, torch.zeros(size, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("exchange_seconds", torch.zeros(()), dist_reduce_fx="mean")

    def update(
        self, top_k_index: Tensor, exchanged_bytes: int = 0, spans: Iterable[tuple[Moment, Moment]] = ()
    ) -> None:
        """Counts the choices of a batch. No host read, no collectives.

        Args:
            top_k_index: Chosen experts ``[tokens, k]``; ``num_experts`` for a choice that was dropped.
            exchanged_bytes: What this rank sent to others for it.
            spans: When that began and ended.
        """
        flat = top_k_index.reshape(-1)
        counts = flat.new_zeros(self.num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
        self.choices += counts[:-1]
        self.dropped += counts[-1]
        self.tokens += top_k_index.shape[0]
        self.exchanged_bytes += exchanged_bytes
        self._spans.extend(spans)

    def compute(self) -> dict[str, Tensor]:
        self._settle()
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
            "exchange_seconds": self.exchange_seconds,
        }

    def reset(self) -> None:
        super().reset()
        self._spans = []

    def sync(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        super().sync(*args, **kwargs)

    def to_vector(self) -> Tensor:
        """The counts of this rank, float64 ``[num_experts + 5]`` on the CPU; vectors of several ranks add up."""
        self._settle()
        counts = torch.stack([getattr(self, name) for name in _COUNTS])
        counts = torch.cat([self.choices, counts]).double()
        return torch.cat([counts, self.exchange_seconds.double().view(1), counts.new_ones(1)]).cpu()

    def set_vector(self, vector: Tensor) -> None:
        """Takes the sum of the vectors of the ranks that saw the layer's tokens; the host reads nothing."""
        whole = vector[: self.num_experts + len(_COUNTS)].round().to(torch.int64)
        self.choices = whole[: self.num_experts]
        self.tokens, self.dropped, self.exchanged_bytes = whole[self.num_experts :]
        self.exchange_seconds = vector[-2] / vector[-1].clamp(min=1)
        self._spans = []
        self._update_count += 1

    def _settle(self) -> None:
        spans, self._spans = self._spans, []
        if spans:
            self.exchange_seconds += seconds_of(spans)


def watch_routing(network: nn.Module, names: Sequence[str], **kwargs: Any) -> dict[str, RouterStatistics]:
    """Counts the routing of experts in training: each forward once, not its recomputation, and not evaluation.

    Args:
        network: The network.
        names: Its experts (see :func:`~lightning_dist.parallel.expert.find_experts`), of our layer or of a Hugging
            Face model, spread over ranks or not. Those of another stage of a pipeline count nothing here.
        kwargs: Arguments of :class:`RouterStatistics`.

    Returns:
        A metric for each name; not part of the network, so neither are its states of the network's. Its ``hook`` ends
        the watch.
    """
    watched = {}
    for name in names:
        experts = network.get_submodule(name)
        device = next((parameter.device for parameter in experts.parameters()), torch.device("cpu"))
        watched[name] = RouterStatistics(int(experts.num_experts), **kwargs).to(device)  # type: ignore[arg-type]
        watched[name].hook = experts.register_forward_hook(functools.partial(_count, watched[name]), with_kwargs=True)
    return watched


def join_statistics(
    watched: Mapping[str, RouterStatistics], counts: Mapping[str, bool], group: dist.ProcessGroup | None
) -> dict[str, RouterStatistics]:
    """What all ranks have counted, the same on each of them, for layers of any pipeline stage. The host reads.

    Collectives: one all-reduce of ``layers * (experts + 5)`` numbers over ``group``.

    Args:
        watched: The statistics of the same layers, in the same order, on every rank.
        counts: Whether this rank's numbers count: not for a layer of another stage, nor where it sees the same tokens
            as a rank that counts.
        group: A CPU group; None for one process.
    """
    vectors = [each.to_vector() * counts[name] for name, each in watched.items()]
    whole = torch.cat(vectors)
    if group is not None:
        dist.all_reduce(whole, group=group)
    joined = {}
    for (name, each), part in zip(watched.items(), whole.split([len(vector) for vector in vectors]), strict=True):
        joined[name] = RouterStatistics(each.num_experts, sync_on_compute=False)
        joined[name].set_vector(part)
    return joined


def _count(statistics: RouterStatistics, experts: nn.Module, args: tuple, kwargs: dict, _output: Any) -> None:
    if not experts.training or _compat.in_backward():
        return
    index = args[1] if len(args) > 1 else list(kwargs.values())[1 - len(args)]
    exchange = vars(experts).get("last_exchange")
    if exchange is None:
        statistics.update(index.detach())
    else:
        statistics.update(index.detach(), exchange.sent_bytes, exchange.spans)
