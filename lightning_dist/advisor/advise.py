"""Which layout, why, what was rejected and why, and when to stay on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from lightning_dist.advisor.candidate import Assumptions, Candidate, Estimate
from lightning_dist.advisor.cluster import (
    ASSUMED_FLOPS,
    INTER_LATENCY,
    INTRA_LATENCY,
    Cluster,
    parse_bytes,
    parse_flops,
    parse_link,
    read_links,
)
from lightning_dist.advisor.estimator import Estimator
from lightning_dist.advisor.model_reader import build_on_meta, first_batch, read_model
from lightning_dist.advisor.profile import ModelProfile, Precision
from lightning_dist.advisor.search import AXES, CHECKPOINTING, Rejection, Search, divisors, memory_rejection, search
from lightning_dist.advisor.sentences import (
    WORTH_IT,
    nothing_fits,
    slower,
    stay,
    update_locally,
    wait_for_memory,
)
from lightning_dist.advisor.words import seconds
from lightning_dist.layout import ParallelLayout
from lightning_dist.plan import ModelPlan

NEARLY = 1.03
"""Of layouts within this factor of the fastest, the one with the fewest axes is recommended."""

UNDECIDED = 1.1
"""A choice that a missing number may make this much slower than another is not made."""

RANGES: Mapping[str, tuple[str, float, float]] = {
    "rate": ("the floating-point rate of a device", 0.8, 1.2),
    "bandwidth": ("the bandwidth of the links", 0.7, 1.1),
    "latency": ("the latency of the links", 0.5, 2.0),
    "overlap": ("how much exchange hides behind computing", 0.5, 1.0),
}
"""What is not known exactly, in words, and the range it is varied over (factors; overlap itself)."""

REASONS = (*AXES, "heads", "nodes", "chain", "batch", "memory", "slower", "bound")
"""Reasons of rejections in the order in which they are told."""

UNMEASURED_RATE = (0.25, 2.0)


@dataclass(frozen=True)
class Missing:
    """An input that decides and is not there.

    Args:
        what: The input.
        how: How to get it.
    """

    what: str
    how: str


@dataclass(frozen=True)
class Advice:
    """The answer.

    Args:
        model: Class of the module.
        parameters: Its number of parameters.
        cluster: What it was planned for.
        global_batch: Samples of one optimizer step, the same for all layouts.
        recommended: The layout to take; None if nothing fits or a deciding input is missing.
        alternatives: The next best layouts.
        baselines: ``"one device"``, ``"plain DDP"`` and, with several nodes, ``"one node"``, whether they fit or not.
        rejected: Classes of layouts that are not recommended, and why.
        advice: What to do, in sentences.
        missing: Deciding inputs that are missing.
        notes: What was assumed.
        evaluated: Candidates whose step was predicted; ``cut`` are those that were cut before.
    """

    model: str
    parameters: float
    cluster: Cluster
    global_batch: int | None
    recommended: Estimate | None
    alternatives: tuple[Estimate, ...] = ()
    baselines: Mapping[str, Estimate] = field(default_factory=dict)
    rejected: tuple[Rejection, ...] = ()
    advice: tuple[str, ...] = ()
    missing: tuple[Missing, ...] = ()
    notes: tuple[str, ...] = ()
    evaluated: int = 0
    cut: int = 0

    def fits(self, estimate: Estimate) -> bool:
        return estimate.memory.total <= self.cluster.usable_memory

    def as_json(self) -> dict[str, Any]:
        """The same in plain values."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "devices": self.cluster.devices,
            "global_batch": self.global_batch,
            "recommended": None if self.recommended is None else self._estimate(self.recommended),
            "alternatives": [self._estimate(estimate) for estimate in self.alternatives],
            "baselines": {name: self._estimate(estimate) for name, estimate in self.baselines.items()},
            "rejected": [
                {
                    "reason": rejection.reason,
                    "kind": rejection.kind,
                    "sentence": rejection.sentence,
                    "count": rejection.count,
                    "example": rejection.example,
                    "numbers": rejection.numbers,
                }
                for rejection in self.rejected
            ],
            "advice": list(self.advice),
            "missing": [{"what": entry.what, "how": entry.how} for entry in self.missing],
            "notes": list(self.notes),
            "evaluated": self.evaluated,
            "cut": self.cut,
        }

    def _estimate(self, estimate: Estimate) -> dict[str, Any]:
        candidate, memory, time = estimate.candidate, estimate.memory, estimate.time
        known = not any(entry.what == ACTIVATIONS for entry in self.missing)
        timed = known and not self.missing
        return {
            "layout": str(candidate.layout),
            "kind": candidate.kind,
            "strategy_arguments": candidate.strategy_arguments(),
            "accumulate_grad_batches": candidate.accumulated_batches,
            "microbatch_samples": candidate.samples,
            "fits": self.fits(estimate),
            "memory": {
                "total": memory.total,
                "parameters": memory.parameters,
                "gradients": memory.gradients,
                "optimizer": memory.optimizer,
                "activations": memory.activations if known else None,
                "working": memory.working if known else None,
                "communication": memory.communication,
                "casts": memory.casts,
            },
            "step_seconds": time.total if timed else None,
            "range": [estimate.low, estimate.high] if timed and estimate.high else None,
            "dominating_assumption": estimate.dominating or None,
            "parts": time.parts if timed else None,
            "bubble": time.bubble_share if timed else None,
            "bytes_per_link": {"intra": time.intra, "inter": time.inter},
        }


