"""Textbook situations: the first choice, and every rejection recomputed by hand."""

from __future__ import annotations

import pytest

from lightning_dist.advisor import Cluster, advise
from tests.advisor import by_hand
from tests.advisor.by_hand import GB, INTER, INTRA, Layers

FLOPS = 100e12

# 8 layers of 0.05 billion elements: 0.4 billion, 6.4 GB with gradients and Adam. One sample: 8 x 1 TFLOP forward.
SMALL = Layers(8, 0.05e9, 1e12, saved=0.4 * GB, kept=0.2 * GB, received=0.04 * GB, reduced=0.08 * GB)


def cluster(devices, per_node=8, memory=40 * GB, intra=INTRA, inter=INTER):
    return Cluster(devices, min(devices, per_node), memory, intra, inter, FLOPS)


def plan(layers, machines, global_batch, **arguments):
    advice = advise(
        layers.profile(),
        devices=machines.devices,
        devices_per_node=machines.devices_per_node,
        memory=machines.memory,
        intra=machines.intra and machines.intra.bandwidth,
        inter=machines.inter and machines.inter.bandwidth,
        flops=machines.flops,
        global_batch=global_batch,
        **arguments,
    )
    check_by_hand(layers, machines, advice)
    return advice


def check_by_hand(layers, machines, advice):
    """Every number in the table and in the rejections, from closed formulas."""
    usable = 0.92 * machines.memory
    estimates = [*advice.alternatives, *advice.baselines.values()]
    for estimate in [*estimates, advice.recommended] if advice.recommended else estimates:
        used = machines.of_size(estimate.candidate.layout.world_size)
        assert estimate.memory.total == pytest.approx(by_hand.memory(layers, estimate.candidate))
        if not layers.num_experts and not advice.missing:
            assert estimate.time.total == pytest.approx(by_hand.time(layers, used, estimate.candidate))
            assert estimate.low <= estimate.time.total <= estimate.high
    for rejection in advice.rejected:
        numbers = rejection.numbers
        if rejection.reason == "memory":
            needs = by_hand.memory(layers, rejection.candidate)
            assert numbers["needs"] == pytest.approx(needs) and numbers["usable"] == pytest.approx(usable)
            assert numbers["too_much"] == pytest.approx(needs - usable) and needs > usable
            assert f"{numbers['too_much'] / GB:.3g} GB too much" in rejection.sentence or needs - usable < GB
        elif rejection.reason == "slower":
            assert numbers["seconds"] > 0.97 * numbers["best"]
            if not layers.num_experts:
                assert numbers["seconds"] == pytest.approx(by_hand.time(layers, machines, rejection.candidate))
        elif rejection.reason == "bound":
            assert numbers["bound"] > 1.3 * numbers["best"]
            assert numbers["bound"] == pytest.approx(
                sum(numbers[p] for p in ("compute", "tensor", "context", "bubble"))
            )
        else:
            assert rejection.reason in ("tensor", "context", "pipeline", "expert", "heads", "nodes", "chain", "batch")
            assert rejection.sentence.endswith(".")


def by_kind(advice, kind):
    return next(rejection for rejection in advice.rejected if rejection.kind == kind)


def test_a_tiny_model_stays_on_one_device():
    tiny = Layers(4, 1000, 2000, saved=100, kept=50, received=10, reduced=20)
    advice = plan(tiny, cluster(8), 8)
    one, ddp = advice.baselines["one device"].time.total, advice.baselines["plain DDP"].time.total
    # 4 layers of 10 operations: 5 us to start each, once forward and twice backward, whatever the batch
    assert one == pytest.approx(4 * 10 * 5e-6 * 3)
    # DDP starts as many, and adds what nothing hides: the last of 4 reductions, 2 x log2(8) messages of 5 us
    assert ddp == pytest.approx(one + 2 * 3 * 5e-6, rel=1e-3)
    assert advice.recommended.candidate.layout.world_size == 1
    assert "Stay on one device: it takes 600 µs a step" in advice.advice[0]


def test_a_model_that_fits_is_copied():
    advice = plan(SMALL, cluster(8), 64)
    # One device: 64 samples x 8 TFLOP x 3 at 100 TFLOPS = 15.4 s, and reading 1.6 GB of weights three times a batch
    one = advice.baselines["one device"].candidate
    assert advice.baselines["one device"].time.total == pytest.approx(
        64 * 8 * 3e12 / FLOPS * (1 if one.checkpointing == "none" else 1 + 0.05 / 3)
        + one.microbatches * 3 * 1.6 * GB * 150 / FLOPS * (1 if one.checkpointing == "none" else 1 + 0.05 / 3)
    )
    assert advice.recommended.candidate.kind == "plain DDP"
    assert 7.5 < advice.baselines["one device"].time.total / advice.recommended.time.total <= 8
    assert not advice.advice


