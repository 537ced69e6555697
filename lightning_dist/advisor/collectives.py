"""What a collective costs: seconds and bytes on each kind of link, at ring or tree cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dist.advisor.cluster import Cluster, Link

NO_LINK = Link(float("inf"), 0.0)


@dataclass(frozen=True)
class Cost:
    """Seconds of a collective, and the bytes that one device sends over each kind of link."""

    seconds: float = 0.0
    intra: float = 0.0
    inter: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.intra + other.intra, self.inter + other.inter)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.seconds * times, self.intra * times, self.inter * times)


@dataclass(frozen=True)
class Group:
    """A communication group: ``size`` ranks, ``per_node`` of them on each of ``nodes`` nodes.

    Rings that cross nodes use the network card of each of their devices, so a node's share of the traffic is carried
    by ``per_node`` cards; the slower kind of link decides. Steps of a ring wait for one message each, steps of a tree
    for the depth of the tree, as in NCCL's own model.
    """

    size: int
    per_node: int
    nodes: int
    intra: Link
    inter: Link

    @classmethod
    def of(cls, cluster: Cluster, stride: int, size: int) -> Group:
        """The group of ``size`` ranks that are ``stride`` apart."""
        inside = stride * size <= cluster.devices_per_node
        per_node = size if inside else max(1, cluster.devices_per_node // stride)
        nodes = math.ceil(size / per_node)
        return cls(size, per_node, nodes, cluster.intra or NO_LINK, cluster.inter or NO_LINK)

    def _bandwidth(self, size: float) -> Cost:
        """Every rank gets what the others have of ``size`` bytes."""
        inside = size * (self.size - 1) / self.size if self.per_node > 1 else 0.0
        between = size * (self.nodes - 1) / self.nodes / self.per_node
        return Cost(max(inside / self.intra.bandwidth, between / self.inter.bandwidth), inside, between)

    def _ring_latency(self) -> float:
        return (self.size - self.nodes) * self.intra.latency + (self.nodes - 1) * self.inter.latency

    def _tree_latency(self) -> float:
        return math.log2(self.per_node) * self.intra.latency + math.log2(self.nodes) * self.inter.latency

    def all_gather(self, size: float, calls: float = 1.0) -> Cost:
        """Gathers ``size`` bytes in all, in so many calls; a reduce-scatter costs the same."""
        if self.size == 1 or not size:
            return Cost()
        return self._bandwidth(size) + Cost(calls * self._ring_latency())

    def all_reduce(self, size: float, calls: float = 1.0) -> Cost:
        """Sums ``size`` bytes in all that every rank has, in so many calls."""
        if self.size == 1 or not size:
            return Cost()
        return self._bandwidth(size) * 2 + Cost(2 * calls * min(self._ring_latency(), self._tree_latency()))

    def all_to_all(self, size: float, calls: float = 1.0) -> Cost:
        """Each rank spreads its ``size`` bytes evenly over all ranks, in so many calls."""
        if self.size == 1 or not size:
            return Cost()
        inside = size * (self.per_node - 1) / self.size
        between = size * (self.size - self.per_node) / self.size
        seconds = max(inside / self.intra.bandwidth, between / self.inter.bandwidth)
        latency = self.inter.latency if self.nodes > 1 else self.intra.latency
        return Cost(seconds + calls * latency, inside, between)

    def send(self, size: float) -> Cost:
        """One neighbour sends ``size`` bytes to the next."""
        if self.size == 1 or not size:
            return Cost()
        if self.per_node > 1 and self.nodes == 1:
            return Cost(size / self.intra.bandwidth + self.intra.latency, intra=size)
        return Cost(size / self.inter.bandwidth + self.inter.latency, inter=size)