ACTIVATIONS = "the size of activations"


def advise(
    model: Callable[[], Any] | nn.Module | ModelProfile,
    *,
    devices: int,
    devices_per_node: int | None = None,
    memory: str | float | None = None,
    intra: str | float | None = None,
    inter: str | float | None = None,
    intra_latency: float | None = None,
    inter_latency: float | None = None,
    links: str | Path | None = None,
    flops: str | float | None = None,
    batches: Any = None,
    global_batch: int | None = None,
    precision: str | Precision = "32-true",
    plan: ModelPlan | None = None,
    schedules: Sequence[str] | None = None,
    alternatives: int = 4,
    use_all_devices: bool = False,
    note: Callable[[str], None] | None = None,
) -> Advice:
    """Predicts memory and step time of every layout that the devices allow, and says which to take.

    Issues no collectives and takes no memory for weights.

    Args:
        model: A function without arguments that returns the LightningModule (or it and batches), the module itself
            (left on the meta device), or a profile read before.
        devices: Number of devices.
        devices_per_node: Devices of one node; None is all of them.
        memory: Of one device: ``"80GB"`` or bytes. None: unknown, so nothing can be said to fit.
        intra: Bandwidth inside a node for each device, one direction: ``"450GB/s"`` or bytes per second.
        inter: Bandwidth between nodes for each device.
        intra_latency, inter_latency: Seconds for a small message; None is 5 and 15 microseconds.
        links: A ``links.json`` that was measured; replaces the four above where it has numbers.
        flops: What one device reaches in training: ``"400TFLOPS"`` or a number. None assumes 400 TFLOPS and says so.
        batches: An iterable of batches, where ``model`` brings none.
        global_batch: Samples of one optimizer step. None is the batch of one device times the devices, as in DDP.
        precision: The Trainer's precision.
        plan: The user's plan.
        schedules: Pipeline schedules to look at; None is all.
        alternatives: How many other layouts to return.
        use_all_devices: Recommend the best layout of all devices even if one device would do (``layout="auto"``).
        note: Told what is assumed while the model is read.

    Raises:
        ValueError: If an argument does not fit.
    """
    notes: list[str] = []

    def remember(sentence: str) -> None:
        notes.append(sentence)
        if note is not None:
            note(sentence)

    per_node = min(devices, devices_per_node or devices)
    cluster = Cluster(
        devices,
        per_node,
        None if memory is None else parse_bytes(memory, "memory"),
        parse_link(intra, intra_latency, INTRA_LATENCY, "intra"),
        parse_link(inter, inter_latency, INTER_LATENCY, "inter"),
        None if flops is None else parse_flops(flops, "flops"),
    )
    if links is not None:
        measured = read_links(links)
        cluster = replace(cluster, intra=measured[0] or cluster.intra, inter=measured[1] or cluster.inter)
    if global_batch is not None and (not isinstance(global_batch, int) or global_batch < 1):
        raise ValueError(f"global_batch={global_batch!r} does not fit: give a whole number of at least 1.")
    profile = _profile_of(model, batches, precision, plan, remember)
    notes.extend(profile.notes)
    return _advise(profile, cluster, global_batch, schedules, alternatives, use_all_devices, notes)


def choose_layout(model: Callable[[], Any] | nn.Module | ModelProfile, world_size: int, **arguments: Any) -> Advice:
    """What ``HybridParallelStrategy(layout="auto")`` asks: the best layout that uses the whole world.

    Args:
        model: As for :func:`advise`.
        world_size: Number of ranks, all of which get work.
        arguments: As for :func:`advise`.

    Raises:
        ValueError: If nothing fits or a deciding input is missing, with what to do.
    """
    advice = advise(model, devices=world_size, use_all_devices=True, **arguments)
    if advice.recommended is None:
        listed = [f"{entry.what} is not known: {entry.how}" for entry in advice.missing] or list(advice.advice)
        raise ValueError(f"layout='auto' can't choose a layout for {world_size} ranks: {' '.join(listed)}")
    return advice