def test_the_model_fits_but_its_optimizer_does_not():
    # 8 layers of 0.4 billion: 3.2 billion elements. Parameters and gradients take 25.6 GB, Adam's state 25.6 more.
    layers = Layers(8, 0.4e9, 4e12, saved=1 * GB, kept=0.5 * GB, received=0.1 * GB, reduced=0.2 * GB)
    advice = plan(layers, cluster(8), 8)
    assert advice.recommended.candidate.zero
    assert advice.recommended.candidate.layout.sizes()["tensor"] == 1
    rejection = by_kind(advice, "plain DDP")
    # States 51.2 GB, one unit's gradients twice 3.2 GB, full checkpointing 8 x 0.1 GB, recomputation 0.9 GB
    assert rejection.numbers["needs"] == pytest.approx((51.2 + 3.2 + 0.8 + 0.9) * GB)
    assert rejection.numbers["too_much"] == pytest.approx((56.1 - 0.92 * 40) * GB)
    assert "plain DDP" in advice.baselines and not advice.fits(advice.baselines["plain DDP"])


def test_a_model_that_one_node_does_not_hold_is_spread_over_both():
    # 16 layers of 1.5 billion: 24 billion elements, 384 GB with gradients and Adam; a node has 8 x 36.8 = 294 GB.
    layers = Layers(16, 1.5e9, 15e12, saved=1 * GB, kept=0.5 * GB, received=0.1 * GB, reduced=0.2 * GB)
    advice = plan(layers, cluster(32, inter=by_hand.Link(100e9, 15e-6)), 32)
    assert 24 * 16 * GB > 8 * 0.92 * 40 * GB
    assert "one node" not in advice.baselines
    assert advice.recommended.candidate.layout.world_size == 32
    assert by_kind(advice, "one device").numbers["states"] == pytest.approx(384 * GB)


def test_a_slow_link_between_nodes_is_not_crossed():
    # Two nodes joined by 0.1 GB/s for each device: 1.6 GB of gradients need 2 x 1/2 x 1.6 / 8 / 0.1 = 2 s.
    slow = by_hand.Link(0.1e9, 15e-6)
    advice = plan(SMALL, cluster(16, inter=slow), 16)
    ddp = advice.baselines["plain DDP"].time
    reduction = 2 * (1.6 * GB / 2 / 8) / 0.1e9 + 8 * 2 * (3 * 5e-6 + 15e-6)
    backward = 2 * 8e12 / FLOPS + 2 * 1.6 * GB * 150 / FLOPS
    assert ddp.data == pytest.approx(reduction - 0.9 * backward, rel=1e-6)
    assert advice.recommended.candidate.layout.world_size == 8
    assert advice.advice[0].startswith("Stay on one node of 8 devices")


def test_slow_links_everywhere_ask_for_local_updates():
    slow = by_hand.Link(0.02e9, 15e-6)
    layers = Layers(8, 0.05e9, 1e12, 0.4 * GB, 0.2 * GB, 0.04 * GB, refused=("context", "expert", "tensor", "pipeline"))
    advice = plan(layers, cluster(8, per_node=1, inter=slow), 64)
    (sentence,) = (sentence for sentence in advice.advice if "LocalUpdateStrategy" in sentence)
    ddp = advice.baselines["plain DDP"].time
    # 2 x 7/8 x 1.6 GB at 0.02 GB/s is 140 s, the own work 8 samples x 24 TFLOP at 100 TFLOPS about 2 s
    assert ddp.data == pytest.approx(2 * 7 / 8 * 1.6 / 0.02, rel=0.02)
    own = ddp.total - ddp.data
    assert f"exchange every {-(-ddp.data // (0.05 * own)):.0f} steps" in sentence


def test_a_long_context_is_cut():
    # One sample keeps 8 x 1 GB even under full checkpointing and recomputes a layer of 30 GB: only cutting it helps.
    layers = Layers(
        8,
        0.05e9,
        100e12,
        saved=31 * GB,
        kept=15 * GB,
        received=1 * GB,
        reduced=2 * GB,
        query=1 * GB,
        key_value=0.25 * GB,
        heads=32,
        refused=("tensor", "pipeline", "expert"),
    )
    advice = plan(layers, cluster(8), 8)
    assert advice.recommended.candidate.layout.context > 1
    rejection = by_kind(advice, "ZeRO-3")
    # ZeRO-3 over 8: 0.8 GB of states, two gathered units and one on its way 4 x 0.1 + 8 x 0.05 GB, 8 + 30 GB
    assert rejection.numbers["needs"] == pytest.approx((0.8 + 0.4 + 0.4 + 8 + 30) * GB)


