"""Predicts memory and step time of a candidate from the model's profile and the cluster: arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_dist.advisor.candidate import Assumptions, Candidate, Memory, StepTime
from lightning_dist.advisor.cluster import Cluster, Link
from lightning_dist.advisor.collectives import Cost, Group
from lightning_dist.advisor.profile import Checkpointing, LayerProfile, ModelProfile, combine
from lightning_dist.advisor.schedules import held_microbatches, idle_time
from lightning_dist.parallel.pipeline.placement import SCHEDULES, balance_stages, find_schedule, place_stages

SELECTIVE_RECOMPUTE = 0.05
"""Selective checkpointing computes again what is cheap: this part of the forward's time."""

NOMINAL = Assumptions()


@dataclass(frozen=True)
class RankProfile:
    """What one pipeline rank holds: the sum of its stages, and of which units they are made.

    Args:
        total: Sum over its modules and what is outside the chain.
        largest_unit: The unit with the most parameters.
        root: What no unit holds, which stays gathered.
        num_units: Number of units.
        largest_saved: The module that keeps the most without checkpointing.
        received: Bytes of the hidden states that come from other ranks, for one sample.
    """

    total: LayerProfile
    largest_unit: LayerProfile
    root: LayerProfile
    num_units: int
    largest_saved: LayerProfile
    received: float