def _profile_of(
    model: Any, batches: Any, precision: str | Precision, plan: ModelPlan | None, note: Callable[[str], None]
) -> ModelProfile:
    if isinstance(model, ModelProfile):
        return model
    if isinstance(model, nn.Module):
        module, batch = model, None
    else:
        module, batch = build_on_meta(model, note)
    if batches is not None:
        batch = first_batch(batches)
    return read_model(module, batch, precision=precision, plan=plan)


def _advise(
    profile: ModelProfile,
    cluster: Cluster,
    global_batch: int | None,
    schedules: Sequence[str] | None,
    count: int,
    use_all_devices: bool,
    notes: list[str],
) -> Advice:
    missing = _missing(profile, cluster)
    if global_batch is None and profile.samples is not None:
        global_batch = profile.samples * cluster.devices
    batch = global_batch or cluster.devices
    if cluster.flops is None:
        notes.append(f"{ASSUMED_FLOPS / 1e12:.0f} TFLOPS for each device are assumed; give flops to have it right")
    baselines = _baselines(profile, cluster, batch)
    if missing:
        rejected = [
            memory_rejection(name, estimate.candidate, estimate.memory, cluster)
            for name, estimate in baselines.items()
            if estimate.memory.total > cluster.usable_memory
        ]
        advice = [f"No layout is recommended, for {entry.what} is not known: {entry.how}" for entry in missing]
        return Advice(
            profile.name,
            profile.num_parameters,
            cluster,
            global_batch,
            None,
            baselines=baselines,
            rejected=tuple(rejected),
            advice=tuple(advice),
            missing=tuple(missing),
            notes=tuple(notes),
        )
    found = search(profile, cluster, batch, schedules)
    if cluster.nodes > 1:
        node = search(profile, cluster.of_size(cluster.devices_per_node), batch, schedules)
        if node.fitting:
            baselines["one node"] = node.fitting[0]
    chosen = simplest(found.fitting)
    small = _smaller(baselines, cluster)
    sentences: list[str] = []
    if small is not None and not use_all_devices:
        sentences += stay(chosen, small, cluster)
        if sentences:
            chosen = small
    rejected = list(found.rejected)
    others = _others(found, chosen, count)
    if chosen is None:
        sentences += nothing_fits(found, cluster)
    else:
        undecided = _undecided(profile, cluster, chosen, found, list(baselines.values()))
        if undecided is not None:
            missing.append(undecided)
            sentences.insert(0, f"No layout is recommended: {undecided.what} decides. {undecided.how}")
            others = [chosen, *others]
        rejected += slower(found, chosen, others)
    told = {rejection.kind for rejection in rejected}
    rejected += [
        memory_rejection(name, estimate.candidate, estimate.memory, cluster)
        for name, estimate in baselines.items()
        if estimate.memory.total > cluster.usable_memory and name not in told
    ]
    sentences += wait_for_memory(cluster, baselines["one device"], found)
    sentences += update_locally(cluster, baselines.get("plain DDP"), found)

    def ranged(estimate: Estimate) -> Estimate:
        return with_range(profile, cluster, estimate)

    return Advice(
        profile.name,
        profile.num_parameters,
        cluster,
        batch,
        None if missing or chosen is None else ranged(chosen),
        tuple(map(ranged, others)),
        {name: ranged(estimate) for name, estimate in baselines.items()},
        tuple(sorted(rejected, key=lambda rejection: REASONS.index(rejection.reason))),
        tuple(sentences),
        tuple(missing),
        tuple(notes),
        found.evaluated,
        found.cut,
    )


def simplest(fitting: Sequence[Estimate]) -> Estimate | None:
    """The fastest, or one with fewer axes that is nearly as fast."""
    if not fitting:
        return None
    near = [estimate for estimate in fitting if estimate.time.total <= NEARLY * fitting[0].time.total]
    return min(near, key=lambda estimate: (estimate.candidate.num_axes, estimate.time.total))


def _smaller(baselines: Mapping[str, Estimate], cluster: Cluster) -> Estimate | None:
    """The fewest devices, less than all, that do nearly as well as any such number."""
    fitting = [
        estimate
        for estimate in baselines.values()
        if estimate.candidate.layout.world_size < cluster.devices and estimate.memory.total <= cluster.usable_memory
    ]
    if not fitting:
        return None
    least = min(estimate.time.total for estimate in fitting)
    enough = [estimate for estimate in fitting if estimate.time.total <= WORTH_IT * least]
    return min(enough, key=lambda estimate: estimate.candidate.layout.world_size)


