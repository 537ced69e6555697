"""A batch cut into microbatches along dimension 0, whatever structure it has."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def count_samples(batch: Any) -> int:
    """The number of samples in a batch: the size of dimension 0 that its tensors share.

    Tensors without dimensions, and those whose dimension 0 has size 1 while others have more, belong to no sample.
    Where tensors disagree, lists of one common length are taken to hold one entry for each sample.

    Raises:
        ValueError: If the tensors disagree, or nothing in the batch has a dimension 0.
    """
    return _find_samples(batch)[0]


def split_batch(batch: Any, sizes: list[int]) -> list[Any]:
    """Cuts a batch into microbatches of ``sizes`` samples; tensors are views, everything without samples is passed on.

    Tensors and arrays are cut along dimension 0; a list or tuple with one plain entry (text, number) for each sample
    is cut too. Dictionaries, named tuples and dataclasses keep their type.

    Args:
        batch: Any nesting of dictionaries, lists, tuples, dataclasses, tensors and other values.
        sizes: Samples of each microbatch, which add up to the batch's.

    Raises:
        ValueError: As `count_samples`, or if the sizes do not add up.
    """
    samples, lists_hold_samples = _find_samples(batch)
    if sum(sizes) != samples:
        raise ValueError(f"Microbatches of {sizes} samples do not add up to the batch's {samples}.")
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        _cut(batch, start, start + size, samples, lists_hold_samples) for start, size in zip(starts, sizes, strict=True)
    ]


def even_sizes(samples: int, number: int) -> list[int]:
    """``number`` sizes that add up to ``samples`` and differ by 1 at most, the larger first."""
    smaller, larger = divmod(samples, number)
    return [smaller + 1] * larger + [smaller] * (number - larger)


def signature(microbatch: Any) -> tuple[Any, ...]:
    """What the shapes inside a step may depend on: structure, shapes, types, and plain numbers of a microbatch."""
    leaves, structure = pytree.tree_flatten(microbatch)
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            described.append((tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, np.ndarray):
            described.append((leaf.shape, str(leaf.dtype)))
        elif isinstance(leaf, int | bool | torch.dtype | None):
            described.append(leaf)
        else:
            described.append(type(leaf).__qualname__)
    return (str(structure), *described)


def _find_samples(batch: Any) -> tuple[int, bool]:
    sizes: dict[str, int] = {}
    lists: dict[str, int] = {}
    outside: dict[str, int] = {}
    _survey(batch, "batch", False, sizes, outside, lists)
    distinct = _distinct(sizes)
    if len(distinct) == 1:
        return distinct.pop(), False
    lengths = set(lists.values())
    if len(lengths) == 1 and _distinct(outside) <= lengths:
        return lengths.pop(), True
    if not distinct:
        raise ValueError(
            "The batch holds no tensor, array or list with a dimension 0 to cut into microbatches; let the"
            " DataLoader collate samples along dimension 0."
        )
    found = ", ".join(f"{name} has {size}" for name, size in sizes.items())
    raise ValueError(
        f"The batch can't be cut into microbatches along dimension 0, for its entries differ there: {found}."
        " Give each entry one row for each sample."
    )


def _distinct(sizes: dict[str, int]) -> set[int]:
    distinct = set(sizes.values())
    return distinct - {1} or distinct


def _survey(
    value: Any, name: str, in_list: bool, sizes: dict[str, int], outside: dict[str, int], lists: dict[str, int]
) -> None:
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            sizes[name] = value.shape[0]
            if not in_list:
                outside[name] = value.shape[0]
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _survey(part, f"{name}[{key!r}]", in_list, sizes, outside, lists)
    elif isinstance(value, list | tuple):
        if isinstance(value, list) and not in_list and value:
            lists[name] = len(value)
        for index, part in enumerate(value):
            _survey(part, f"{name}[{index}]", in_list or isinstance(value, list), sizes, outside, lists)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _survey(getattr(value, field.name), f"{name}.{field.name}", in_list, sizes, outside, lists)


def _cut(value: Any, start: int, end: int, samples: int, lists_hold_samples: bool) -> Any:
    def inner(part: Any) -> Any:
        return _cut(part, start, end, samples, lists_hold_samples)

    if isinstance(value, Tensor | np.ndarray):
        return value[start:end] if value.ndim and value.shape[0] == samples else value
    if isinstance(value, Mapping):
        if isinstance(value, MutableMapping):
            cut = copy.copy(value)  # keeps the type: defaultdict, Hugging Face's BatchEncoding, …
            for key, part in value.items():
                cut[key] = inner(part)
            return cut
        return {key: inner(part) for key, part in value.items()}
    if isinstance(value, list) and lists_hold_samples and len(value) == samples:
        return value[start:end]
    if isinstance(value, list | tuple):
        if len(value) == samples and _holds_plain_entries(value):
            return value[start:end]
        parts = [inner(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: inner(getattr(value, name)) for name in fields})
    return value


def _holds_plain_entries(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list has one entry without tensors for each sample; a tuple of numbers may be a shape, so it is not."""
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return False
    kinds = (str, bytes) if isinstance(values, tuple) else (str, bytes, int, float, dict, type(None))
    return all(isinstance(entry, kinds) for entry in values) and not any(
        isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(list(values))
    )
