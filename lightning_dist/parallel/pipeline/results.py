"""What the last stage knows about a batch, put together from its microbatches and given to every rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dist.parallel.pipeline.foreign import PipelineError, first_foreign

Weights = Sequence[Tensor | float]


def weighted_mean(values: Sequence[Tensor], weights: Weights) -> Tensor:
    """``sum(weight * value) / sum(weight)``; a value of weight 0 counts for nothing, whatever it is."""
    numbers = torch.stack([value.detach().double() for value in values])
    factors = torch.stack([torch.as_tensor(weight, dtype=torch.float64, device=numbers.device) for weight in weights])
    factors = factors.reshape(-1, *[1] * (numbers.ndim - 1))
    mean = torch.where(factors == 0, torch.zeros_like(numbers), numbers * factors).sum(0) / factors.sum()
    return mean.to(values[0].dtype if values[0].is_floating_point() else torch.get_default_dtype())


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Weights) -> Any:
    """What a step would have returned for the whole batch, from what it returned for each microbatch.

    Tensors with a row for each sample are joined, scalars averaged (floating point) or added up (counts), lists with
    an entry for each sample joined. What is the same for all stays; anything else becomes a list, one for each.

    Args:
        outputs: One nesting of values for each microbatch.
        sizes: Samples of each microbatch.
        weights: Weight of each microbatch in averages.
    """
    first = outputs[0]
    if isinstance(first, dict) and all(
        isinstance(output, dict) and output.keys() == first.keys() for output in outputs
    ):
        return {key: merge_outputs([output[key] for output in outputs], sizes, weights) for key in first}
    if isinstance(first, Tensor) and all(isinstance(output, Tensor) for output in outputs):
        if first.ndim and all(len(output) == size for output, size in zip(outputs, sizes, strict=True)):
            return torch.cat(list(outputs))
        if all(output.shape == first.shape for output in outputs):
            return weighted_mean(outputs, weights) if first.is_floating_point() else torch.stack(list(outputs)).sum(0)
        return list(outputs)
    if isinstance(first, float) and all(isinstance(output, float) for output in outputs):
        return float(weighted_mean([torch.tensor(output, dtype=torch.float64) for output in outputs], weights))
    if isinstance(first, list | tuple) and all(type(output) is type(first) for output in outputs):
        plain = not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(list(outputs)))
        if plain and all(len(output) == size for output, size in zip(outputs, sizes, strict=True)):
            return type(first)(entry for output in outputs for entry in output)
        if all(len(output) == len(first) for output in outputs):
            parts = [merge_outputs(part, sizes, weights) for part in zip(*outputs, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
        return list(outputs)
    return first if all(output is first or _equal(output, first) for output in outputs) else list(outputs)


def _equal(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


@dataclass
class LoggedValue:
    """One name logged in a step.

    Args:
        value: Its number; or None, where ``metric`` is given.
        metric: The name of the module's metric object that was logged.
        arguments: The other arguments of ``log``.
    """

    value: Any
    metric: str | None
    arguments: dict[str, Any]


class LogRecorder:
    """Stands for ``LightningModule.log`` while a step runs on microbatches, and knows each name's value for the batch.

    Args:
        module: The module whose metric objects may be logged.
        sizes: Samples of each microbatch.
        weights: Weight of each microbatch in averages, where ``log`` is not given a ``batch_size``.
        listening: Whether this rank has the last stage; elsewhere what is logged is dropped.
    """

    def __init__(self, module: nn.Module, sizes: Sequence[int], weights: Weights, listening: bool) -> None:
        self.microbatch = 0
        self._module = module
        self._sizes = sizes
        self._weights = weights
        self._listening = listening
        self._records: dict[str, dict[int, tuple[Any, dict[str, Any]]]] = {}

    def __call__(self, name: str, value: Any, *args: Any, **arguments: Any) -> None:
        if args:
            arguments = {**dict(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False)), **arguments}
        if not self._listening:
            return
        found = first_foreign(value)
        if found is not None:
            raise PipelineError(
                f"The value logged as {name!r} is computed from the output of {found.origin}, which the last stage,"
                " where logging happens, does not have; hand it on inside the hidden state (a tuple of tensors)."
            )
        if isinstance(value, Tensor):
            value = value.detach().clone()
        self._records.setdefault(name, {})[self.microbatch] = (value, arguments)

    def values(self) -> dict[str, LoggedValue]:
        """Each name's value for the whole batch, in the order they were logged."""
        return {name: self._combine(name, records) for name, records in self._records.items()}

    def _combine(self, name: str, records: dict[int, tuple[Any, dict[str, Any]]]) -> LoggedValue:
        value, arguments = next(reversed(records.values()))
        if isinstance(value, nn.Module):  # a torchmetrics object, which has seen every microbatch by itself
            attribute = next((path for path, module in self._module.named_modules() if module is value), None)
            if attribute is None:
                raise PipelineError(
                    f"The metric logged as {name!r} is no attribute of {type(self._module).__name__}, so other ranks"
                    " can't find theirs; assign it to self in __init__."
                )
            return LoggedValue(None, attribute, arguments)
        own_sizes = [given.get("batch_size") for _, given in records.values()]
        numbers = [
            number if isinstance(number, Tensor) else torch.tensor(float(number), dtype=torch.float64)
            for number, _ in records.values()
        ]
        if all(size is not None for size in own_sizes):
            weights: Weights = [float(size) for size in own_sizes if size is not None]
            arguments = {**arguments, "batch_size": sum(size for size in own_sizes if size is not None)}
        else:
            weights = [self._weights[microbatch] for microbatch in records]
            arguments = {**arguments, "batch_size": sum(self._sizes[microbatch] for microbatch in records)}
        return LoggedValue(_reduce(numbers, weights, arguments.get("reduce_fx", "mean")), None, arguments)