def _missing(profile: ModelProfile, cluster: Cluster) -> list[Missing]:
    missing = []
    if cluster.memory is None:
        missing.append(Missing("the memory of a device", "give memory (--memory 80GB)."))
    if profile.unknown:
        missing.append(
            Missing(
                ACTIVATIONS,
                f"{profile.unknown}. Let the factory return the module and an iterable of batches, and the step run"
                " without reading values; or run one step on one device and look at its peak memory.",
            )
        )
    doctor = "measure it with `lightning-dist doctor` under torchrun"
    if cluster.devices > 1 and cluster.devices_per_node > 1 and cluster.intra is None:
        missing.append(Missing("the link inside a node", f"{doctor}, or give intra (--intra 450GB/s)."))
    if cluster.nodes > 1 and cluster.inter is None:
        missing.append(Missing("the link between nodes", f"{doctor} on two nodes, or give inter (--inter 50GB/s)."))
    return missing


def _baselines(profile: ModelProfile, cluster: Cluster, batch: int) -> dict[str, Estimate]:
    """One device and plain DDP, with the largest microbatch that fits, else the smallest."""
    baselines = {}
    for name, devices in (("one device", 1), ("plain DDP", cluster.devices)):
        if devices > batch or batch % devices:
            continue
        estimator = Estimator(profile, cluster.of_size(devices))
        layout = ParallelLayout(replicate=devices, shard=1)
        local = batch // devices
        options = []
        for samples in (size for size in divisors(local) if size & (size - 1) == 0 or size == local):
            for checkpointing in CHECKPOINTING:
                candidate = Candidate(layout, 0, checkpointing, None, local // samples, samples)
                options.append(Estimate(candidate, estimator.memory(candidate), estimator.time(candidate)))
        fitting = [option for option in options if option.memory.total <= cluster.usable_memory]
        baselines[name] = (
            min(fitting, key=lambda option: option.time.total)
            if fitting
            else min(options, key=lambda option: option.memory.total)
        )
    return baselines


def with_range(profile: ModelProfile, cluster: Cluster, estimate: Estimate) -> Estimate:
    """Adds how far the step may be off, and which assumption moves it the most."""
    estimator = Estimator(profile, cluster.of_size(estimate.candidate.layout.world_size))
    nominal = estimate.time.total
    spreads = {}
    lows, highs = {}, {}
    for name, (_, low, high) in RANGES.items():
        if name == "rate" and cluster.flops is None:
            low, high = UNMEASURED_RATE
        ends = [estimator.time(estimate.candidate, Assumptions(**{name: value})).total for value in (low, high)]
        spreads[name] = max(*ends, nominal) - min(*ends, nominal)
        slow_first = ends[0] >= ends[1]
        lows[name], highs[name] = (high, low) if slow_first else (low, high)
    dominating = max(spreads, key=lambda name: spreads[name])
    low_time = estimator.time(estimate.candidate, Assumptions(**lows)).total
    high_time = estimator.time(estimate.candidate, Assumptions(**highs)).total
    return replace(estimate, low=min(low_time, nominal), high=max(high_time, nominal), dominating=RANGES[dominating][0])


def _undecided(
    profile: ModelProfile, cluster: Cluster, chosen: Estimate, found: Search, baselines: Sequence[Estimate]
) -> Missing | None:
    """Whether another layout wins by much at another floating-point rate, where nobody measured it."""
    if cluster.flops is not None:
        return None
    fitting = [estimate for estimate in baselines if estimate.memory.total <= cluster.usable_memory]
    rivals = [*found.fitting[:20], *fitting, chosen]
    for factor in UNMEASURED_RATE:
        assumptions = Assumptions(rate=factor)
        times = [_time_of(profile, cluster, rival, assumptions) for rival in rivals]
        best = min(range(len(rivals)), key=lambda index: times[index])
        if times[-1] > UNDECIDED * times[best]:
            return Missing(
                "the floating-point rate of a device",
                f"At {ASSUMED_FLOPS * factor / 1e12:.0f} TFLOPS {rivals[best].candidate.layout} takes"
                f" {seconds(times[best])} against {seconds(times[-1])} of {chosen.candidate.layout}, which is best at"
                f" the assumed {ASSUMED_FLOPS / 1e12:.0f}. Time some steps on one device and give flops (--flops).",
            )
    return None


def _time_of(profile: ModelProfile, cluster: Cluster, estimate: Estimate, assumptions: Assumptions) -> float:
    of_size = cluster.of_size(estimate.candidate.layout.world_size)
    return Estimator(profile, of_size).time(estimate.candidate, assumptions).total


def _others(found: Search, chosen: Estimate | None, count: int) -> list[Estimate]:
    """The fastest other layouts."""
    taken = None if chosen is None else chosen.candidate.layout
    return [estimate for estimate in found.fitting if estimate.candidate.layout != taken][:count]
