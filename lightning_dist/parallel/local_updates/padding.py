"""Loaders of workers that have different amounts of data: all go on to the longest, and repeats are not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from lightning_dist.parallel.loaders import TogetherLoader


class PaddedLoader(TogetherLoader):
    """Yields as many batches as the longest loader of all workers has; :meth:`is_padding` tells repeats apart.

    Args:
        loader: Any iterable.
        group: CPU group of the workers.
        lengths: The numbers of batches of all workers, each at least 1, or None if some have none; then the workers
            tell each other, one batch ahead, whether they have another (8 bytes a batch).
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup, lengths: list[int] | None) -> None:
        super().__init__(loader, group, training=False, lengths=lengths)
        self.iterations = 0
        """How often an epoch has begun."""

    def __iter__(self) -> Iterator[Any]:
        self.iterations += 1
        return super().__iter__()
