"""Quantities as people write them, groups on nodes, and what collectives cost."""

import json
import math

import pytest

from lightning_dist.advisor import Cluster, Link
from lightning_dist.advisor.cluster import parse_bytes, parse_flops, read_links
from lightning_dist.advisor.collectives import Group
from lightning_dist.advisor.words import gigabytes, percent, seconds


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("80GB", 80e9), ("80 gb", 80e9), ("64GiB", 64 * 2**30), ("50GB/s", 50e9), ("400Gb/s", 50e9),
        ("400Gbit/s", 50e9), ("1.5TB", 1.5e12), ("1e9", 1e9), (5, 5.0), ("900GBps", 900e9),
    ],
)  # fmt: skip
def test_bytes_are_read(text, number):
    assert parse_bytes(text, "memory") == pytest.approx(number)


def test_operations_are_read():
    assert parse_flops("400TFLOPS", "flops") == 400e12
    assert parse_flops("1.2P", "flops") == pytest.approx(1.2e15)
    assert parse_flops("90GFLOP/s", "flops") == 90e9


def test_numbers_are_written():
    assert [gigabytes(n) for n in (0, 999, 1500, 2.5e9, 1.234e12)] == ["0 B", "999 B", "1.5 kB", "2.5 GB", "1.23 TB"]
    assert [seconds(n) for n in (3, 0.25, 2e-5)] == ["3 s", "250 ms", "20 µs"]
    assert percent(0.404) == "40 %"


MACHINES = Cluster(32, 8, 80e9, Link(100e9, 5e-6), Link(10e9, 20e-6))


@pytest.mark.parametrize(
    ("stride", "size", "per_node", "nodes"), [(1, 8, 8, 1), (1, 32, 8, 4), (8, 4, 1, 4), (2, 16, 4, 4), (2, 4, 4, 1)]
)
def test_groups_lie_on_nodes_as_consecutive_ranks_do(stride, size, per_node, nodes):
    group = Group.of(MACHINES, stride, size)
    assert (group.per_node, group.nodes) == (per_node, nodes)


def test_costs_of_collectives():
    inside, across = Group.of(MACHINES, 1, 8), Group.of(MACHINES, 1, 32)
    # 8 ranks inside a node gather 8 GB: 7 GB each at 100 GB/s, 7 messages of 5 us
    assert inside.all_gather(8e9).seconds == pytest.approx(0.07 + 7 * 5e-6)
    assert (inside.all_gather(8e9).intra, inside.all_gather(8e9).inter) == (7e9, 0)
    # 32 ranks on 4 nodes: a node gets 3/4 of 8 GB through 8 cards, 0.75 GB each at 10 GB/s, and 31/32 at 100 GB/s
    cost = across.all_gather(8e9)
    assert cost.seconds == pytest.approx(max(0.75 / 10, 7.75 / 100) + 28 * 5e-6 + 3 * 20e-6)
    assert (cost.intra, cost.inter) == (7.75e9, 0.75e9)
    # an all-reduce moves twice that; a small one waits for a tree of 3 + 2 levels there and back
    assert across.all_reduce(8e9).intra == 2 * 7.75e9
    assert across.all_reduce(8.0).seconds == pytest.approx(2 * (math.log2(8) * 5e-6 + math.log2(4) * 20e-6), rel=1e-3)
    # one rank a node has one card for all
    assert Group.of(MACHINES, 8, 4).all_gather(8e9).seconds == pytest.approx(6 / 10 + 3 * 20e-6)
    # all-to-all: of 8 GB, 24/32 leave the node at 10 GB/s
    assert across.all_to_all(8e9).seconds == pytest.approx(6 / 10 + 20e-6)
    assert Group.of(MACHINES, 16, 2).send(1e9).seconds == pytest.approx(0.1 + 20e-6)
    assert Group.of(MACHINES, 4, 2).send(1e9).seconds == pytest.approx(0.01 + 5e-6)
    assert Group.of(MACHINES, 1, 1).all_gather(8e9).seconds == 0


def test_measured_links_are_read(tmp_path):
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"links": {"intra": {"bandwidth": 1e9, "latency": 1e-6}, "inter": None}}))
    assert read_links(path) == (Link(1e9, 1e-6), None)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"links\.json"):
        read_links(path)
