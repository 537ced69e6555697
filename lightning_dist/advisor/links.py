"""Measures the links of a running job with real messages: inside nodes, between every two nodes, per mesh axis."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.layout import ParallelLayout

SLOW = 2.0
"""A link is called slow if it is this many times slower than the median of its kind."""


@dataclass(frozen=True)
class PairMeasure:
    """A link between two nodes, or inside one (``first == second``): the slowest of its pairs of devices.

    Args:
        first, second: Nodes.
        bandwidth: Bytes per second and device, one direction, while all devices of both nodes send.
        latency: Seconds of a small message.
    """

    first: int
    second: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class AxisMeasure:
    """A mesh axis while all its groups are busy: ring bandwidth of an all-gather and time of a small all-reduce."""

    axis: str
    size: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Links:
    """What was measured; the same on all ranks.

    Args:
        world_size: Number of ranks.
        per_node: Ranks of each node.
        intra: Each node by itself.
        inter: Every two nodes.
        axes: Axes of the layout that was asked for.
    """

    world_size: int
    per_node: int
    intra: tuple[PairMeasure, ...] = ()
    inter: tuple[PairMeasure, ...] = ()
    axes: tuple[AxisMeasure, ...] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        """What ``links.json`` holds; a ring is as fast as its slowest link, so that is what plans are made with."""

        def slowest(pairs: tuple[PairMeasure, ...]) -> dict[str, float] | None:
            if not pairs:
                return None
            return {
                "bandwidth": min(pair.bandwidth for pair in pairs),
                "latency": max(pair.latency for pair in pairs),
            }

        return {
            "version": 1,
            "world_size": self.world_size,
            "devices_per_node": self.per_node,
            "links": {"intra": slowest(self.intra), "inter": slowest(self.inter)},
            "nodes": [asdict(pair) for pair in self.intra],
            "pairs": [asdict(pair) for pair in self.inter],
            "axes": [asdict(axis) for axis in self.axes],
        }

    def problems(self) -> list[str]:
        """Links that are clearly slower than others of their kind, in words."""
        found = []
        for kind, pairs in (("inside", self.intra), ("between", self.inter)):
            if len(pairs) < 2:
                continue
            usual = statistics.median(pair.bandwidth for pair in pairs)
            for pair in pairs:
                if pair.bandwidth * SLOW < usual:
                    where = f"inside node {pair.first}" if kind == "inside" else f"nodes {pair.first} and {pair.second}"
                    found.append(
                        f"The link {'' if kind == 'inside' else 'between '}{where} carries"
                        f" {pair.bandwidth / 1e9:.3g} GB/s, {usual / pair.bandwidth:.1f} times less than the median of"
                        f" its kind ({usual / 1e9:.3g} GB/s)."
                    )
        found += [
            f"The link between nodes {pair.first} and {pair.second} carries {pair.bandwidth / 1e9:.2g} GB/s, less than"
            " a network of 1 Gbit/s: look at its card, cable or switch port, or let little cross it"
            " (LocalUpdateStrategy)."
            for pair in self.inter
            if pair.bandwidth < GIGABIT
        ]
        found += self._suspects()
        return found

    def _suspects(self) -> list[str]:
        """Nodes all of whose links are slow."""
        nodes = self.world_size // self.per_node
        if nodes < 3 or not self.inter:
            return []
        usual = statistics.median(pair.bandwidth for pair in self.inter)
        slow = [pair for pair in self.inter if pair.bandwidth * SLOW < usual]
        return [
            f"All links of node {node} are slow: look at its network card, cable or switch port."
            for node in range(nodes)
            if sum(node in (pair.first, pair.second) for pair in slow) == nodes - 1
        ]


def pairings(nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds in which every two nodes meet once, no node twice in a round (the circle method)."""
    places: list[int | None] = list(range(nodes))
    if nodes % 2:
        places.append(None)
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        meeting = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in meeting if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def measure_links(
    *,
    per_node: int | None = None,
    layout: str | ParallelLayout | None = None,
    size: int = 32 * 2**20,
    repeats: int = 5,
    device: torch.device | None = None,
) -> Links:
    """Measures every link of the running job.

    Collectives: sends and receives between pairs of ranks in rounds, all devices of a node at once, so that shared
    cards are shared; barriers between rounds; for a layout, all-gathers and all-reduces over each of its axes. All
    ranks must call it.

    Args:
        per_node: Ranks of a node; None asks ``LOCAL_WORLD_SIZE``, which torchrun sets.
        layout: A layout of the world whose axes are measured too.
        size: Bytes of a large message.
        repeats: How often each is sent; the fastest counts, since others disturb and nothing helps.
        device: Where messages lie; None is the CPU.

    Raises:
        ValueError: If the world is not made of such nodes.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    per_node = per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % per_node:
        raise ValueError(f"per_node={per_node} does not fit: {world} ranks are not whole nodes of {per_node}.")
    device = device or torch.device("cpu")
    probe = _Probe(size, repeats, device)
    node, place = divmod(rank, per_node)
    own: dict[tuple[int, int], tuple[float, float]] = {}
    if per_node > 1:
        # Neighbours first, then those half a node away: the links of a node need not be equal.
        for step in sorted({1, per_node // 2} - {0}):
            partner = place ^ step if (place ^ step) < per_node else None
            _note(own, (node, node), probe.exchange(None if partner is None else node * per_node + partner))
    for meeting in pairings(world // per_node):
        other = next((b if a == node else a for a, b in meeting if node in (a, b)), None)
        measured = probe.exchange(None if other is None else other * per_node + place)
        if other is not None:
            _note(own, (min(node, other), max(node, other)), measured)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, own)
    merged: dict[tuple[int, int], tuple[float, float]] = {}
    for measures in everyone:
        for pair, measured in measures.items():
            _note(merged, pair, measured)
    pairs = [PairMeasure(*pair, *merged[pair]) for pair in sorted(merged)]
    axes = () if layout is None else _measure_axes(layout, probe, device)
    return Links(
        world,
        per_node,
        tuple(pair for pair in pairs if pair.first == pair.second),
        tuple(pair for pair in pairs if pair.first != pair.second),
        axes,
    )


def _note(
    measures: dict[tuple[int, int], tuple[float, float]], pair: tuple[int, int], measured: tuple[float, float] | None
) -> None:
    """Keeps the slowest of a pair's measures."""
    if measured is not None:
        known = measures.get(pair, (float("inf"), 0.0))
        measures[pair] = min(known[0], measured[0]), max(known[1], measured[1])


