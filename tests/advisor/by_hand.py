"""The advisor's arithmetic written out once more, in closed form, for models of equal layers.

Nothing here calls the advisor's own functions: a rejection's numbers are recomputed from the sizes of the layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dist.advisor import Cluster, Link, ModelProfile
from lightning_dist.advisor.profile import Amount, LayerProfile

GB = 1e9
INTRA, INTER = Link(100e9, 5e-6), Link(10e9, 15e-6)


@dataclass(frozen=True)
class Layers:
    """Equal layers that tensor parallelism cuts whole; bytes and operations are those of one sample."""

    number: int
    elements: float
    forward: float
    saved: float
    kept: float
    received: float
    operations: float = 10
    reduced: float = 0.0
    query: float = 0.0
    key_value: float = 0.0
    heads: int = 0
    experts: float = 0.0
    num_experts: int = 0
    routed: float = 0.0
    refused: tuple[str, ...] = ("context", "expert")
    refused_tensor_sizes: tuple[tuple[int, str], ...] = ()

    def profile(self, samples: int = 1) -> ModelProfile:
        layer = LayerProfile(
            name="layer",
            parameters=Amount(cut=self.elements),
            trainable=Amount(cut=self.elements),
            experts=Amount(cut=self.experts),
            trainable_experts=Amount(cut=self.experts),
            forward=Amount(cut=self.forward),
            backward=Amount(cut=2 * self.forward),
            operations=self.operations,
            saved=Amount(cut=self.saved),
            kept=Amount(cut=self.kept),
            received=Amount(cut=self.received),
            largest=Amount(cut=self.received),
            sent=self.received,
            reduced=self.reduced,
            reductions=2 if self.reduced else 0,
            reduced_backward=self.reduced,
            reductions_backward=2 if self.reduced else 0,
            query=self.query,
            key_value=self.key_value,
            attentions=1 if self.query else 0,
            routed=self.routed,
            routers=1 if self.routed else 0,
        )
        return ModelProfile(
            "Layers",
            (layer,) * self.number,
            samples=samples,
            query_heads=self.heads,
            num_experts=self.num_experts,
            refused={axis: f"this model has no {axis} axis" for axis in self.refused},
            refused_tensor_sizes=dict(self.refused_tensor_sizes),
        )


def memory(layers: Layers, candidate) -> float:
    """Bytes of the fullest rank: 4 for a parameter, 4 for its gradient, 8 for Adam, activations, buffers."""
    layout, sizes = candidate.layout, candidate.layout.sizes()
    pp, tp, cp, shard, ep = sizes["pipeline"], sizes["tensor"], sizes["context"], sizes["shard"], layout.expert
    number = layers.number / pp
    dense, experts = number * layers.elements / tp, number * layers.experts / tp / ep
    expert_shards = shard * cp / ep if ep > 1 else shard
    own = dense / shard + experts / expert_shards
    unit = layers.elements / tp + layers.experts / tp / ep
    total = own * (4 + 4 + 8)
    if candidate.zero:
        if candidate.microbatches > 1:
            total += 4 * (dense + experts)  # gradients kept whole until they are reduced, once a step
        gathered = min(2, number) * unit if candidate.zero == 3 else dense + experts
        total += 4 * gathered + 8 * unit
    elif sizes["replicate"] > 1:
        total += 8 * unit
    stages = {None: 1, "GPipe": 1, "1F1B": 1}.get(candidate.schedule, 2)
    in_flight = {
        None: 1.0,
        "GPipe": candidate.microbatches,
        "1F1B": pp,
        "Interleaved1F1B": (2 * (pp - 1) + (stages - 1) * pp + 1) / stages,
        "InterleavedZeroBubble": pp,
        "ZBVZeroBubble": pp,
        "DualPipeV": pp + 0.5,
    }[candidate.schedule]
    in_flight = min(in_flight, candidate.microbatches)
    samples = candidate.samples / cp / tp
    keeps = {"none": layers.saved, "selective": layers.kept, "full": layers.received}[candidate.checkpointing]
    working = 2 * layers.received * samples
    if candidate.checkpointing != "none":
        working = max(working, (layers.saved - keeps) * samples)
    return total + number * keeps * samples * in_flight + working


def ring(cluster: Cluster, stride: int, size: int) -> tuple[int, int]:
    """Ranks of a group on one node, and nodes."""
    per_node = size if stride * size <= cluster.devices_per_node else max(1, cluster.devices_per_node // stride)
    return per_node, math.ceil(size / per_node)


def all_gather(cluster: Cluster, stride: int, size: int, amount: float, calls: float) -> float:
    """(n - 1) / n of the bytes over the links of a node, and a node's share over the cards of its ranks."""
    if size == 1 or not amount:
        return 0.0
    per_node, nodes = ring(cluster, stride, size)
    inside = amount * (size - 1) / size / cluster.intra.bandwidth if per_node > 1 else 0.0
    between = amount * (nodes - 1) / nodes / per_node / cluster.inter.bandwidth if nodes > 1 else 0.0
    waits = (size - nodes) * cluster.intra.latency + ((nodes - 1) * cluster.inter.latency if nodes > 1 else 0.0)
    return max(inside, between) + calls * waits


