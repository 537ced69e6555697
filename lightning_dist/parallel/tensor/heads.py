"""Which attention heads a rank computes: whole heads only, key/value heads shared where there are fewer than ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_dist.parallel.tensor.styles import output_width

# What Hugging Face's attention modules call the width of one head, and the number of heads.
_HEAD_SIZE_NAMES = ("head_dim", "attention_head_size", "head_size")
_HEAD_COUNT_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head")


@dataclass(frozen=True)
class HeadPlan:
    """How one attention module's projections are cut.

    Args:
        rows: For projections that are not cut in equal parts in order: the outputs of each rank.
        attributes: Plain attributes of the attention module that change with its number of heads.
    """

    rows: Mapping[str, list[Tensor]] = field(default_factory=dict)
    attributes: Mapping[str, int] = field(default_factory=dict)


def plan_heads(
    name: str, attention: nn.Module, columns: Mapping[str, nn.Module], fused: Mapping[str, int], size: int
) -> HeadPlan:
    """Cuts the projections of an attention module so that each rank computes whole heads.

    Args:
        name: The module's name, for errors.
        attention: The module that owns the projections; one without heads (an MLP) gets an empty plan.
        columns: Its projections that are cut by outputs, by their name in it.
        fused: Those that hold several matrices one after the other (query, key, value), and how many.
        size: Number of ranks.

    Raises:
        ValueError: If the heads do not divide, naming the module, its heads and the sizes that fit.
    """
    head_size = _first_integer(attention, _HEAD_SIZE_NAMES)
    widths = {child: output_width(module) for child, module in columns.items()}
    parts = {child: widths[child] // fused.get(child, 1) for child in widths}
    if not head_size or any(part % head_size for part in parts.values()):
        count = _first_integer(attention, _HEAD_COUNT_NAMES)
        if count and widths:
            _check(name, next(iter(widths)), count, size)
        return HeadPlan(rows={child: fused_rows(widths[child], pieces, size) for child, pieces in fused.items()})

    heads = {child: part // head_size for child, part in parts.items()}
    queries = max(heads.values(), default=0)
    asking = next((child for child, count in heads.items() if count == queries), "")
    _check(name, asking, queries, size)
    rows = {child: fused_rows(widths[child], pieces, size) for child, pieces in fused.items()}
    attributes = {}
    shared = {child: count for child, count in heads.items() if count % size}
    for child, count in shared.items():
        if child in fused or queries % count or not hasattr(attention, "num_key_value_groups"):
            _check(name, child, count, size)
        chosen = _shared_heads(queries, count, size)
        rows[child] = [_rows_of(wanted, head_size) for wanted in chosen]
        attributes["num_key_value_groups"] = queries // size // len(chosen[0])
    if fused and hasattr(attention, "split_size"):  # GPT-2 splits its fused projection by a stored width
        attributes["split_size"] = next(iter(parts.values())) // size
    return HeadPlan(rows, attributes)


def fitting_sizes(count: int) -> str:
    """The numbers of ranks that divide ``count``, as text."""
    return ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)


def _check(name: str, child: str, count: int, size: int) -> None:
    if count % size:
        raise ValueError(
            f"tensor_parallel_size={size} does not fit {name}.{child}: its {count} heads do not divide by {size};"
            f" sizes that fit: {fitting_sizes(count)}."
        )


def _shared_heads(queries: int, keys: int, size: int) -> list[list[int]]:
    """The key/value heads of each rank where they do not divide: those its query heads ask for.

    If each rank's query heads fall into equal groups, one copy per group; else one copy per query head.
    """
    own = queries // size
    asked = [[head * keys // queries for head in range(rank * own, (rank + 1) * own)] for rank in range(size)]
    distinct = [sorted(set(heads)) for heads in asked]
    counts = {len(heads) for heads in distinct}
    if len(counts) == 1:
        count = counts.pop()
        in_groups = all(
            own % count == 0 and heads == [head for head in unique for _ in range(own // count)]
            for heads, unique in zip(asked, distinct, strict=True)
        )
        if in_groups:
            return distinct
    return asked


def _rows_of(heads: list[int], head_size: int) -> Tensor:
    return torch.cat([torch.arange(head * head_size, (head + 1) * head_size) for head in heads])


def fused_rows(width: int, pieces: int, size: int) -> list[Tensor]:
    """Each rank's equal part of every piece of a matrix that holds ``pieces`` of them one after the other."""
    piece = width // pieces
    part = piece // size
    return [
        torch.cat([torch.arange(part) + index * piece + rank * part for index in range(pieces)]) for rank in range(size)
    ]


def _first_integer(module: nn.Module, names: tuple[str, ...]) -> int:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
