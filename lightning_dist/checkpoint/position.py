"""Where a rank stands in its data, and how it goes on from there: no sample skipped, none seen twice."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_dist.checkpoint.random_state import capture_random_state, restore_random_state


@dataclass(frozen=True)
class Position:
    """How far the training data of an epoch has been used, by all ranks together.

    Args:
        epoch: The epoch, from 0.
        batches: How many batches each data rank has trained on in it.
        of: How many the epoch has.
        batch_size: Samples of a rank's batch; 0 where it is not known.
        data_size: Number of data ranks.
        accumulate: Batches of a rank in an optimizer step.
    """

    epoch: int
    batches: int
    of: int | float
    batch_size: int
    data_size: int
    accumulate: int = 1

    def accumulate_for(self, data_size: int) -> int | None:
        """How many batches each of ``data_size`` ranks adds up for a step of as many samples; None if none fits."""
        batches, rest = divmod(self.accumulate * self.data_size, data_size)
        return None if rest else batches

    @property
    def at_end(self) -> bool:
        return self.batches >= self.of

    def samples_for(self, data_size: int) -> int:
        """How many samples each of ``data_size`` ranks has to pass over.

        Raises:
            ValueError: If those that were used can't be shared out evenly.
        """
        used = self.batches * self.batch_size * self.data_size
        if used % data_size:
            raise ValueError(
                f"The checkpoint was taken after {used} samples of an epoch, which do not divide among {data_size} data"
                f" ranks: go on with a number of data ranks that divides {used}, or from a checkpoint at the end of an"
                " epoch."
            )
        return used // data_size


class ResumableSampler(Sampler[Any]):
    """A sampler that may begin an epoch after its first samples, with the random numbers that belong there.

    Args:
        inner: What gives the indices. Its draws at the beginning of an epoch are repeated, from the state that the
            generators had there, so shuffling need not depend on the epoch's number alone.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.start: dict[str, Any] | None = None
        self._skip = 0
        self._before: dict[str, Any] | None = None
        self._after: dict[str, Any] | None = None
        self._begins = False

    def go_on(self, epoch: int, skip: int, start: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
        """Lets the epoch that is begun next pass over samples that were used.

        Args:
            epoch: The epoch's number.
            skip: How many samples.
            start: The generators when that epoch's first index was drawn; None where they are not known.
            now: The generators behind the samples that are passed over; None leaves them alone.
        """
        self._skip, self._before, self._after = skip, start, now
        self.set_epoch(epoch)

    def begin(self, epoch: int, now: dict[str, Any] | None) -> None:
        """Lets the epoch that is begun next begin with these generators, as the end of the epoch before left them."""
        self._skip, self._before, self._after = 0, now, None
        self._begins = True
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        if callable(getattr(self.inner, "set_epoch", None)):
            self.inner.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch; a DataLoader asks for the first index after it has drawn its workers' seed."""
        if self._before is not None:
            restore_random_state(self._before)
            if self._begins:
                torch.empty((), dtype=torch.int64).random_()  # the seed of the workers
        self.start = capture_random_state()
        skip, after = self._skip, self._after
        self._skip, self._before, self._after, self._begins = 0, None, None, False
        indices = iter(self.inner)
        for _ in range(skip):
            next(indices, None)
        if after is not None:
            restore_random_state(after)
        yield from indices


def make_resumable(loader: Any) -> ResumableSampler | None:
    """Puts a `ResumableSampler` into a DataLoader over a map-style dataset; None for any other loader.

    In a world of one, plain shuffling becomes that of ``DistributedSampler`` (by seed and epoch), as Lightning has it
    with several ranks: then another number of ranks can go on in the same order.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    if batches is None or sampler is None or not isinstance(getattr(loader, "dataset", None), Sized):
        return None
    if isinstance(sampler, ResumableSampler):
        return sampler
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None:
        seed = int(os.getenv("PL_GLOBAL_SEED", "0"))
        if sampler.num_samples == len(sampler.data_source):
            sampler = DistributedSampler(sampler.data_source, num_replicas=1, rank=0, shuffle=True, seed=seed)  # type: ignore[arg-type]
    batches.sampler = resumable = ResumableSampler(sampler)
    return resumable


def batch_size_of(loader: Any) -> int:
    """Samples of a full batch of a DataLoader; 0 where it does not say."""
    return int(getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 0)


class StatefulLoader:
    """A loader with a state of its own but no length, whose state is that of the batches that were trained on.

    Lightning fetches one batch ahead where it does not know the length; the loader's own state counts that batch as
    used, and a run that went on from it would leave the batch out.

    Args:
        loader: Has ``state_dict`` and ``load_state_dict``, as torchdata's ``StatefulDataLoader``.
        fetched_ahead: Tells how many batches have been fetched and not yet trained on, at most one.
    """

    def __init__(self, loader: Any, fetched_ahead: Callable[[], int]) -> None:
        self.loader = loader
        self._fetched_ahead = fetched_ahead
        self._states: deque[dict[str, Any]] = deque(maxlen=2)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # asked for while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        self._states.clear()
        for batch in self.loader:
            self._states.append(self.loader.state_dict())
            yield batch
        self._states.append(self.loader.state_dict())

    def state_dict(self) -> dict[str, Any]:
        behind = self._fetched_ahead()
        if len(self._states) <= behind:
            return dict(self.loader.state_dict())
        return self._states[-1 - behind]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


def has_state(loader: Any) -> bool:
    """Whether a loader keeps its position itself."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
