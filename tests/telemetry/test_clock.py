"""Every moment belongs to one phase."""

import threading
import time

import pytest
import torch

from lightning_dist.telemetry.clock import Phase, PhaseClock

CPU = torch.device("cpu")


def spend(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_phases_add_up_to_the_wall_time_and_waits_are_taken_out_of_what_they_are_in():
    clock = PhaseClock(CPU)
    clock.restart()
    for step in range(3):
        clock.switch(Phase.FORWARD)
        spend(0.01)
        clock.switch(Phase.BACKWARD)
        spend(0.01)
        outside = clock.enter(Phase.EXPOSED_COMM)
        spend(0.02)
        clock.leave(outside)
        spend(0.01)
        clock.end_step(step)
    steps = clock.take()
    assert [step.step for step in steps] == [0, 1, 2]
    for step in steps:
        assert step.total == pytest.approx(step.wall, rel=1e-3)
        assert step.seconds[Phase.EXPOSED_COMM] == pytest.approx(0.02, rel=0.5)
        # what was begun before the wait goes on after it
        assert step.seconds[Phase.BACKWARD] == pytest.approx(0.02, rel=0.5)
        assert step.seconds[Phase.DATA_WAIT] == 0
    assert clock.take() == []


def test_waits_of_other_threads_do_not_count():
    clock = PhaseClock(CPU)
    clock.switch(Phase.FORWARD)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(clock.enter(Phase.EXPOSED_COMM)))
    thread.start()
    thread.join()
    assert seen == [None]
    assert clock.phase is Phase.FORWARD
    clock.leave(None)
    assert clock.phase is Phase.FORWARD


def test_only_the_main_line_is_told():
    told = []
    clock = PhaseClock(CPU, told.append)
    clock.switch(Phase.FORWARD)
    clock.leave(clock.enter(Phase.BUBBLE))
    clock.switch(Phase.OPTIMIZER)
    assert told == [Phase.FORWARD, Phase.OPTIMIZER]
