"""Goes through the layouts of a cluster: cuts early what can't win or fit, and remembers why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_dist.advisor.candidate import Candidate, Estimate, Memory
from lightning_dist.advisor.cluster import Cluster
from lightning_dist.advisor.estimator import Estimator
from lightning_dist.advisor.profile import Checkpointing, ModelProfile
from lightning_dist.advisor.schedules import candidates, refusal
from lightning_dist.advisor.words import gigabytes, seconds
from lightning_dist.layout import ParallelLayout

CLEARLY_SLOWER = 1.3
"""A class of layouts whose lower bound is this many times the best step is not looked at further."""

AXES = ("tensor", "context", "pipeline", "expert")

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Rejection:
    """A class of layouts that is not recommended, and why.

    Args:
        reason: ``memory``, ``slower``, ``bound``, ``heads``, ``nodes``, ``chain``, ``batch`` or the axis that the
            module can't have (``tensor``, ``context``, ``pipeline``, ``expert``).
        kind: The class: the axes in use.
        sentence: The reason in words and numbers.
        count: How many candidates it stands for.
        example: The one that came closest, in short form.
        numbers: What the sentence rests on.
        candidate: The one that came closest, where one was predicted.
    """

    reason: str
    kind: str
    sentence: str
    count: int = 1
    example: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    candidate: Candidate | None = None


@dataclass
class Search:
    """What a search has found.

    Args:
        fitting: Estimates of the layouts that fit, the fastest first; one for each mesh.
        rejected: Classes of layouts that were refused or do not fit.
        evaluated: Candidates whose step was predicted.
        cut: Candidates that were cut before.
    """

    fitting: list[Estimate] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    evaluated: int = 0
    cut: int = 0
    smallest: tuple[Candidate, Memory] | None = None


@dataclass(frozen=True)
class Mesh:
    """Sizes of the model axes; the rest of the devices are data ranks."""

    tensor: int
    context: int
    pipeline: int
    data: int


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    small = [factor for factor in range(1, int(number**0.5) + 1) if number % factor == 0]
    return sorted({*small, *(number // factor for factor in small)})


class _Finder:
    def __init__(
        self, profile: ModelProfile, cluster: Cluster, global_batch: int, schedules: Sequence[str] | None
    ) -> None:
        self.schedules = candidates(schedules)
        self.profile, self.cluster, self.global_batch = profile, cluster, global_batch
        self.estimator = Estimator(profile, cluster)
        self.result = Search()
        self.best_of_mesh: dict[str, Estimate] = {}
        self.best = float("inf")
        self.closest: dict[str, tuple[Candidate, Memory, int]] = {}
        self.bounds: dict[str, tuple[float, Mesh, int, dict[str, float]]] = {}

    # --- what can't be -----------------------------------------------------------------------------------------------

    def reject(self, reason: str, kind: str, sentence: str, count: int = 1, **numbers: Any) -> None:
        self.result.rejected.append(Rejection(reason, kind, sentence, count, numbers.pop("example", ""), numbers))
        self.result.cut += count

    def sizes(self, axis: str) -> list[int]:
        """The sizes of an axis that the module and the machines allow; the others are rejected here, each once."""
        profile, cluster = self.profile, self.cluster
        wanted = [size for size in divisors(cluster.devices) if size > 1]
        if not wanted:
            return [1]
        if axis in profile.refused:
            self.reject(axis, axis, f"{axis} parallelism: {profile.refused[axis]}.", len(wanted))
            return [1]
        if axis == "tensor":
            return [1, *self._tensor_sizes(wanted)]
        if axis == "context":
            return [1, *(size for size in wanted if size <= 64)]
        length = profile.chain_length
        fitting = [size for size in wanted if size <= length]
        if len(fitting) < len(wanted):
            first = next(size for size in wanted if size > length)
            self.reject(
                "chain",
                "pipeline",
                f"pipeline sizes from {first}: the chain has {length} modules, and every stage needs one.",
                len(wanted) - len(fitting),
                chain=length,
                first=first,
            )
        return [1, *fitting]

    def _tensor_sizes(self, wanted: list[int]) -> list[int]:
        profile, cluster = self.profile, self.cluster
        fitting = []
        by_reason: dict[str, list[int]] = {}
        across = [size for size in wanted if size > cluster.devices_per_node]
        for size in wanted:
            if size in across:
                continue
            if size in profile.refused_tensor_sizes:
                by_reason.setdefault(profile.refused_tensor_sizes[size], []).append(size)
            elif cluster.devices_per_node % size:
                by_reason.setdefault(
                    f"groups of {size} do not fit whole into nodes of {cluster.devices_per_node} devices", []
                ).append(size)
            else:
                fitting.append(size)
        for reason, sizes in by_reason.items():
            named = ", ".join(map(str, sizes))
            self.reject("heads", "tensor", f"tensor sizes {named}: {reason}.", len(sizes), sizes=sizes)
        if across:
            self.reject(
                "nodes", "tensor", self._across_nodes(across[0]), len(across), **self._across_numbers(across[0])
            )
        return fitting

    def _across_numbers(self, size: int) -> dict[str, Any]:
        whole = self.profile.whole
        moved = (whole.reduced + whole.reduced_backward) * 2 * (size - 1) / size
        inter = self.cluster.inter
        return {
            "size": size,
            "devices_per_node": self.cluster.devices_per_node,
            "bytes": moved,
            "seconds": moved / inter.bandwidth * self.cluster.devices_per_node / size if inter else None,
        }

    def _across_nodes(self, size: int) -> str:
        whole, cluster = self.profile.whole, self.cluster
        moved = (whole.reduced + whole.reduced_backward) * 2 * (size - 1) / size
        text = (
            f"tensor sizes from {size} would cross nodes of {cluster.devices_per_node} devices: each sample sums"
            f" {gigabytes(moved)} over the group, none of it hidden"
        )
        if cluster.inter is not None and cluster.intra is not None:
            text += f", at {gigabytes(cluster.inter.bandwidth)}/s instead of {gigabytes(cluster.intra.bandwidth)}/s"
        return text + "."

    # --- meshes ------------------------------------------------------------------------------------------------------

    def meshes(self) -> list[Mesh]:
        devices = self.cluster.devices
        found = []
        starved = 0
        for tensor in self.sizes("tensor"):
            for context in self.contexts:
                for pipeline in self.pipelines:
                    model = tensor * context * pipeline
                    if model > devices or devices % model:
                        continue
                    data = devices // model
                    if self.global_batch % data:
                        starved += 1
                        continue
                    found.append(Mesh(tensor, context, pipeline, data))
        if starved:
            self.reject(
                "batch",
                "data",
                f"{starved} meshes with more data ranks than the global batch of {self.global_batch} samples can feed"
                f" evenly (without model axes there would be {devices}).",
                starved,
                global_batch=self.global_batch,
                data_ranks=devices,
            )
        return found

    def lower_bound(self, mesh: Mesh) -> tuple[float, dict[str, float]]:
        """Seconds that no setting of this mesh can beat: computing, its exchange, and the smallest bubble."""
        local = self.global_batch // mesh.data
        parts = {"compute": float("inf")}
        for schedule in self.schedules if mesh.pipeline > 1 else [None]:
            name = schedule.name if schedule is not None else None
            if schedule is not None and mesh.pipeline * schedule.stages_per_rank > self.profile.chain_length:
                continue
            layout = ParallelLayout(tensor=mesh.tensor, context=mesh.context, pipeline=mesh.pipeline, shard=1)
            candidate = Candidate(layout, 2, "none", name, microbatches=local, samples=1)
            time = self.estimator.time(candidate)
            # One launch-bound microbatch is the least; many small ones cost more in starting kernels.
            whole = Candidate(layout, 2, "none", name, microbatches=1, samples=local)
            least = min(time.compute, self.estimator.time(whole).compute)
            bound = {"compute": least, "tensor": time.tensor, "context": time.context, "bubble": time.bubble}
            bound = {part: value * (0.9 if part != "compute" else 1.0) for part, value in bound.items()}
            if sum(bound.values()) < sum(parts.values()):
                parts = bound
        return sum(parts.values()), parts

    def least_memory(self, mesh: Mesh) -> tuple[Candidate, Memory]:
        """The most frugal setting of a mesh."""
        best: tuple[Candidate, Memory] | None = None
        local = self.global_batch // mesh.data
        names: list[str | None] = [None]
        if mesh.pipeline > 1:
            names = ["1F1B" if local >= mesh.pipeline else "GPipe"]
        experts = self.expert_sizes(mesh)
        for name in names:
            for checkpointing in ("full", "none"):
                for zero in (3, 2) if mesh.data > 1 else (0,):
                    candidate = self.candidate(mesh, mesh.data, zero, checkpointing, name, 1, experts[-1])
                    memory = self.estimator.memory(candidate)
                    if best is None or memory.total < best[1].total:
                        best = candidate, memory
        assert best is not None
        return best

    def candidate(
        self, mesh: Mesh, shard: int, zero: int, checkpointing: Any, schedule: str | None, samples: int, expert: int
    ) -> Candidate:
        layout = ParallelLayout(
            replicate=mesh.data // shard,
            shard=shard,
            tensor=mesh.tensor,
            context=mesh.context,
            pipeline=mesh.pipeline,
            expert=expert,
        )
        return Candidate(layout, zero, checkpointing, schedule, self.global_batch // mesh.data // samples, samples)

    def expert_sizes(self, mesh: Mesh) -> list[int]:
        if not self.profile.num_experts or "expert" in self.profile.refused:
            return [1]
        spread = mesh.data * mesh.context
        return [size for size in divisors(self.profile.num_experts) if spread % size == 0]

    def shard_sizes(self, mesh: Mesh) -> list[int]:
        """None, what shares a node, all, and the smallest power of two between at which parameters alone fit."""
        model = mesh.tensor * mesh.context
        inside = max(1, self.cluster.devices_per_node // model)
        sizes = {1, mesh.data}
        if mesh.data % inside == 0 and inside <= mesh.data:
            sizes.add(inside)
        for size in divisors(mesh.data):
            candidate = self.candidate(mesh, size, 2 if size > 1 else 0, "full", *self._any(mesh), 1)
            if self.estimator.memory(candidate).states <= self.cluster.usable_memory / 2:
                sizes.add(size)
                break
        return sorted(sizes)

    def _any(self, mesh: Mesh) -> tuple[str | None, int]:
        return ("1F1B" if mesh.pipeline > 1 else None), 1

    # --- candidates --------------------------------------------------------------------------------------------------

    def settings(self, mesh: Mesh) -> Iterator[tuple[int, int, int, list[tuple[str | None, int]]]]:
        """Shard size, ZeRO stage and expert size, each with the microbatches to try, the smallest first."""
        local = self.global_batch // mesh.data
        sizes = [size for size in divisors(local) if size & (size - 1) == 0 or size == local]
        for schedule in self.schedules if mesh.pipeline > 1 else [None]:
            if schedule is not None and mesh.pipeline * schedule.stages_per_rank > self.profile.chain_length:
                continue
            runs: list[tuple[str | None, int]] = []
            for samples in sizes:
                name = schedule.name if schedule is not None else None
                if schedule is not None and refusal(schedule, mesh.pipeline, local // samples):
                    if schedule.name != "1F1B":
                        continue
                    name = "GPipe"
                runs.append((name, samples))
            for shard in self.shard_sizes(mesh):
                for expert in self.expert_sizes(mesh):
                    if (shard * mesh.context) % expert == 0:
                        stages = (2,) if schedule is not None and schedule.splits_backward else (2, 3)
                        for zero in stages if shard > 1 else (0,):
                            yield shard, zero, expert, runs

    def look_into(self, mesh: Mesh) -> None:
        for shard, zero, expert, runs in self.settings(mesh):
            for number, (schedule, samples) in enumerate(runs):
                if not self.look_at(mesh, shard, zero, expert, schedule, samples):
                    self.result.cut += len(runs) - number - 1  # larger microbatches need more
                    break

    def look_at(self, mesh: Mesh, shard: int, zero: int, expert: int, schedule: str | None, samples: int) -> bool:
        """Predicts a candidate under the fastest checkpointing mode with which it fits, if there is one."""
        for checkpointing in CHECKPOINTING:
            candidate = self.candidate(mesh, shard, zero, checkpointing, schedule, samples, expert)
            memory = self.estimator.memory(candidate)
            if memory.total <= self.cluster.usable_memory:
                estimate = Estimate(candidate, memory, self.estimator.time(candidate))
                self.result.evaluated += 1
                key = str(candidate.layout)
                known = self.best_of_mesh.get(key)
                if known is None or estimate.time.total < known.time.total:
                    self.best_of_mesh[key] = estimate
                self.best = min(self.best, estimate.time.total)
                return True
            self.too_large(candidate, memory)
        return False

    def too_large(self, candidate: Candidate, memory: Memory) -> None:
        known = self.closest.get(candidate.kind)
        count = known[2] + 1 if known else 1
        if known is None or memory.total < known[1].total:
            self.closest[candidate.kind] = candidate, memory, count
        else:
            self.closest[candidate.kind] = known[0], known[1], count
        self.result.cut += 1

    def remember_smallest(self, candidate: Candidate, memory: Memory) -> None:
        known = self.result.smallest
        if known is None or memory.total < known[1].total:
            self.result.smallest = candidate, memory

    def run(self) -> Search:
        self.contexts, self.pipelines = self.sizes("context"), self.sizes("pipeline")
        if self.profile.num_experts == 0 and self.cluster.devices > 1 and "expert" in self.profile.refused:
            self.reject("expert", "expert", f"expert parallelism: {self.profile.refused['expert']}.")
        usable = self.cluster.usable_memory
        bounded = sorted(((self.lower_bound(mesh), mesh) for mesh in self.meshes()), key=lambda entry: entry[0][0])
        for (bound, parts), mesh in bounded:
            if bound == float("inf"):
                continue
            if bound > CLEARLY_SLOWER * self.best:
                kind = self.candidate(mesh, mesh.data, 2 if mesh.data > 1 else 0, "none", None, 1, 1).kind
                known = self.bounds.get(kind)
                self.bounds[kind] = (bound, mesh, 1, parts) if known is None else (*known[:2], known[2] + 1, known[3])
                self.result.cut += 1
                continue
            frugal, memory = self.least_memory(mesh)
            self.remember_smallest(frugal, memory)
            if memory.total > usable and memory.states > usable:
                self.too_large(frugal, memory)
                continue
            self.look_into(mesh)
        self.result.fitting = sorted(self.best_of_mesh.values(), key=lambda estimate: estimate.time.total)
        self._explain_memory()
        self._explain_bounds()
        return self.result

    def _explain_memory(self) -> None:
        fitting = {estimate.candidate.kind for estimate in self.result.fitting}
        for kind, (candidate, memory, count) in self.closest.items():
            if kind not in fitting:
                self.result.rejected.append(memory_rejection(kind, candidate, memory, self.cluster, count))

    def _explain_bounds(self) -> None:
        for kind, (bound, mesh, count, parts) in self.bounds.items():
            largest = max((part for part in parts if part != "compute"), key=lambda part: parts[part])
            sizes = f"tp={mesh.tensor},cp={mesh.context},pp={mesh.pipeline}"
            self.result.rejected.append(
                Rejection(
                    "bound",
                    kind,
                    f"{kind}: {count} mesh{'es' if count > 1 else ''} can't win; the best ({sizes}) takes at least"
                    f" {seconds(bound)} against {seconds(self.best)}: {seconds(parts['compute'])} of computing and"
                    f" {seconds(parts[largest])} of {largest}.",
                    count,
                    sizes,
                    {"bound": bound, "best": self.best, **parts},
                )
            )


def memory_rejection(kind: str, candidate: Candidate, memory: Memory, cluster: Cluster, count: int = 1) -> Rejection:
    """Says by how much a candidate does not fit, and what takes the memory."""
    usable = cluster.usable_memory
    parts = {
        "parameters, gradients and optimizer state": memory.states,
        "activations": memory.activations + memory.working,
        "gathered parameters and gradients on their way": memory.communication + memory.casts,
    }
    listed = ", ".join(f"{gigabytes(value)} of {part}" for part, value in parts.items() if value)
    return Rejection(
        "memory",
        kind,
        f"{kind}: {count} {'settings do' if count > 1 else 'setting does'} not fit; the closest,"
        f" {candidate.describe()}, needs {gigabytes(memory.total)} of {gigabytes(usable)},"
        f" {gigabytes(memory.total - usable)} too much ({listed}).",
        count,
        str(candidate.layout),
        {"needs": memory.total, "usable": usable, "too_much": memory.total - usable, "states": memory.states},
        candidate,
    )


def search(
    profile: ModelProfile, cluster: Cluster, global_batch: int, schedules: Sequence[str] | None = None
) -> Search:
    """Finds the layouts of all the cluster's devices that fit, and why the others are not among them.

    Meshes are taken in the order of a lower bound on their step; one whose bound is clearly above the best step found
    is cut with all its settings. Of the checkpointing modes only the first that fits is predicted, since each is slower
    than the one before.

    Args:
        profile: The model.
        cluster: The devices, all of which are used.
        global_batch: Samples of an optimizer step.
        schedules: Pipeline schedules to look at; None is all.
    """
    return _Finder(profile, cluster, global_batch, schedules).run()