class _Probe:
    """Sends messages both ways between pairs of ranks and takes the time."""

    def __init__(self, size: int, repeats: int, device: torch.device) -> None:
        self.size, self.repeats, self.device = size, repeats, device
        self._large, self._small = (
            (
                torch.zeros(number, dtype=torch.uint8, device=device),
                torch.zeros(number, dtype=torch.uint8, device=device),
            )
            for number in (size, 8)
        )

    def exchange(self, partner: int | None) -> tuple[float, float] | None:
        """Bandwidth and latency to a partner; a rank without one waits for the others."""
        dist.barrier()
        if partner is None or partner == dist.get_rank():
            dist.barrier()
            return None
        large = self.fastest(lambda: self._swap(self._large, partner))
        small = self.fastest(lambda: self._swap(self._small, partner))
        dist.barrier()
        return self.size / max(large - small, 1e-9), small

    def fastest(self, action: Callable[[], None]) -> float:
        """Seconds of the fastest of several runs; the first one, which opens connections, is not counted."""
        best = float("inf")
        for number in range(self.repeats + 1):
            self._finish()
            begin = time.perf_counter()
            action()
            self._finish()
            if number:
                best = min(best, time.perf_counter() - begin)
        return best

    def _swap(self, tensors: tuple[torch.Tensor, torch.Tensor], partner: int) -> None:
        operations = [dist.P2POp(dist.isend, tensors[0], partner), dist.P2POp(dist.irecv, tensors[1], partner)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _measure_axes(layout: str | ParallelLayout, probe: _Probe, device: torch.device) -> tuple[AxisMeasure, ...]:
    layout = ParallelLayout.parse(layout) if isinstance(layout, str) else layout
    layout = layout.resolve(dist.get_world_size())
    if layout.world_size == 1:
        return ()
    mesh = layout.build_mesh(device.type)
    measures = []
    for axis, count in layout.sizes().items():
        if count == 1:
            continue
        group = mesh[axis].get_group()
        part = torch.zeros(probe.size // count, dtype=torch.uint8, device=device)
        whole = torch.zeros(part.numel() * count, dtype=torch.uint8, device=device)
        small = torch.zeros(2, device=device)
        dist.barrier()
        seconds = probe.fastest(lambda p=part, w=whole, g=group: dist.all_gather_into_tensor(w, p, group=g))  # type: ignore[misc]
        dist.barrier()
        latency = probe.fastest(lambda s=small, g=group: dist.all_reduce(s, group=g))  # type: ignore[misc]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (seconds, latency))
        slowest = max(entry[0] for entry in everyone)
        moved = whole.numel() * (count - 1) / count
        measures.append(AxisMeasure(axis, count, moved / slowest, max(entry[1] for entry in everyone)))
    return tuple(measures)


def describe(links: Links) -> list[Mapping[str, Any]]:
    """One row for each kind of link and axis: name, slowest bandwidth, longest latency, how many were measured."""
    rows: list[Mapping[str, Any]] = []
    for name, pairs in (("inside nodes", links.intra), ("between nodes", links.inter)):
        if pairs:
            rows.append(
                {
                    "name": name,
                    "bandwidth": min(pair.bandwidth for pair in pairs),
                    "latency": max(pair.latency for pair in pairs),
                    "count": len(pairs),
                }
            )
    rows += [
        {"name": f"axis {axis.axis}", "bandwidth": axis.bandwidth, "latency": axis.latency, "count": axis.size}
        for axis in links.axes
    ]
    return rows


GIGABIT = 100e6
"""Bytes per second that a network of 1 Gbit/s carries at least."""