def all_reduce(cluster: Cluster, stride: int, size: int, amount: float, calls: float) -> float:
    """Twice the bytes of a gather; the latency of a ring or, if smaller, of a tree."""
    if size == 1 or not amount:
        return 0.0
    per_node, nodes = ring(cluster, stride, size)
    inter = cluster.inter.latency if nodes > 1 else 0.0
    ring_waits = (size - nodes) * cluster.intra.latency + (nodes - 1) * inter
    tree_waits = math.log2(per_node) * cluster.intra.latency + math.log2(nodes) * inter
    return 2 * all_gather(cluster, stride, size, amount, 0) + 2 * calls * min(ring_waits, tree_waits)


def time(layers: Layers, cluster: Cluster, candidate) -> float:
    """Seconds of a step without experts: computing, sums over tensor ranks, sequence, stages, data, bubble."""
    sizes = candidate.layout.sizes()
    pp, tp, cp, shard, copies = (sizes[axis] for axis in ("pipeline", "tensor", "context", "shard", "replicate"))
    number, samples = layers.number / pp, candidate.samples / cp
    dense = number * layers.elements / tp
    read = 4 * dense * 150 / cluster.flops
    start = number * layers.operations * cluster.launch
    forward = max(number * layers.forward / tp * samples / cluster.flops + read, start)
    backward = max(2 * number * layers.forward / tp * samples / cluster.flops + 2 * read, 2 * start)
    again = {"none": 0.0, "selective": 0.05, "full": 1.0}[candidate.checkpointing] * forward
    passes = 2 if candidate.checkpointing == "full" else 1
    amount = number * layers.reduced * samples
    tensor = all_reduce(cluster, 1, tp, amount * passes, 2 * number * passes)
    tensor += all_reduce(cluster, 1, tp, amount, 2 * number)
    context = 0.0
    if cp > 1:
        share, calls = candidate.samples / tp, number * (1 + passes)
        context = all_gather(cluster, tp, cp, number * layers.key_value * share * (passes + 2), calls + number)
        if layers.heads % (tp * cp) == 0:
            per_node, nodes = ring(cluster, tp, cp)
            size = number * (2 * layers.query + layers.key_value) * share / cp * (1 + passes)
            link = cluster.inter if nodes > 1 else cluster.intra
            inside = size * (per_node - 1) / cp / cluster.intra.bandwidth
            between = size * (cp - per_node) / cp / cluster.inter.bandwidth if nodes > 1 else 0.0
            context = min(context, max(inside, between) + 4 * calls * link.latency)
    hops = 0.0
    if pp > 1:
        inside = cluster.devices <= cluster.devices_per_node
        link = cluster.intra if inside else cluster.inter
        received = 1 if candidate.schedule in ("GPipe", "1F1B") else 2
        if candidate.schedule in ("ZBVZeroBubble", "DualPipeV") and pp == 2:
            received = 1  # the V turns on rank 1, which hands on to itself
        hops = 2 * (received * layers.received * samples / link.bandwidth + link.latency)
    extra = (tensor + context + hops) / 3
    microbatches = candidate.microbatches
    gather = all_gather(cluster, tp * cp, shard, 4 * dense, number)
    reduce = all_gather(cluster, tp * cp, shard, 4 * dense, number)
    reduce += all_reduce(cluster, tp, cp, 4 * dense / shard, number)
    reduce += all_reduce(cluster, tp * cp * shard, copies, 4 * dense / shard, number)
    hide_forward, hide_backward = 0.9 * (forward + extra), 0.9 * (backward + again + 2 * extra)
    gathers = 1 if pp > 1 and candidate.zero != 3 else microbatches
    data = gathers * max(0.0, gather - hide_forward)
    if candidate.zero == 3:
        data += (microbatches - 1) * max(0.0, gather - hide_backward)
    data += max(0.0, (gather if candidate.zero == 3 else 0.0) + reduce - hide_backward)
    data = max(data, (gather + reduce) / number)
    total = microbatches * (forward + backward + again + tensor + context + hops) + data
    if pp > 1:
        f, w = forward + extra, backward / 2
        b = backward - w + again + 2 * extra
        total += {
            "GPipe": (pp - 1) * (f + b + w),
            "1F1B": (pp - 1) * (f + b + w),
            "Interleaved1F1B": (pp - 1) * (f + b + w) / 2,
            "InterleavedZeroBubble": (pp - 1) * (f + b - w) / 2,
            "ZBVZeroBubble": (pp - 1) * max((f + b - w) / 2, b - w),
            "DualPipeV": max((pp - 1) * (f + b - w) / 2, (pp - 1) * b - pp / 2 * f),
        }[candidate.schedule]
    return total
