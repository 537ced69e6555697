"""Which collectives a rank issues, on which mesh dimension, how many bytes, and how long it waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_dist import _compat
from lightning_dist.telemetry.clock import Phase, PhaseClock

MOST_UNWAITED = 4096
"""How many collectives that nobody has waited for are remembered."""


@dataclass
class GroupTraffic:
    """What one group cost since it was last asked for.

    Args:
        seconds: Waited, on the host's clock; on a GPU the host hardly waits, and this says little.
        payload: Bytes of the tensors given to its collectives.
        calls: Number of collectives.
    """

    seconds: float = 0.0
    payload: float = 0.0
    calls: int = 0


@dataclass
class CollectiveWatch:
    """Notes every collective that Python issues in this process, while it is installed.

    Groups are named by their mesh dimension (``"shard"``, ``"tensor"``, ``"pipeline"``), the default group by
    ``world_name``. Waits count as exposed communication; for a neighbour's activations or gradients as bubble. Issues
    none itself.

    Args:
        clock: Where waits are counted.
        on_call: Called before each collective with its name, and the group's; None after it.
        world_name: What the default group is called: ``"data"`` where all ranks are replicas.
    """

    clock: PhaseClock
    on_call: Callable[[str | None, str], None] | None = None
    world_name: str = "world"
    traffic: dict[str, GroupTraffic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names: dict[str, str] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._open: dict[int, tuple[str, str]] = {}
        self._functional = "world"
        self._remove: Callable[[], None] | None = None
        self._ignored: set[str] = set()
        self._final_since = 0.0
        self._reduced_bytes = 0.0

    def install(self) -> None:
        """Begins to watch; until :meth:`remove`."""
        if self._remove is None:
            self._remove = _compat.watch_collectives(self)

    def remove(self) -> None:
        """Puts everything back."""
        if self._remove is not None:
            self._remove()
            self._remove = None
        self._open.clear()
        self._groups.clear()

    def ignore(self, group: dist.ProcessGroup) -> None:
        """Leaves a group of telemetry's own out."""
        self._ignored.add(group.group_name)

    def take(self) -> dict[str, GroupTraffic]:
        """The traffic since the last call, by group."""
        taken, self.traffic = self.traffic, {}
        return taken

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """The groups seen so far, by name."""
        return dict(self._groups)

    # --- called from the wrapped functions ---------------------------------------------------------------------------

    def issued(self, operation: str, group: dist.ProcessGroup, tensors: Any, work: Any) -> None:
        """A collective was given to a group."""
        key = group.group_name
        if key in self._ignored:
            return
        name = self._names.get(key) or self._named(group)
        traffic = self.traffic.get(name)
        if traffic is None:
            traffic = self.traffic[name] = GroupTraffic()
        traffic.calls += 1
        traffic.payload += _bytes(tensors)
        if work is not None:
            if len(self._open) > MOST_UNWAITED:
                self._open.clear()
            self._open[id(work)] = (operation, name)

    def begin_wait(self, work: Any) -> tuple[Phase | None, str, float] | None:
        """A rank begins to wait for a collective."""
        found = self._open.pop(id(work), None)
        return self._begin(*found) if found is not None else None

    def functional_group(self, group_name: str) -> None:
        """The group of the functional collective that comes next."""
        if group_name in self._names:
            self._functional = self._names[group_name]
        else:
            self._functional = self._named(_compat.find_group(group_name))

    def begin_functional_wait(self) -> tuple[Phase | None, str, float] | None:
        """A rank begins to wait for a functional collective, whose tensor does not tell its group: the latest."""
        return self._begin("functional collective", self._functional)

    def end_wait(self, token: tuple[Phase | None, str, float] | None) -> None:
        """The wait is over."""
        if token is None:
            return
        before, name, began = token
        self.clock.leave(before)
        if before is not None:
            self.traffic.setdefault(name, GroupTraffic()).seconds += time.perf_counter() - began
            if self.on_call is not None:
                self.on_call(None, name)

    def reducer_carries(self, payload: float) -> None:
        """Says how many bytes of gradients DDP's reducer exchanges in a backward: it does so unseen."""
        self._reduced_bytes = payload

    def begin_final_wait(self) -> None:
        """Backward has computed its last gradient, and waits for what the reducer has under way."""
        if self.clock.phase is Phase.BACKWARD:
            self._final_since = time.perf_counter()
            self.clock.enter(Phase.EXPOSED_COMM)
            if self.on_call is not None:
                self.on_call("gradient reduction", self.world_name)

    def end_final_wait(self) -> None:
        """Backward is over."""
        if self._final_since:
            traffic = self.traffic.setdefault(self.world_name, GroupTraffic())
            traffic.seconds += time.perf_counter() - self._final_since
            traffic.payload += self._reduced_bytes
            traffic.calls += 1
            self._final_since = 0.0
            if self.on_call is not None:
                self.on_call(None, self.world_name)

    def _begin(self, operation: str, name: str) -> tuple[Phase | None, str, float]:
        bubble = name == "pipeline" and operation in ("send", "recv")
        before = self.clock.enter(Phase.BUBBLE if bubble else Phase.EXPOSED_COMM)
        if before is not None and self.on_call is not None:
            self.on_call(operation, name)
        return before, name, time.perf_counter()

    def _named(self, group: dist.ProcessGroup) -> str:
        key, description = group.group_name, group.group_desc
        name = description.removeprefix("mesh_").removeprefix("flattened_")
        if description == "default_pg":
            name = self.world_name
        elif description in ("", "undefined"):
            name = "control" if group.size() == dist.get_world_size() else f"group {key}"
        self._names[key] = name
        self._groups[name] = group
        return name


def _bytes(tensors: Any) -> float:
    if isinstance(tensors, Tensor):
        return float(tensors.numel() * tensors.element_size())
    if isinstance(tensors, list | tuple):
        return sum(_bytes(entry) for entry in tensors)
    return 0.0


def watch_final_wait(watch: CollectiveWatch, loss: Tensor) -> None:
    """Counts as communication what backward waits for after its last gradient: what DDP's reducer does, unseen, in C++.

    Args:
        watch: Whose clock is in backward from now on, and which is told of its end.
        loss: What backward begins at.
    """
    if loss.requires_grad:
        loss.register_hook(lambda _: _compat.at_end_of_backward(watch.begin_final_wait))
