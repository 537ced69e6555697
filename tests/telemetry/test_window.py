"""A rank's last steps as numbers."""

import gc

import numpy as np
import pytest
import torch

from lightning_dist.telemetry.clock import Phase, StepTimes
from lightning_dist.telemetry.collectives import GroupTraffic
from lightning_dist.telemetry.device import counted_flops, memory_of
from lightning_dist.telemetry.window import (
    BatchSize,
    CollectionTimer,
    RankWindow,
    percentiles,
    size_of,
    summarise,
    vector_size,
)


def step(number, **seconds):
    values = [seconds.get(phase.word, 0.0) for phase in Phase]
    return StepTimes(number, tuple(values), sum(values))


def test_summary_of_steps_leaves_out_the_slowest_tenth_and_collections():
    steps = [step(i, forward=1.0, exposed_comm=0.1 * i) for i in range(9)] + [step(9, forward=9.0)]
    window = summarise(steps, {0: 0.5}, {}, elements=7.0, saves=2.0)
    assert window.steps == 10
    assert window.seconds[Phase.FORWARD] == pytest.approx(18.0)
    assert window.compute == pytest.approx((8 * 1.0 + 0.5) / 9)
    assert window.collecting == 0.5
    assert window.wait_low == pytest.approx(0.1)  # waits are 0, 0, 0.1 …: the third of ten
    assert (window.elements, window.saves) == (7.0, 2.0)


def test_a_window_travels_as_a_vector():
    traffic = {"shard": GroupTraffic(0.25, 100.0, 3), "group 7": GroupTraffic(0.5, 10.0, 1)}
    window = RankWindow(5, tuple(float(i) for i in range(len(Phase))), compute=0.1, tokens=40.0, traffic=traffic)
    vector = window.to_vector()
    assert vector.shape == (vector_size(),)
    again = RankWindow.from_vector(vector.tolist())
    assert again.traffic == {"shard": traffic["shard"], "other": traffic["group 7"]}
    assert (again.steps, again.seconds, again.compute, again.tokens) == (5, window.seconds, 0.1, 40.0)


def test_percentiles_are_numpys():
    values = np.random.default_rng(0).exponential(size=101).tolist()
    expected = dict(zip(("p50", "p90", "p99"), np.percentile(values, [50, 90, 99]), strict=True))
    assert percentiles(values) == pytest.approx(expected)
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}


def test_sizes_of_batches():
    ids = torch.zeros(4, 16, dtype=torch.long)
    assert size_of({"input_ids": ids, "labels": ids}) == BatchSize(samples=4, tokens=64, elements=128)
    assert size_of([torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)]) == BatchSize(8, 8, 32)
    assert size_of("nothing") == BatchSize()


def test_collections_are_timed():
    timer = CollectionTimer()
    timer.install()
    gc.collect()
    timer.remove()
    assert 0 < timer.take() < 5
    gc.collect()
    assert timer.take() == 0


def test_flops_are_torchs():
    layer, rows = torch.nn.Linear(16, 32, bias=False), torch.randn(8, 16)
    with counted_flops() as count:
        layer(rows).sum().backward()
    assert count.flops == 2 * (2 * 8 * 16 * 32)  # forward, and the weights' gradient: the input needs none


def test_memory_of_this_process():
    now, most = memory_of(torch.device("cpu"))
    assert 10e6 < now <= 1.1 * most
