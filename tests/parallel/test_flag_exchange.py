"""All ranks see the same flags at the same step, and none is lost."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from lightning_dist.parallel.flag_exchange import Flag, FlagExchange


def exchange():
    """Rank 0 asks for a save before boundary 1, rank 1 for the end and a rule before boundary 2."""
    flags = FlagExchange(dist.group.WORLD)
    rank, seen = dist.get_rank(), []
    for step in range(1, 5):
        if (rank, step) == (0, 1):
            flags.raise_flag(Flag.SAVE)
        if (rank, step) == (1, 2):
            flags.raise_flag(Flag.STOP)
            flags.raise_flag(Flag.rule(31))
        seen.append(int(flags.at_boundary(step)))
        assert flags.at_boundary(step) == seen[-1]  # a second callback that asks changes nothing
    flags.close()
    return seen


def test_all_ranks_see_a_flag_one_boundary_later(pool):
    expected = [0, Flag.SAVE, Flag.STOP | Flag.rule(31), 0]
    assert pool.run(exchange, 2) == [expected, expected]


def test_the_flags_of_rules_are_apart():
    rules = [Flag.rule(index) for index in range(32)]
    assert len({*rules, Flag.SIGNAL, Flag.SAVE, Flag.STOP}) == 35
    assert 0 < max(rules) < 2**63
    with pytest.raises(ValueError, match="index=32 does not fit"):
        Flag.rule(32)


def test_no_flag_is_lost_to_a_boundary_that_runs_meanwhile():
    """A thread raises each rule's flag once while the boundaries go by; a signal handler may come as inconveniently."""
    for _ in range(50):
        flags, seen, step = FlagExchange(None), Flag(0), 0
        thread = threading.Thread(target=lambda flags=flags: [flags.raise_flag(Flag.rule(i)) for i in range(32)])
        thread.start()
        while thread.is_alive():
            step += 1
            seen |= flags.at_boundary(step)
        seen |= flags.at_boundary(step + 1)
        assert all(Flag.rule(index) in seen for index in range(32))


def test_a_flag_raised_in_the_middle_of_a_boundary_is_told_at_the_next(monkeypatch):
    """As a signal's handler that runs between reading what was raised and clearing it."""
    from lightning_dist.parallel import flag_exchange

    flags = FlagExchange(None)

    def interrupted(value):
        flags.raise_flag(Flag.SIGNAL)
        return Flag(value)

    monkeypatch.setattr(flag_exchange, "Flag", interrupted)
    assert flags.at_boundary(1) == 0
    monkeypatch.undo()
    assert flags.at_boundary(2) == Flag.SIGNAL