def test_experts_are_spread():
    # 8 layers of 64 experts with 0.02 billion elements each: 10.24 billion of them, 164 GB with Adam.
    layers = Layers(
        8,
        0.02e9,
        0.5e12,
        saved=0.5 * GB,
        kept=0.25 * GB,
        received=0.05 * GB,
        reduced=0.1 * GB,
        experts=64 * 0.02e9,
        num_experts=64,
        routed=0.02 * GB,
        refused=("context", "tensor", "pipeline"),
    )
    advice = plan(layers, cluster(16, memory=200 * GB), 32)
    chosen = advice.recommended
    assert chosen.candidate.layout.expert > 1
    without = by_kind(advice, "ZeRO-2")
    # Without it all 8 x 1.3 billion elements are gathered and reduced: 41.6 GB, 15/16 of it over 100 GB/s (between
    # two nodes 1/2 over 8 cards of 10 GB/s takes less), and 8 units wait for rings of 14 x 5 + 15 us, dense and routed.
    exchange = 41.6 * 15 / 16 / 100 + 2 * 8 * (14 * 5e-6 + 15e-6)
    forward = 2 * 8 * 0.5e12 / FLOPS + 41.6 * GB * 150 / FLOPS
    assert without.numbers["data"] == pytest.approx((exchange - 0.9 * forward) + (exchange - 0.9 * 2 * forward))
    assert without.numbers["loss"] == "data"
    # With one group of 16, tokens go there and back in forward and backward: 2 x 2 x 8 x 0.02 GB for each of 2 samples,
    # half of them to the other node, in 2 x 2 x 8 calls.
    assert chosen.time.expert == pytest.approx(4 * 8 * 0.02 * GB * 2 / 2 / 10e9 + 32 * 15e-6)


def test_nodes_with_a_modest_link_become_pipeline_stages():
    # 16 layers of 0.6 billion on 4 nodes at 1 GB/s: gradients of all 9.6 billion would cross; hidden states are 20 MB.
    modest = by_hand.Link(1e9, 15e-6)
    refused = ("context", "expert", "tensor")
    layers = Layers(16, 0.6e9, 4e12, 0.4 * GB, 0.2 * GB, received=0.02 * GB, refused=refused)
    advice = plan(layers, cluster(32, inter=modest), 512)
    layout = advice.recommended.candidate.layout
    assert (layout.pipeline, layout.shard) == (4, 8)  # a stage is a node
    assert advice.recommended.time.inter < advice.baselines["plain DDP"].time.inter
    for rejection in advice.rejected:
        if rejection.reason == "slower" and rejection.kind in ("ZeRO-2", "ZeRO-3"):
            assert rejection.numbers["loss"] == "data"


def test_heads_that_do_not_divide_are_named():
    reason = (
        "tensor_parallel_size={0} does not fit attn.q: its 6 heads do not divide by {0}; sizes that fit: 1, 2, 3, 6"
    )
    layers = Layers(
        8, 0.4e9, 4e12, 1 * GB, 0.5 * GB, 0.1 * GB, reduced=0.2 * GB,
        refused_tensor_sizes=((4, reason.format(4)), (8, reason.format(8))),
    )  # fmt: skip
    advice = plan(layers, cluster(16), 16)
    told = [rejection for rejection in advice.rejected if rejection.reason == "heads"]
    assert [rejection.numbers["sizes"] for rejection in told] == [[4], [8]]
    assert 6 % 4 and 6 % 8 and "its 6 heads do not divide by 4" in told[0].sentence
    (across,) = (rejection for rejection in advice.rejected if rejection.reason == "nodes")
    # 16 ranks on nodes of 8: each sample sums 8 layers x 0.4 GB, of which 2 x 15/16 are moved
    assert across.numbers["bytes"] == pytest.approx(8 * 0.4 * GB * 2 * 15 / 16)
    assert "tensor sizes from 16 would cross nodes of 8 devices" in across.sentence
    (chain,) = (rejection for rejection in advice.rejected if rejection.reason == "chain")
    assert (chain.numbers["chain"], chain.numbers["first"]) == (8, 16)


