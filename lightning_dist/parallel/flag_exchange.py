"""What a rank wants all ranks to do (save, stop), agreed on without waiting: one number travels with each step."""

from __future__ import annotations

from collections import deque
from enum import IntFlag

import torch
import torch.distributed as dist

REQUEUE = 75
"""Exit code of a run that was asked to end and has saved itself: start it again (EX_TEMPFAIL of sysexits.h)."""

RULES = 32
FIRST_RULE_BIT = 16
"""The bits below are those of `Flag`'s names."""


class Flag(IntFlag):
    """What is agreed on; any rank may raise any of them."""

    SIGNAL = 1
    """A rank was told to end: save, and exit with `REQUEUE`."""
    SAVE = 2
    """Save a checkpoint."""
    STOP = 4
    """End the run as if it were finished."""

    @classmethod
    def rule(cls, index: int) -> Flag:
        """The flag of a stop rule: that it fired on some rank.

        Args:
            index: Which rule, from 0 to 31.
        """
        if not 0 <= index < RULES:
            raise ValueError(f"index={index} does not fit: the exchange has room for {RULES} rules, 0 to {RULES - 1}.")
        return cls(1 << (FIRST_RULE_BIT + index))


class AgreedExit(SystemExit):
    """Raised on all ranks at the same step, so nobody has to be told."""


class FlagExchange:
    """Ranks raise flags at any time, and all of them see the same flags at the same step, one step later.

    Args:
        group: A CPU (Gloo) group of all ranks for this alone; None for one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._raised: deque[int] = deque()  # appending and taking are each one step, even between threads
        self._seen = Flag(0)
        self._step: int | None = None
        self._work: dist.Work | None = None
        self._numbers = torch.zeros(1, dtype=torch.int64)

    def raise_flag(self, flag: Flag) -> None:
        """Notes a flag, to be sent at the next boundary. Waits for nothing: safe in a signal handler or thread."""
        self._raised.append(int(flag))

    def at_boundary(self, step: int) -> Flag:
        """The flags that any rank had raised by the boundary before this one; all ranks call it at every boundary.

        Collectives: waits for the all-reduce of 8 bytes that was started at the boundary before, a step ago, and starts
        the next one. Called again for the same step it only answers again.

        Args:
            step: The optimizer step that has just ended.
        """
        if step == self._step:
            return self._seen
        self._step = step
        own = 0
        while self._raised:
            own |= self._raised.popleft()
        if self._group is None:
            self._seen = Flag(own)
            return self._seen
        if self._work is not None:
            self._work.wait()
            self._seen = Flag(int(self._numbers))
        self._numbers = torch.tensor([own])
        self._work = dist.all_reduce(self._numbers, op=dist.ReduceOp.BOR, group=self._group, async_op=True)
        return self._seen

    def close(self) -> None:
        """Waits for the exchange that is under way; all ranks call it after their last boundary."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._step = None
