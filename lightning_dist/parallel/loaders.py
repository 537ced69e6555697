"""Loaders that end together: data ranks with unequal numbers of batches, met before anyone waits."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

_NO_BATCH = (
    "A data rank's evaluation loader has no batch while others have some, so it has nothing to take part with; give"
    " every rank at least one batch, or use fewer data ranks."
)


class TogetherLoader:
    """Iterates a loader so that all data ranks take the same number of batches.

    In training the ranks stop with the shortest. In evaluation every rank goes on to the longest, repeating its last
    batch for the forward's collectives only: :meth:`is_padding` says so, and whoever runs the step must not count it.

    Lengths that are known are exchanged once, when the loader is made. Otherwise the ranks tell each other, one batch
    ahead, whether they have another: an asynchronous all-reduce of one number over the CPU group.

    Args:
        loader: Any iterable; its other attributes can be reached through this object.
        group: CPU group of the data ranks.
        training: Whether to stop with the shortest (True) or go on to the longest (False).
        lengths: The numbers of batches of all data ranks, or None if some have none.

    Raises:
        ValueError: In evaluation, on all ranks, when one has no batch at all that it could repeat.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup, training: bool, lengths: list[int] | None) -> None:
        self._loader = loader
        self._group = group
        self._training = training
        self._lengths = lengths
        self._real_batches: int | None = None
        if lengths is not None and not training and min(lengths) == 0 < max(lengths):
            raise ValueError(_NO_BATCH)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __len__(self) -> int:
        if self._lengths is None:
            raise TypeError("a loader whose ranks do not all know their number of batches has no length")
        return (min if self._training else max)(self._lengths)

    def is_padding(self, index: int) -> bool:
        """Whether the batch at ``index`` of the present iteration is a repeated one."""
        return self._real_batches is not None and index >= self._real_batches

    def __iter__(self) -> Iterator[Any]:
        self._real_batches = None
        if self._lengths is not None:
            return self._known_lengths(iter(self._loader))
        return self._unknown_lengths(iter(self._loader))

    def _known_lengths(self, batches: Iterator[Any]) -> Iterator[Any]:
        last = None
        for index in itertools.count():
            if index == len(self):
                return
            try:
                last = next(batches)
            except StopIteration:
                if self._training:
                    raise RuntimeError(
                        f"This rank's loader says it has {sized(self._loader)} batches but ended after {index}; a"
                        " loader's length must be right for data ranks to end together."
                    ) from None
                if self._real_batches is None:
                    self._real_batches = index
            yield last

    def _unknown_lengths(self, batches: Iterator[Any]) -> Iterator[Any]:
        ahead, answer = self._fetch(batches)
        last = None
        for index in itertools.count():
            ranks_with_batch = answer()
            everyone = dist.get_world_size(self._group)
            if ranks_with_batch == 0 or (self._training and ranks_with_batch < everyone):
                if ranks_with_batch:
                    warnings.warn(
                        f"Loaders of unequal length: after {index} batches {everyone - ranks_with_batch} of {everyone}"
                        " data ranks have no more, so the epoch ends here for all.",
                        stacklevel=2,
                    )
                return
            if index == 0 and ranks_with_batch < everyone:
                raise ValueError(_NO_BATCH)
            if ahead:
                (last,) = ahead
            elif self._real_batches is None:
                self._real_batches = index
            ahead, answer = self._fetch(batches) if ahead else ((), self._ask(False))
            yield last

    def _fetch(self, batches: Iterator[Any]) -> tuple[tuple[Any, ...], Any]:
        ahead = tuple(itertools.islice(batches, 1))
        return ahead, self._ask(bool(ahead))

    def _ask(self, has_batch: bool) -> Any:
        count = torch.tensor([int(has_batch)])
        work = dist.all_reduce(count, group=self._group, async_op=True)

        def answer() -> int:
            work.wait()
            return int(count.item())

        return answer


def exchange_lengths(length: int | None, group: dist.ProcessGroup) -> list[int] | None:
    """The number of batches of each data rank, or None if some rank's loader has no length.

    Collectives: an all-gather of one integer over ``group``, a CPU group.
    """
    mine = torch.tensor([-1 if length is None else length])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    lengths = [int(length) for length in everyone]
    return None if min(lengths) < 0 else lengths


def distributed_sampler(loader: Any) -> DistributedSampler | None:
    """The ``DistributedSampler`` that decides what ``loader`` yields, or None."""
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def without_repeats(sampler: DistributedSampler) -> None:
    """Makes an evaluation sampler give each sample to exactly one rank, instead of repeating some to even out."""
    total = len(sampler.dataset)  # type: ignore[arg-type]
    sampler.num_samples = len(range(sampler.rank, total, sampler.num_replicas))
    sampler.total_size = total


def sized(loader: Iterable[Any]) -> int | None:
    """The number of batches of a loader, or None if it has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