def test_a_small_batch_cannot_feed_every_data_rank():
    advice = plan(SMALL, cluster(8), 2)
    (starved,) = (rejection for rejection in advice.rejected if rejection.reason == "batch")
    # tp x pp out of 1, 2, 4, 8: of the 10 products up to 8, 1x1 leaves 8 data ranks and 1x2, 2x1 leave 4; 2 % 4 != 0
    assert starved.count == 3
    assert "plain DDP" not in advice.baselines
    layout = advice.recommended.candidate.layout
    assert layout.data_size <= 2


def test_memory_not_devices_is_what_to_wait_for():
    # A layer that can't be cut keeps 50 GB while it runs: no number of devices changes that.
    layers = Layers(4, 0.1e9, 1e12, 51 * GB, 50 * GB, 1 * GB, refused=("tensor", "context", "pipeline", "expert"))
    advice = plan(layers, cluster(8), 8)
    assert advice.recommended is None and not advice.missing
    (sentence,) = (sentence for sentence in advice.advice if sentence.startswith("Nothing fits"))
    # ZeRO-3: states 0.8 GB; gathered 0.8 + 0.8 GB; activations 4 + 50 GB, so 56.4 / 0.92 = 61.3 GB a device
    assert "needs 56.4 GB of 36.8 GB" in sentence
    assert "wait for devices with 61.3 GB of memory, not for more of them" in sentence
    parted = by_hand.memory(layers, by_kind(advice, "ZeRO-3").candidate)
    assert parted == pytest.approx((0.8 + 1.6 + 54) * GB)


def test_more_devices_are_asked_for_where_they_help():
    layers = Layers(16, 1.5e9, 15e12, 1 * GB, 0.5 * GB, 0.1 * GB, refused=("tensor", "context", "pipeline", "expert"))
    advice = plan(layers, cluster(8), 8)
    # 384 GB of states over 8 are 48 GB. What does not shrink: 8 x 1.5 + 8 x 1.5 GB of gathered weights and gradients,
    # 16 x 0.1 + 0.9 GB of activations: 26.5 GB, which leaves 10.3 of 36.8 GB, so 48 / 10.3 = 4.7 times as many.
    assert "About 40 devices of this kind would hold it" in advice.advice[0]


def test_one_larger_device_may_do_what_two_slow_ones_do():
    # 2.6 billion elements: 41.6 GB of states and 1.7 GB of activations. Two devices split them over a poor link.
    slow = by_hand.Link(1e9, 5e-6)
    layers = Layers(8, 0.325e9, 0.1e12, 1 * GB, 0.5 * GB, 0.1 * GB, refused=("tensor", "context", "pipeline", "expert"))
    advice = plan(layers, cluster(2, intra=slow), 2)
    one = advice.baselines["one device"]
    assert one.memory.total == pytest.approx((41.6 + 0.8 + 0.9) * GB)
    (sentence,) = (sentence for sentence in advice.advice if sentence.startswith("Wait for memory"))
    assert "one device with 47.1 GB instead of 40 GB" in sentence  # 43.3 / 0.92


@pytest.mark.parametrize(
    ("machines", "what"),
    [
        (cluster(16, inter=None), "the link between nodes"),
        (cluster(16, intra=None), "the link inside a node"),
    ],
)
def test_without_a_link_speed_it_abstains(machines, what):
    advice = plan(SMALL, machines, 16)
    assert advice.recommended is None and not advice.alternatives
    assert [entry.what for entry in advice.missing] == [what]
    assert advice.advice[0].startswith(f"No layout is recommended, for {what} is not known")
    assert advice.as_json()["baselines"]["plain DDP"]["step_seconds"] is None


def test_one_device_needs_no_link():
    advice = plan(SMALL, cluster(1, intra=None, inter=None), 4)
    assert advice.recommended.candidate.layout.world_size == 1 and not advice.missing


def test_an_unmeasured_rate_decides_where_the_winner_changes():
    # Exchange of 2 s does not depend on the rate; computing does. At a quarter of the assumed rate all nodes win.
    slow = by_hand.Link(0.1e9, 15e-6)
    machines = Cluster(16, 8, 40 * GB, INTRA, slow, None)
    advice = advise(
        Layers(8, 0.05e9, 20e12, 0.4 * GB, 0.2 * GB, 0.04 * GB, reduced=0.08 * GB).profile(),
        devices=16, devices_per_node=8, memory=machines.memory, intra=INTRA.bandwidth, inter=slow.bandwidth,
        global_batch=16,
    )  # fmt: skip
    assert advice.recommended is None
    assert advice.missing[0].what == "the floating-point rate of a device"
    assert advice.alternatives and "TFLOPS" in advice.advice[0]
