"""Ranks that take different paths through the model are found before their collectives pair up wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import nn

from lightning_dist.parallel.agreement import agree

MANY_RANKS = 16
"""Above this number of ranks each one compares with its neighbours only, so the store's work grows with the ranks."""


class PathCheck:
    """Watches the order in which a step calls the sharded units, and lets the ranks agree whenever it changes.

    Units exchange data in the order in which they are called, and pairs of exchanges are matched by that order alone:
    where one rank calls A and another B, weights or gradients of A and B are silently mixed, or ranks wait for each
    other (pytorch#158719). A rank that follows the path of its last step asks nobody. Where it leaves that path it
    posts the unit's name in the store and waits for the others to post the same, before the unit's collective.

    Args:
        units: The units by name.
        store: The store that all ranks share.
        rank: This rank.
        ranks: The ranks that exchange the units' parameters or gradients, in order.
        timeout: Seconds to wait for the others where the path changes.
    """

    def __init__(
        self, units: Mapping[str, nn.Module], store: dist.Store, rank: int, ranks: list[int], timeout: float
    ) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._peers = ranks
        if len(ranks) > MANY_RANKS:
            place = ranks.index(rank)
            self._peers = [ranks[place - 1], rank, ranks[(place + 1) % len(ranks)]]
        self._last_path: list[str] | None = None
        self._path: list[str] = []
        self._agreements = 0
        self._active = False
        for name, unit in units.items():
            # In front of FSDP2's own hook, which issues the collective.
            unit.register_forward_pre_hook(self._hook(name), prepend=True)

    def begin(self) -> None:
        """A step begins."""
        self._path, self._active = [], True

    def end(self) -> None:
        """The step has ended; a rank that stopped early on the path says so."""
        if self._last_path is not None and len(self._path) < len(self._last_path):
            self._agree("the end of the step")
        self._last_path, self._active = self._path, False

    def _hook(self, name: str) -> Callable[..., None]:
        def check(*_: object) -> None:
            if not self._active:
                return
            place = len(self._path)
            self._path.append(name)
            if self._last_path is None or place >= len(self._last_path) or self._last_path[place] != name:
                self._agree(name)

        return check

    def _agree(self, value: str) -> None:
        self._agreements += 1
        topic = f"lightning_dist/next module in the step#{self._agreements}"
        agree(self._store, topic, value, self._rank, self._peers, self._timeout)
