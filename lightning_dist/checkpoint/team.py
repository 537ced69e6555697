"""The ranks that write or read one checkpoint together: a failure on one is raised on all, by name, and nobody waits.

Every method is one or two object collectives on the team's group, issued by all ranks in the same order whether or
not their own part failed. With a Gloo group a rank that died is noticed as soon as its connection closes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from lightning_dist.checkpoint.format import CheckpointError, DamagedCheckpointError

Local = TypeVar("Local")
Result = TypeVar("Result")


class LostContact(CheckpointError):
    """A rank has died, or did not answer in time; the group that was used is out of step from here on."""


@dataclass(frozen=True)
class _Failure:
    rank: int
    text: str
    kind: type[CheckpointError]


class Team:
    """The ranks of one process group, or the single process where there is none.

    Args:
        group: The group that carries the exchanges; None is the default group where one is initialised. It should be
            a CPU (Gloo) group that nothing else uses at the same time.
    """

    def __init__(self, group: Any = None) -> None:
        self.together = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if self.together else 0
        self.world_size = dist.get_world_size(group) if self.together else 1
        if self.rank < 0:
            raise ValueError("group: this rank is not a member of the given group")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, what: str, local: Callable[[], Local]) -> list[Local]:
        """Runs `local` on every rank and returns all results, by rank, on every rank."""
        mine = self._attempt(local)
        found = self._exchange(what, lambda: self._all_gather(mine.shared))
        self._raise_failures(what, found, mine)
        return cast(list[Local], found)

    def scatter(self, what: str, local: Callable[[], Local], on_first: Callable[[list[Local]], list[Result]]) -> Result:
        """Runs `local` everywhere, `on_first` with all results on rank 0, and returns this rank's part of its list."""
        mine, parts = self._gather_to_first(what, local, on_first)
        if not self.together:
            result = parts[0]
        else:
            box: list[Any] = [None]
            self._exchange(
                what,
                lambda: dist.scatter_object_list(
                    box, parts if self.is_first else None, src=self._first_rank(), group=self.group
                ),
            )
            result = box[0]
        self._raise_failures(what, result if isinstance(result, _Failures) else [], mine)
        return cast(Result, result)

    def reduce(self, what: str, local: Callable[[], Local], on_first: Callable[[list[Local]], Result]) -> Result:
        """Runs `local` everywhere, `on_first` with all results on rank 0, and returns its result on every rank."""
        mine, parts = self._gather_to_first(what, local, lambda found: [on_first(found)] * self.world_size)
        result = self._broadcast(what, parts[0] if self.is_first else None)
        self._raise_failures(what, result if isinstance(result, _Failures) else [], mine)
        return cast(Result, result)

    def from_first(self, what: str, decide: Callable[[], Result]) -> Result:
        """Runs `decide` on rank 0 alone and returns its result, or raises its failure, on every rank."""
        mine = self._attempt(decide) if self.is_first else _Attempt(None)
        result = self._broadcast(what, mine.shared)
        self._raise_failures(what, [result], mine)
        return cast(Result, result)

    def _gather_to_first(
        self, what: str, local: Callable[[], Any], on_first: Callable[[list[Any]], list[Any]]
    ) -> tuple[_Attempt, list[Any]]:
        mine = self._attempt(local)
        if self.together:
            found: list[Any] | None = [None] * self.world_size if self.is_first else None
            self._exchange(
                what, lambda: dist.gather_object(mine.shared, found, dst=self._first_rank(), group=self.group)
            )
        else:
            found = [mine.shared]
        if found is None:
            return mine, []
        failures = _Failures(f for f in found if isinstance(f, _Failure))
        if not failures:
            central = self._attempt(lambda: on_first(found))
            if central.error is None:
                return mine, cast(list[Any], central.shared)
            mine, failures = central, _Failures([central.shared])
        return mine, [failures] * self.world_size

    def _attempt(self, function: Callable[[], Any]) -> _Attempt:
        try:
            return _Attempt(function())
        except BaseException as error:  # an interrupted rank must tell its peers too; it is raised again afterwards
            kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
            text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            kind = DamagedCheckpointError if issubclass(kind, DamagedCheckpointError) else CheckpointError
            return _Attempt(_Failure(self.rank, text, kind), error)

    def _raise_failures(self, what: str, found: Any, mine: _Attempt) -> None:
        if mine.error is not None and not isinstance(mine.error, Exception):
            raise mine.error
        failures = [f for f in found if isinstance(f, _Failure)]
        if not failures:
            return
        texts = [f"rank {f.rank}: {f.text}" if self.world_size > 1 else f.text for f in failures[:8]]
        if len(failures) > len(texts):
            texts.append(f"and {len(failures) - len(texts)} more ranks")
        raise failures[0].kind(f"{what} failed: " + "; ".join(texts)) from mine.error

    def _exchange(self, what: str, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        except RuntimeError as error:  # Gloo: a peer closed its connection, or the group's timeout has passed
            raise LostContact(f"{what} failed: rank {self.rank} lost contact with the other ranks ({error})") from error

    def _all_gather(self, value: Any) -> list[Any]:
        if not self.together:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def _broadcast(self, what: str, value: Any) -> Any:
        if not self.together:
            return value
        box = [value]
        self._exchange(what, lambda: dist.broadcast_object_list(box, src=self._first_rank(), group=self.group))
        return box[0]

    def _first_rank(self) -> int:
        return dist.get_global_rank(self.group, 0) if self.group is not None else 0


class _Failures(list[_Failure]):
    """What rank 0 hands to everybody instead of a result."""


@dataclass(frozen=True)
class _Attempt:
    """What one rank's part came to: `shared` goes to the other ranks, `error` stays here as the cause."""

    shared: Any
    error: BaseException | None = None
