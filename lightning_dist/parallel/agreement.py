"""Ranks agree, or all of them learn which one does not: exchanges through the key-value store, never a collective.

A collective can't be used where ranks may have taken different paths: it would pair with another one. The store
can, and its waits are bounded. Nothing here runs on an ordinary step.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from lightning_dist.parallel.flag_exchange import AgreedExit

CRASH_KEY = "lightning_dist/crash"


class DisagreementError(RuntimeError):
    """Ranks that should have done the same thing did not; the message is the same on all of them."""


def agree(store: dist.Store, topic: str, value: str, rank: int, ranks: list[int], timeout: float) -> None:
    """Returns if every rank of ``ranks`` posts the same ``value`` under ``topic``; raises on all of them otherwise.

    Args:
        store: The store that all ranks share.
        topic: What is agreed on. It may come up again: the store counts how often each rank has come to it.
        value: What this rank has.
        rank: This rank.
        ranks: All ranks that take part.
        timeout: Seconds to wait for the others.

    Raises:
        DisagreementError: Naming each value and the ranks that have it, or the ranks that did not come.
    """
    # A second Trainer, or call of one, meets the topics of the first in the same store.
    occasion = store.add(f"{topic}/occasions of {rank}", 1)
    store.set(f"{topic}/{occasion}/{rank}", value)
    deadline = time.monotonic() + timeout
    values: dict[int, str] = {}
    for other in ranks:
        key = f"{topic}/{occasion}/{other}"
        if _wait(store, key, deadline):
            values[other] = store.get(key).decode()
        elif store.check([CRASH_KEY]):
            raise DisagreementError(f"{_name(topic)}: {_sentence(json.loads(store.get(CRASH_KEY)))}.")
    missing = [other for other in ranks if other not in values]
    if missing:
        raise DisagreementError(
            f"{_name(topic)}: {_listed(missing)} did not come to it within {timeout:.0f} s, while rank {rank} has"
            f" {value}."
        )
    if len(set(values.values())) > 1:
        by_value: dict[str, list[int]] = {}
        for other, seen in values.items():
            by_value.setdefault(seen, []).append(other)
        parts = "; ".join(
            f"{_listed(who)} {'have' if len(who) > 1 else 'has'} {seen}" for seen, who in by_value.items()
        )
        raise DisagreementError(f"{_name(topic)}: the ranks differ: {parts}.")


def publish_crash(store: dist.Store, rank: int, error: BaseException, world_size: int, linger: float = 3.0) -> None:
    """Tells the other ranks why this one stops, before its process ends and their connections with it.

    A rank that stops as well, a moment later, is not waited for: it has its own reason.

    Args:
        store: The store that all ranks share; it dies with rank 0's process.
        rank: This rank.
        error: What it stops for.
        world_size: The number of ranks.
        linger: Seconds to wait at most for the others to have read it, lest a launcher ends them first.
    """
    notice = json.dumps({"rank": rank, "error": f"{type(error).__name__}: {error}"})
    first = store.compare_set(CRASH_KEY, "", notice).decode() == notice
    store.set(_read_key(rank), "")
    everyone = [_read_key(other) for other in range(world_size)]
    deadline = time.monotonic() + linger
    while first and not store.check(everyone) and time.monotonic() < deadline:
        time.sleep(0.02)


class CrashWatch:
    """Keeps the notice of a rank that crashed, read as soon as it is posted: later its store may be gone.

    A daemon thread looks for the notice on a connection of its own, about twice a second; more seldom where there are
    many ranks, so that together they ask the store a few thousand times a second at most. No collective.

    Args:
        store: The store that all ranks share.
        rank: This rank.
        world_size: The number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._shared = store
        self._rank, self._world_size = rank, world_size
        self._interval = 0.5 + world_size / 4000
        self._notice: dict[str, Any] | None = None
        self._read, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning_dist crash watch", daemon=True)
        self._thread.start()

    def notice(self, timeout: float = 0.0) -> str | None:
        """What another rank stopped for, as one sentence, or None if none has said so within ``timeout`` seconds."""
        self._read.wait(timeout)
        if self._notice is None or self._notice["rank"] == self._rank:
            return None
        return _sentence(self._notice)

    def on_failure(self, error: BaseException) -> None:
        """Tells the other ranks why this one stops, or says which rank's failure it was that reached this one.

        Args:
            error: What this rank stops for; where all ranks stop in agreement nobody has to be told.

        Raises:
            RuntimeError: With another rank's reason, if that is what broke this one.
        """
        if isinstance(error, AgreedExit):
            return
        lost_connection = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
        notice = self.notice(5.0 if lost_connection else 0.0)
        if notice is not None:
            raise RuntimeError(notice) from error
        with contextlib.suppress(RuntimeError):  # The store's host may have gone.
            publish_crash(self._shared, self._rank, error, self._world_size)

    def stop(self) -> None:
        """Ends the thread, which must not outlive the store's host."""
        self._stopped.set()
        self._thread.join(self._interval)

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                if self._store.check([CRASH_KEY]):
                    self._notice = json.loads(self._store.get(CRASH_KEY))
                    self._read.set()
                    if (sentence := self.notice()) is not None:
                        # Now: the launcher may end this process before its own exception is printed.
                        print(f"rank {self._rank}: {sentence}", file=sys.stderr, flush=True)
                        self._store.set(_read_key(self._rank), "")
                    return
            except RuntimeError:
                return  # The store's host has gone.


def _read_key(rank: int) -> str:
    return f"{CRASH_KEY}/read by {rank}"


def _wait(store: dist.Store, key: str, deadline: float) -> bool:
    """Waits for a key until the deadline, or until some rank has crashed."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            store.wait([key], datetime.timedelta(seconds=min(left, 1.0)))
            return True
        except dist.DistStoreError:
            if store.check([CRASH_KEY]):
                return False
    return False


def _sentence(notice: dict[str, Any]) -> str:
    return f"rank {notice['rank']} stopped the run: {notice['error']}"


def _name(topic: str) -> str:
    return topic.removeprefix("lightning_dist/").split("#")[0]


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
