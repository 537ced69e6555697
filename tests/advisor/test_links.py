"""Links measured between real processes; slow ones, and what else is wrong, are named."""

import pytest

from lightning_dist.advisor.cluster import read_links
from lightning_dist.advisor.environment import find_problems, look_around
from lightning_dist.advisor.links import Links, PairMeasure, measure_links, pairings


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 16])
def test_every_two_nodes_meet_once_and_nobody_twice_in_a_round(nodes):
    rounds = pairings(nodes)
    met = [pair for meeting in rounds for pair in meeting]
    assert sorted(met) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    for meeting in rounds:
        busy = [node for pair in meeting for node in pair]
        assert len(busy) == len(set(busy))


def measure(per_node, layout=None):
    return measure_links(per_node=per_node, layout=layout, size=2**20, repeats=3)


def test_links_of_real_processes(pool):
    for links in pool.run(measure, 4, 2, "shard=2,tp=2", timeout=120):
        assert [(pair.first, pair.second) for pair in links.intra] == [(0, 0), (1, 1)]
        assert [(pair.first, pair.second) for pair in links.inter] == [(0, 1)]
        for pair in (*links.intra, *links.inter):
            assert 1e6 < pair.bandwidth < 1e12 and 1e-6 < pair.latency < 0.5
        assert [(axis.axis, axis.size) for axis in links.axes] == [("shard", 2), ("tensor", 2)]
        assert all(axis.bandwidth > 1e6 for axis in links.axes)


def test_one_rank_a_node_has_no_link_inside(pool):
    links = pool.run(measure, 2, 1)[0]
    assert not links.intra and len(links.inter) == 1
    assert links.as_json()["links"]["intra"] is None


def test_what_plan_reads_is_the_slowest(tmp_path):
    links = Links(4, 2, (PairMeasure(0, 0, 4e9, 1e-6), PairMeasure(1, 1, 3e9, 2e-6)), (PairMeasure(0, 1, 1e9, 5e-6),))
    path = tmp_path / "links.json"
    import json

    path.write_text(json.dumps(links.as_json()))
    intra, inter = read_links(path)
    assert (intra.bandwidth, intra.latency) == (3e9, 2e-6) and (inter.bandwidth, inter.latency) == (1e9, 5e-6)


def test_a_slow_link_and_a_slow_node_are_named():
    fast = [PairMeasure(a, b, 10e9, 1e-5) for a in range(4) for b in range(a + 1, 4)]
    assert Links(8, 2, inter=tuple(fast)).problems() == []
    one = [PairMeasure(1, 3, 1e9, 1e-5) if (pair.first, pair.second) == (1, 3) else pair for pair in fast]
    (sentence,) = Links(8, 2, inter=tuple(one)).problems()
    assert "between nodes 1 and 3 carries 1 GB/s, 10.0 times less than the median of its kind (10 GB/s)" in sentence
    many = [PairMeasure(a, b, 10e9, 1e-5) for a in range(5) for b in range(a + 1, 5)]
    node = [PairMeasure(p.first, p.second, 1e9, 1e-5) if 2 in (p.first, p.second) else p for p in many]
    assert "All links of node 2 are slow" in Links(5, 1, inter=tuple(node)).problems()[-1]
    inside = (PairMeasure(0, 0, 10e9, 0), PairMeasure(1, 1, 10e9, 0), PairMeasure(2, 2, 2e9, 0))
    assert "The link inside node 2 carries 2 GB/s" in Links(6, 2, intra=inside).problems()[0]


def test_the_environment_of_one_process_is_seen(tmp_path):
    seen = look_around(tmp_path, megabytes=2)
    assert seen["disk"]["speed"] > 1e5 and seen["disk"]["free"] > 0
    assert not list(tmp_path.iterdir())
    assert seen["versions"]["torch"] and find_problems([seen | {"shared_memory": 2e9}]) == []
    assert "error" in look_around(tmp_path / "nowhere", megabytes=1)["disk"]


def entry(**changes):
    good = {
        "host": "a",
        "versions": {"torch": "2.13"},
        "variables": {},
        "clock": 100.0,
        "shared_memory": 8e9,
        "disk": {"speed": 1e9, "free": 100e9},
    }
    return good | changes


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (entry(versions={"torch": "2.12"}), "Ranks run different versions of torch: 2.13 on ranks 0; 2.12 on ranks 1."),
        (entry(variables={"NCCL_P2P_DISABLE": "1"}), "NCCL_P2P_DISABLE is set on ranks 1"),
        (entry(shared_memory=64e6), "/dev/shm has less than 1 GB free on ranks 1"),
        (entry(clock=112.5, host="b"), "The clocks of ranks 0 (a) and 1 (b) differ by 12.5 s"),
        (entry(disk={"error": "OSError: no"}), "Rank 1 (a) can't write to the checkpoint folder: OSError: no."),
        (entry(disk={"speed": 1e9, "free": 70e9}), "Rank 1 (a) sees 70 GB free for checkpoints of 40 GB"),
    ],
)
def test_what_is_wrong_is_said_with_its_rank(other, sentence):
    assert find_problems([entry(), entry()], 40e9) == []
    (problem,) = find_problems([entry(), other], 40e9)
    assert sentence in problem


def test_variables_that_are_off_are_no_problem():
    off = {"NCCL_P2P_DISABLE": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    assert find_problems([entry(variables=off)]) == []
    assert "TORCH_DISTRIBUTED_DEBUG" in find_problems([entry(variables={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})])[0]
