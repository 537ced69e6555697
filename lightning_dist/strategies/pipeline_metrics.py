"""Metric objects under a pipeline: only its last stage updates them, and it sees microbatches, not batches."""

from __future__ import annotations

import operator
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

State = list[tuple[Metric, dict[str, Any]]]
"""What metrics have seen: the metric and those inside it, each with its attributes."""

_COUNTERS = ("_update_count", "_computed", "_forward_cache", "_to_sync", "_should_unsync")


class BatchMetrics:
    """Finds what each batch did to the metric objects, so that every rank can have them as the last stage has.

    A metric that is called keeps what it has seen of the batch beside what it has seen of the epoch, for no call of a
    microbatch returns the batch's value; no predictions are held for it.

    Args:
        module: The module that holds the metrics.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._children: list[nn.Module | None] = []
        self._metrics: dict[str, Metric] = {}
        self._collections: list[MetricCollection] = []
        self._of_batch: dict[int, State] = {}
        self._before: dict[str, tuple[int, dict[str, Any]]] = {}
        self._busy = False

    @contextmanager
    def watch(self) -> Generator[None, None, None]:
        """Runs a batch inside."""
        self._find()
        self._of_batch.clear()
        self._before = {
            name: (metric.update_count, _copied(metric.metric_state)) for name, metric in self._metrics.items()
        }
        handles = [metric.register_forward_pre_hook(self._see, with_kwargs=True) for metric in self._metrics.values()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def changes(self) -> dict[str, dict[str, Any]]:
        """The new state of each metric that the batch changed, by name; of lists only what has been added."""
        for collection in self._collections:
            list(collection.items(copy_state=False))  # members of a compute group get the state of the updated one
        changed = {}
        for name, metric in self._metrics.items():
            count, before = self._before[name]
            now = metric.metric_state
            if metric.update_count != count or any(_replaced(now[key], before[key]) for key in now):
                states = {key: _added(value, before[key]) for key, value in now.items()}
                changed[name] = {"updates": metric.update_count, "states": states}
        return changed

    def value(self, metric: Metric) -> Any:
        """The metric's value for the batch; None if it was not called (updated, perhaps, which gives no value)."""
        state = self._of_batch.get(id(metric))
        if state is None:
            return None
        of_epoch = _take(metric)
        _put(state)
        metric._to_sync = metric.dist_sync_on_step
        try:
            return metric.compute()
        finally:
            _put(of_epoch)

    def _find(self) -> None:
        """Looks for metrics where the module's children are others than before (a hook has made new metrics)."""
        children = list(self._module._modules.values())
        if len(children) == len(self._children) and all(map(operator.is_, children, self._children)):
            return
        self._children, named = children, list(self._module.named_modules())
        self._metrics = {name: inner for name, inner in named if isinstance(inner, Metric)}
        self._collections = [inner for _, inner in named if isinstance(inner, MetricCollection)]

    def _see(self, metric: Metric, args: Any, kwargs: Any) -> None:
        if self._busy:  # a metric inside another, which the outer one updates
            return
        of_epoch = _take(metric)
        self._busy = True
        try:
            if id(metric) in self._of_batch:
                _put(self._of_batch[id(metric)])
            else:
                metric.reset()
            metric.update(*args, **kwargs)
            self._of_batch[id(metric)] = _take(metric)
        finally:
            self._busy = False
            _put(of_epoch)


def apply_changes(module: nn.Module, changes: dict[str, dict[str, Any]]) -> None:
    """Gives this rank's metrics what :meth:`BatchMetrics.changes` found on the rank with the last stage."""
    for name, change in changes.items():
        metric = module.get_submodule(name)
        for key, value in change["states"].items():
            old = getattr(metric, key)
            setattr(metric, key, [*old[: value["kept"]], *value["added"]] if isinstance(value, dict) else value)
        metric.__dict__.update(_update_count=change["updates"], _computed=None)


def find_metric_inside(module: nn.Module, chain: Sequence[str]) -> str | None:
    """The name of a metric object inside a module of the chain, which only that module's stage would update."""
    links = tuple(f"{name}." for name in chain)
    names = (name for name, inner in module.named_modules() if isinstance(inner, Metric))
    return next((name for name in names if name.startswith(links)), None)


def _replaced(now: Any, before: Any) -> bool:
    if isinstance(now, list):
        return len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True))
    return now is not before


def _added(now: Any, before: Any) -> Any:
    if not isinstance(now, list):
        return now
    kept = 0
    while kept < min(len(now), len(before)) and now[kept] is before[kept]:
        kept += 1
    return {"kept": kept, "added": now[kept:]}


def _take(metric: Metric) -> State:
    return [
        (inner, {**_copied(inner.metric_state), **{name: inner.__dict__.get(name) for name in _COUNTERS}})
        for inner in metric.modules()
        if isinstance(inner, Metric)
    ]


def _put(state: State) -> None:
    for inner, attributes in state:
        inner.__dict__.update(attributes)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Lists are emptied in place by ``reset``, tensors are replaced."""
    return {name: list(value) if isinstance(value, list) else value for name, value in state.items()}