class Estimator:
    """Memory and time of candidates for one model, cluster and precision; remembers what candidates share."""

    def __init__(self, profile: ModelProfile, cluster: Cluster) -> None:
        self.profile, self.cluster = profile, cluster
        self._ranks: dict[tuple[int, str | None], tuple[RankProfile, ...]] = {}
        self._relevant: dict[tuple[int, str | None], list[tuple[int, RankProfile]]] = {}
        self._slowest: dict[tuple[int, str | None, int], RankProfile] = {}
        self._sizes: dict[int, list[int]] = {}
        self._groups: dict[tuple[int, int], Group] = {}

    # --- what a rank holds -------------------------------------------------------------------------------------------

    def ranks(self, pipeline: int, schedule: str | None) -> tuple[RankProfile, ...]:
        """The pipeline ranks, from the one that holds stage 0; stages balanced by their work."""
        key = self._key(pipeline, schedule)
        if key not in self._ranks:
            self._ranks[key] = tuple(
                self._rank(layers, received, pipeline == 1) for layers, received in self._split(pipeline, schedule)
            )
        return self._ranks[key]

    def _key(self, pipeline: int, schedule: str | None) -> tuple[int, str | None]:
        if pipeline == 1 or schedule is None:
            return 1, None
        return pipeline, f"{SCHEDULES[schedule].placement}{SCHEDULES[schedule].stages_per_rank}"

    def _fullest(self, pipeline: int, schedule: str | None) -> list[tuple[int, RankProfile]]:
        """The ranks that may hold the most: none before them, which has as many microbatches, holds more of all."""
        key = self._key(pipeline, schedule)
        if key not in self._relevant:
            kept: list[tuple[int, RankProfile]] = []
            for index, rank in enumerate(self.ranks(pipeline, schedule)):
                if not any(_covers(earlier, rank) for _, earlier in kept):
                    kept.append((index, rank))
            self._relevant[key] = kept
        return self._relevant[key]

    def _pace(self, pipeline: int, schedule: str | None, tensor: int) -> RankProfile:
        """The rank with the most work."""
        key = (*self._key(pipeline, schedule), tensor)
        if key not in self._slowest:

            def work(rank: RankProfile) -> float:
                return rank.total.forward.over(tensor) + rank.total.backward.over(tensor)

            self._slowest[key] = max(self.ranks(pipeline, schedule), key=work)
        return self._slowest[key]

    def _split(self, pipeline: int, schedule: str | None) -> list[tuple[list[LayerProfile], float]]:
        layers = list(self.profile.layers)
        if pipeline == 1:
            return [(layers, 0.0)]
        assert schedule is not None
        tail = [layer for layer in layers if not layer.name]
        chain = [layer for layer in layers if layer.name]
        wanted = SCHEDULES[schedule]
        num_stages = pipeline * wanted.stages_per_rank
        costs = [layer.cost for layer in chain]
        if not any(costs):
            costs = [layer.forward.total + layer.backward.total for layer in chain]
        if not any(costs):
            costs = [layer.parameters.total + layer.experts.total for layer in chain]
        if num_stages not in self._sizes:
            self._sizes[num_stages] = balance_stages(costs, num_stages)
        sizes = self._sizes[num_stages]
        owners = place_stages(wanted.placement, pipeline, num_stages)
        first = owners[0]
        held: dict[int, list[LayerProfile]] = {}
        received: dict[int, float] = {}
        begin = 0
        for stage, size in enumerate(sizes):
            owner = (first - owners[stage]) % pipeline if wanted.placement == "loop" else owners[stage]
            held.setdefault(owner, []).extend(chain[begin : begin + size])
            if begin and owners[stage] != owners[stage - 1]:
                received[owner] = received.get(owner, 0.0) + chain[begin - 1].sent
            begin += size
            if stage == num_stages - 1:
                held[owner].extend(tail)
        return [(held[rank], received.get(rank, 0.0)) for rank in range(pipeline)]

    def _rank(self, layers: Sequence[LayerProfile], received: float, one_stage: bool) -> RankProfile:
        def elements(layer: LayerProfile) -> float:
            return layer.parameters.total + layer.experts.total

        # A pipeline makes a unit of each module of the chain; without one, what is no unit is the root's.
        units = [layer for layer in layers if layer.name and (layer.unit or not one_stage)]
        root = [layer for layer in layers if not (layer.name and (layer.unit or not one_stage))]
        return RankProfile(
            total=combine([*layers, self.profile.outside]),
            largest_unit=max(units, key=elements, default=LayerProfile()),
            root=combine([*root, self.profile.outside]),
            num_units=max(1, len(units)),
            largest_saved=max(layers, key=lambda layer: layer.saved.total, default=LayerProfile()),
            received=received,
        )

    def _largest(self, pipeline: int, schedule: str | None) -> RankProfile:
        """The rank with the most parameters; it is among the fullest."""
        ranks = (rank for _, rank in self._fullest(pipeline, schedule))
        return max(ranks, key=lambda rank: rank.total.parameters.total + rank.total.experts.total)

    # --- memory ------------------------------------------------------------------------------------------------------

    def memory(self, candidate: Candidate) -> Memory:
        """Bytes of the pipeline rank that holds the most."""
        layout = candidate.layout
        ranks = self._fullest(layout.pipeline, candidate.schedule)
        each = (self._memory_of(candidate, index, rank) for index, rank in ranks)
        return max(each, key=lambda memory: memory.total)

    def _memory_of(self, candidate: Candidate, index: int, rank: RankProfile) -> Memory:
        layout, precision = candidate.layout, self.profile.precision
        tensor, spread = layout.tensor, layout.shard_size * layout.context
        shards = layout.shard_size
        expert_shards = spread // layout.expert if layout.expert > 1 else shards

        def elements(layer: LayerProfile, trainable: bool = False) -> tuple[float, float]:
            dense = layer.trainable if trainable else layer.parameters
            experts = layer.trainable_experts if trainable else layer.experts
            return dense.over(tensor), experts.over(tensor) / layout.expert

        dense, experts = elements(rank.total)
        trainable, trainable_experts = elements(rank.total, trainable=True)
        sharded = dense / shards + experts / expert_shards
        sharded_trainable = trainable / shards + trainable_experts / expert_shards
        gradients = sharded_trainable * precision.gradient
        communication = 0.0
        if candidate.zero:
            if candidate.microbatches > 1:  # gradients are reduced once a step and kept whole until then
                gradients += (trainable + trainable_experts) * precision.reduce
            unit = sum(elements(rank.largest_unit))
            if candidate.zero == 3:
                gathered = sum(elements(rank.root)) + min(2, rank.num_units) * unit
            else:
                gathered = dense + experts
            communication = gathered * precision.gather + unit * (precision.gather + precision.reduce)
        elif layout.data_size > 1:
            communication = sum(elements(rank.largest_unit)) * 2 * precision.reduce

        held = 1.0
        if candidate.schedule is not None:
            schedule = SCHEDULES[candidate.schedule]
            held = held_microbatches(schedule, layout.pipeline, index, candidate.microbatches)
        samples = candidate.samples / layout.context
        kept = rank.total.activations(candidate.checkpointing).over(tensor) * samples * held
        working = 2 * rank.total.largest.over(tensor) * samples
        if candidate.checkpointing != "none":
            again = rank.largest_saved.saved.over(tensor)
            again -= rank.largest_saved.activations(candidate.checkpointing).over(tensor)
            working = max(working, again * samples)
        return Memory(
            parameters=sharded * precision.parameter,
            gradients=gradients,
            optimizer=sharded_trainable * self.profile.optimizer_bytes * precision.parameter / 4,
            activations=kept,
            working=working,
            communication=communication,
            casts=rank.total.cast.over(tensor) * precision.cast,
            pipeline_rank=index,
        )

    # --- time --------------------------------------------------------------------------------------------------------

    def time(self, candidate: Candidate, assumptions: Assumptions = NOMINAL) -> StepTime:
        """Seconds of one optimizer step: the pipeline rank with the most work sets the pace."""
        layout = candidate.layout
        ranks = self.ranks(layout.pipeline, candidate.schedule)
        slowest = self._pace(layout.pipeline, candidate.schedule, layout.tensor)
        forward, backward, again = self._compute(candidate, slowest.total, assumptions)
        tensor = self._tensor(candidate, slowest.total, assumptions)
        context = self._context(candidate, slowest.total, assumptions)
        expert = self._expert(candidate, slowest.total, assumptions)
        hops = Cost()
        if layout.pipeline > 1:
            group = self._group(layout.world_size // layout.pipeline, layout.pipeline, assumptions)
            size = (
                max(rank.received for rank in (ranks[0], ranks[-1], ranks[len(ranks) // 2]))
                * candidate.samples
                / layout.context
            )
            if self.profile.sequence_parallel:
                size /= layout.tensor
            hops = group.send(size) * 2
        exchange = tensor + context + expert + hops
        number = candidate.microbatches
        compute = forward + backward + again
        # Exchange happens in forward and backward alike; schedules see it as part of them.
        extra = exchange.seconds / 3
        data = self._data(candidate, ranks, forward + extra, backward + again + 2 * extra, assumptions)
        bubble = 0.0
        if candidate.schedule is not None:
            weights = backward / 2
            bubble = idle_time(
                find_schedule(candidate.schedule),
                layout.pipeline,
                forward + extra,
                backward - weights + again + 2 * extra,
                weights,
            )
        traffic = exchange * number + data
        return StepTime(
            compute=compute * number,
            tensor=tensor.seconds * number,
            context=context.seconds * number,
            expert=expert.seconds * number,
            pipeline=hops.seconds * number,
            data=data.seconds,
            bubble=bubble,
            intra=traffic.intra,
            inter=traffic.inter,
        )

    def _compute(
        self, candidate: Candidate, rank: LayerProfile, assumptions: Assumptions
    ) -> tuple[float, float, float]:
        """Seconds of a microbatch: forward, backward, recomputation.

        Weights are read once in forward and twice in backward, which is what makes few tokens dear; starting kernels
        bounds it all from below.
        """
        layout = candidate.layout
        read = rank.parameters.over(layout.tensor) + rank.experts.over(layout.tensor) / layout.expert
        read *= (self.profile.precision.cast or self.profile.precision.gather) / self.cluster.weight_bandwidth
        share = candidate.samples / layout.context
        rate = self.cluster.rate * assumptions.rate
        start = rank.operations * self.cluster.launch
        forward = max(rank.forward.over(layout.tensor) * share / rate + read, start)
        backward = max(rank.backward.over(layout.tensor) * share / rate + 2 * read, 2 * start)
        again = {"none": 0.0, "selective": SELECTIVE_RECOMPUTE, "full": 1.0}[candidate.checkpointing] * forward
        return forward, backward, again

    def _group(self, stride: int, size: int, assumptions: Assumptions) -> Group:
        key = (stride, size)
        if key not in self._groups:
            self._groups[key] = Group.of(self.cluster, stride, size)
        group = self._groups[key]
        if assumptions.bandwidth == 1 and assumptions.latency == 1:
            return group

        def changed(link: Link) -> Link:
            return Link(link.bandwidth * assumptions.bandwidth, link.latency * assumptions.latency)

        return replace(group, intra=changed(group.intra), inter=changed(group.inter))

    def _passes(self, checkpointing: Checkpointing) -> int:
        """How often the forward's messages are sent: full checkpointing sends them again."""
        return 2 if checkpointing == "full" else 1

    def _tensor(self, candidate: Candidate, rank: LayerProfile, assumptions: Assumptions) -> Cost:
        layout = candidate.layout
        if layout.tensor == 1:
            return Cost()
        group = self._group(1, layout.tensor, assumptions)
        share, passes = candidate.samples / layout.context, self._passes(candidate.checkpointing)
        return (
            group.all_reduce(rank.reduced * share * passes, rank.reductions * passes)
            + group.all_reduce(rank.reduced_backward * share, rank.reductions_backward)
            + group.all_gather(rank.gathered * share)
        )

    def _context(self, candidate: Candidate, rank: LayerProfile, assumptions: Assumptions) -> Cost:
        """Heads for sequence by all-to-all where the heads divide, else (or if cheaper) gathered keys and values."""
        layout = candidate.layout
        if layout.context == 1:
            return Cost()
        group = self._group(layout.tensor, layout.context, assumptions)
        share = candidate.samples / layout.tensor
        passes = 1 + self._passes(candidate.checkpointing)
        calls = rank.attentions * passes
        gathered = group.all_gather(rank.key_value * share * (passes + 1), calls + rank.attentions)
        if self.profile.query_heads % (layout.tensor * layout.context):
            return gathered
        size = (2 * rank.query + rank.key_value) * share / layout.context
        return min(gathered, group.all_to_all(size * passes, 4 * calls), key=lambda cost: cost.seconds)

    def _expert(self, candidate: Candidate, rank: LayerProfile, assumptions: Assumptions) -> Cost:
        layout = candidate.layout
        if layout.expert == 1:
            return Cost()
        group = self._group(layout.tensor, layout.expert, assumptions)
        passes = 1 + self._passes(candidate.checkpointing)
        size = 2 * rank.routed * candidate.samples / layout.context
        return group.all_to_all(size * passes, 2 * passes * rank.routers)

    def _data(
        self,
        candidate: Candidate,
        ranks: Sequence[RankProfile],
        forward: float,
        backward: float,
        assumptions: Assumptions,
    ) -> Cost:
        """Parameters gathered and gradients reduced over the data ranks, less what computing hides."""
        layout, precision = candidate.layout, self.profile.precision
        spread = layout.shard_size * layout.context
        if spread * layout.replicate == 1:
            return Cost()
        rank = ranks[0] if len(ranks) == 1 else self._largest(layout.pipeline, candidate.schedule)
        dense = rank.total.parameters.over(layout.tensor)
        trainable = rank.total.trainable.over(layout.tensor)
        experts = rank.total.experts.over(layout.tensor) / layout.expert
        trainable_experts = rank.total.trainable_experts.over(layout.tensor) / layout.expert
        units, number = rank.num_units, candidate.microbatches
        gather, reduce = Cost(), Cost()
        shards = layout.shard_size
        group = self._group(layout.tensor * layout.context, shards, assumptions)
        expert_shards = spread // layout.expert if layout.expert > 1 else shards
        of_experts = self._group(layout.tensor * layout.expert, expert_shards, assumptions)
        if layout.expert == 1:
            of_experts = group
        gather += group.all_gather(dense * precision.gather, units)
        gather += of_experts.all_gather(experts * precision.gather, units)
        reduce += group.all_gather(trainable * precision.reduce, units)
        reduce += of_experts.all_gather(trainable_experts * precision.reduce, units)
        whole = trainable / shards * precision.reduce
        whole_experts = trainable_experts / expert_shards * precision.reduce
        if layout.expert == 1:
            whole, whole_experts = whole + whole_experts, 0.0
        reduce += self._group(layout.tensor, layout.context, assumptions).all_reduce(whole, units)
        copies = self._group(layout.tensor * spread, layout.replicate, assumptions)
        reduce += copies.all_reduce(whole + whole_experts, units)
        times_forward, times_backward = number, number
        if candidate.zero != 3:
            times_backward = 0
            if candidate.schedule is not None:
                times_forward = 1  # kept for all microbatches of a step
        hidden_forward, hidden_backward = forward * assumptions.overlap, backward * assumptions.overlap
        exposed = times_forward * max(0.0, gather.seconds - hidden_forward)
        exposed += max(0, times_backward - 1) * max(0.0, gather.seconds - hidden_backward)
        last = (gather.seconds if times_backward else 0.0) + reduce.seconds
        exposed += max(0.0, last - hidden_backward)
        # Before the first unit and behind the last there is nothing to hide behind.
        exposed = max(exposed, (gather.seconds + reduce.seconds) / units)
        traffic = gather * (times_forward + times_backward) + reduce
        return Cost(exposed, traffic.intra, traffic.inter)


def _covers(rank: RankProfile, other: RankProfile) -> bool:
    """Whether ``rank`` holds at least as much as ``other`` of everything that takes memory."""

    def amounts(profile: RankProfile) -> list[float]:
        layers = (profile.total, profile.largest_unit, profile.root, profile.largest_saved)
        parameters = ("parameters", "trainable", "experts", "trainable_experts")
        names = (*parameters, "saved", "kept", "received", "largest", "cast")
        each = (getattr(layer, name) for layer in layers for name in names)
        return [value for amount in each for value in (amount.whole, amount.cut)]

    return all(mine >= theirs for mine, theirs in zip(amounts(rank), amounts(other), strict=True))
