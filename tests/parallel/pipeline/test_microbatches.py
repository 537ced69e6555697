"""Any batch is cut along its samples, or refused by name."""

from __future__ import annotations

import dataclasses
from collections import UserDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dist.parallel.pipeline.microbatches import count_samples, even_sizes, signature, split_batch

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str


def rows(count: int, width: int = 2) -> torch.Tensor:
    return torch.arange(count * width).reshape(count, width)


def test_tensors_are_views_and_everything_without_samples_is_passed_on() -> None:
    batch = {
        "x": rows(5),
        "nested": [rows(5, 3), (rows(5, 1), None)],
        "scalar": torch.tensor(3.0),
        "broadcast": torch.ones(1, 2, 2),
        "text": ["a", "b", "c", "d", "e"],
        "array": np.arange(5),
        "temperature": 0.5,
        "task": "qa",
        "shape": (5, 7),
    }
    first, second = split_batch(batch, [3, 2])
    assert torch.equal(first["x"], rows(5)[:3]) and torch.equal(second["x"], rows(5)[3:])
    assert first["x"].data_ptr() == batch["x"].data_ptr()
    assert torch.equal(second["nested"][0], rows(5, 3)[3:]) and second["nested"][1][1] is None
    assert first["scalar"] is batch["scalar"] and first["broadcast"] is batch["broadcast"]
    assert first["text"] == ["a", "b", "c"] and second["text"] == ["d", "e"]
    assert second["array"].tolist() == [3, 4]
    assert second["temperature"] == 0.5 and second["task"] == "qa" and second["shape"] == (5, 7)


@pytest.mark.parametrize(
    "batch",
    [
        Pair(rows(4), rows(4)),
        Sample(rows(4), "n"),
        UserDict(x=rows(4)),
        defaultdict(list, x=rows(4)),
        (rows(4), {"y": rows(4)}),
        rows(4),
    ],
)
def test_types_stay(batch: Any) -> None:
    for part in split_batch(batch, [1, 3]):
        assert type(part) is type(batch)
    assert count_samples(split_batch(batch, [1, 3])[1]) == 3


def test_lists_of_samples_of_different_sizes() -> None:
    """What detection collates: images and targets as lists, one entry for each sample."""
    batch = ([torch.ones(3, size, 4) for size in (5, 6, 7)], [{"boxes": torch.ones(count, 4)} for count in (2, 0, 1)])
    assert count_samples(batch) == 3
    images, targets = split_batch(batch, [2, 1])[1]
    assert [image.shape[1] for image in images] == [7] and len(targets) == 1


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": rows(4), "y": rows(3)}, r"batch\['x'\] has 4, batch\['y'\] has 3"),
        ({"task": "qa"}, "no tensor"),
        (torch.tensor(1.0), "no tensor"),
    ],
)
def test_what_can_not_be_cut_is_named(batch: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        count_samples(batch)


def test_sizes_are_even_and_add_up() -> None:
    assert even_sizes(7, 4) == [2, 2, 2, 1]
    assert even_sizes(3, 3) == [1, 1, 1]
    with pytest.raises(ValueError, match="do not add up"):
        split_batch(rows(4), [1, 2])


def test_signature_tells_shapes_and_numbers_apart_but_not_values() -> None:
    same = signature({"x": rows(4), "n": 3, "name": "a"})
    assert same == signature({"x": rows(4) + 1, "n": 3, "name": "b"})
    assert same != signature({"x": rows(5), "n": 3, "name": "a"})
    assert same != signature({"x": rows(4), "n": 4, "name": "a"})
    assert same != signature({"x": rows(4).float(), "n": 3, "name": "a"})