def _reduce(numbers: list[Tensor], weights: Weights, how: str | Callable[..., Any]) -> Tensor:
    name = how if isinstance(how, str) else getattr(how, "__name__", "")
    if name in ("sum", "min", "max"):
        stacked = torch.stack([number.reshape(()) for number in numbers])
        return stacked.sum() if name == "sum" else stacked.amin() if name == "min" else stacked.amax()
    return weighted_mean([number.reshape(()) for number in numbers], weights)


class ResultSharer:
    """Gives every rank of a group the nesting of values that one of them has.

    Tensors stay on the device, so the host waits for no value. Structure and plain values travel pickled, and only
    when they are others than the last time.

    Args:
        source: The rank in ``group`` that has the values.
        group: The ranks, for tensors.
        control_group: A CPU group of the same ranks.
        device: Where tensors are.
    """

    def __init__(
        self, source: int, group: dist.ProcessGroup, control_group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._source = source
        self._group = group
        self._control_group = control_group
        self._device = device
        self._is_source = dist.get_rank(group) == source
        self._last = b""

    def share(self, value: Any) -> Any:
        """Every rank gets the source's ``value``; all ranks must call it.

        Collectives: a broadcast of 8 bytes on the control group, a second one of the description where it has changed,
        and of one flat tensor for each type on the group.

        Raises:
            PipelineError: On every rank, if a part of the value can't be sent.
        """
        flat: dict[torch.dtype, list[Tensor]] = {}
        description: bytes = b""
        if self._is_source:
            leaves, structure = pytree.tree_flatten(value)
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    flat.setdefault(leaf.dtype, []).append(leaf.detach().to(self._device).reshape(-1))
            described = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else _Plain(leaf) for leaf in leaves]
            description = _pickled((structure, described))
        structure, described = pickle.loads(self._same_everywhere(description))
        if isinstance(structure, _Failure):
            raise PipelineError(structure.sentence)
        sizes: dict[torch.dtype, int] = {}
        for entry in described:
            if not isinstance(entry, _Plain):
                sizes[entry[1]] = sizes.get(entry[1], 0) + entry[0].numel()
        remaining: dict[torch.dtype, Tensor] = {}
        for dtype, size in sizes.items():
            whole = torch.cat(flat[dtype]) if self._is_source else torch.empty(size, dtype=dtype, device=self._device)
            dist.broadcast(whole, group=self._group, group_src=self._source)
            remaining[dtype] = whole
        if self._is_source:
            return value
        leaves = []
        for entry in described:
            if isinstance(entry, _Plain):
                leaves.append(entry.value)
                continue
            shape, dtype = entry
            leaves.append(remaining[dtype][: shape.numel()].view(shape))
            remaining[dtype] = remaining[dtype][shape.numel() :]
        return pytree.tree_unflatten(leaves, structure)

    def _same_everywhere(self, description: bytes) -> bytes:
        """The source's description; sent as its length and itself, or as 0 where it is that of the last time."""
        length = torch.tensor([0 if description == self._last else len(description)])
        dist.broadcast(length, group=self._control_group, group_src=self._source)
        if int(length):
            sent = torch.frombuffer(bytearray(description or bytes(int(length))), dtype=torch.uint8)
            dist.broadcast(sent, group=self._control_group, group_src=self._source)
            self._last = sent.numpy().tobytes()
        return self._last


@dataclass(frozen=True)
class _Plain:
    value: Any


@dataclass(frozen=True)
class _Failure:
    sentence: str


def _pickled(value: Any) -> bytes:
    """The pickle, or that of the sentence to raise on every rank."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # whatever an object raises that does not want to be pickled
        sentence = (
            "What the step logged or returned on the pipeline's last stage can't be sent to the other ranks:"
            f" {type(error).__name__}: {error}."
        )
        return pickle.dumps((_Failure(sentence), []))
