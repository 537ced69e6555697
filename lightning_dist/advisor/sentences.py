"""What to do, in sentences that carry their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_dist.advisor.candidate import Estimate
from lightning_dist.advisor.cluster import Cluster
from lightning_dist.advisor.search import Rejection, Search
from lightning_dist.advisor.words import gigabytes, percent, seconds

WORTH_IT = 1.1
"""How many times as fast all devices must be before they are worth it at all."""

SLOW_SYNC = 0.5
"""From this part of a plain DDP step on, exchanging gradients seldom is worth a thought."""

SELDOM = 0.05
"""Local updates exchange so seldom that it takes this part of the computing."""


def slower(found: Search, chosen: Estimate, others: Sequence[Estimate]) -> list[Rejection]:
    """Classes that fit and are slower: the fastest of each, and what it loses its time to."""
    shown = {chosen.candidate.kind, *(estimate.candidate.kind for estimate in others)}
    rejected = []
    best_of: dict[str, Estimate] = {}
    counts: dict[str, int] = {}
    for estimate in found.fitting:
        best_of.setdefault(estimate.candidate.kind, estimate)
        counts[estimate.candidate.kind] = counts.get(estimate.candidate.kind, 0) + 1
    for kind, estimate in best_of.items():
        if kind in shown:
            continue
        time, reference = estimate.time, chosen.time
        losses = {part: value - reference.parts[part] for part, value in time.parts.items()}
        worst = max(losses, key=lambda part: losses[part])
        rejected.append(
            Rejection(
                "slower",
                kind,
                f"{kind}: the fastest, {estimate.candidate.describe()}, takes {seconds(time.total)} against"
                f" {seconds(reference.total)}; most of the difference is {PARTS[worst]}"
                f" ({seconds(time.parts[worst])} against {seconds(reference.parts[worst])})"
                + (f", the bubble is {percent(time.bubble_share)}" if time.bubble else "")
                + ".",
                counts[kind],
                str(estimate.candidate.layout),
                {"seconds": time.total, "best": reference.total, "loss": worst, **time.parts},
                estimate.candidate,
            )
        )
    return rejected


PARTS = {
    "compute": "computing (what is computed again, or starting many small operations)",
    "tensor": "sums over tensor ranks",
    "context": "exchange of the sequence",
    "expert": "sending tokens to experts",
    "pipeline": "sending between stages",
    "data": "exchange of parameters and gradients that computing does not hide",
    "bubble": "waiting for the pipeline to fill and drain",
}


def stay(best: Estimate | None, small: Estimate, cluster: Cluster) -> list[str]:
    """Why fewer devices are the better choice; nothing if they are not."""
    world = small.candidate.layout.world_size
    where = "one device" if world == 1 else f"one node of {world} devices"
    if best is None:
        return [f"Stay on {where}: no layout of all {cluster.devices} devices fits, and {where} does."]
    gain = small.time.total / best.time.total
    if gain >= WORTH_IT:
        return []
    return [
        f"Stay on {where}: it takes {seconds(small.time.total)} a step, and all {cluster.devices} devices take"
        f" {seconds(best.time.total)} at best ({best.candidate.layout}), {gain:.2f} times as fast for"
        f" {cluster.devices // world} times the devices."
    ]


def nothing_fits(found: Search, cluster: Cluster) -> list[str]:
    """What would hold the model: more devices, or devices with more memory."""
    if found.smallest is None:
        return [
            f"Nothing fits: no layout of {cluster.devices} devices is possible for this model and global batch; see"
            " what was rejected."
        ]
    candidate, memory = found.smallest
    usable = cluster.usable_memory
    floor = memory.total - memory.states
    text = (
        f"Nothing fits: the most frugal layout, {candidate.describe()}, needs {gigabytes(memory.total)} of"
        f" {gigabytes(usable)} that tensors can have on each device"
    )
    if floor < usable:
        times = memory.states / (usable - floor)
        devices = cluster.devices * math.ceil(times)
        larger = _memory(memory.total, cluster)
        return [f"{text}. About {devices} devices of this kind would hold it, or devices with {larger} of memory."]
    return [
        f"{text}, of which {gigabytes(floor)} (activations of one sample, the largest layer) stay however many devices"
        f" there are: wait for devices with {_memory(memory.total, cluster)} of memory, not for more of them."
    ]


def _memory(needed: float, cluster: Cluster) -> str:
    return gigabytes(needed / cluster.usable)


def wait_for_memory(cluster: Cluster, one: Estimate, found: Search) -> list[str]:
    """One device with somewhat more memory may do what several do."""
    if cluster.memory is None or one.memory.total <= cluster.usable_memory or cluster.devices == 1:
        return []
    needed = one.memory.total / cluster.usable
    if needed > 2 * cluster.memory or not found.fitting:
        return []
    best = found.fitting[0]
    if one.time.total > WORTH_IT * best.time.total:
        return []
    return [
        f"Wait for memory, not for devices: one device with {gigabytes(needed)} instead of {gigabytes(cluster.memory)}"
        f" would take {seconds(one.time.total)} a step, and {cluster.devices} of these take {seconds(best.time.total)}."
    ]


def update_locally(cluster: Cluster, ddp: Estimate | None, found: Search) -> list[str]:
    """Workers that exchange seldom, where exchange of gradients between nodes takes most of the step."""
    if ddp is None or ddp.memory.total > cluster.usable_memory or cluster.devices == 1:
        return []
    own = ddp.time.total - ddp.time.data
    best = found.fitting[0].time if found.fitting else ddp.time
    share = best.data / best.total
    if ddp.time.data < SLOW_SYNC * ddp.time.total or share < SLOW_SYNC:
        return []
    every = math.ceil(ddp.time.data / (SELDOM * own))
    each = own + ddp.time.data / every
    return [
        f"The links are slow for this model: exchange of gradients is {percent(ddp.time.data / ddp.time.total)} of a"
        f" plain DDP step ({seconds(ddp.time.data)} of {seconds(ddp.time.total)}) and {percent(share)} of the best"
        " step. If the training may change,"
        f" LocalUpdateStrategy with an exchange every {every} steps takes {seconds(each)} a step."
    ]
