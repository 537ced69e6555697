"""What a batch holds, and whether ranks hold the same."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from lightning_dist.parallel.batch import broadcast_batch, check_same_batch, hash_batch, sample_count
from lightning_dist.testing import WorkerError


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(3, 2), 3),
        ({"scale": torch.tensor(2.0), "x": torch.ones(5)}, 5),
        ((torch.ones(0, 2), torch.ones(0)), 0),
        ("text", 1),
        ([["a", "b"], torch.ones(2)], 2),
        (UserDict(input_ids=torch.ones(5, 2)), 5),
        (Pair(torch.ones(4), torch.ones(4)), 4),
    ],
)
def test_sample_count(batch, samples):
    assert sample_count(batch) == samples


def test_the_hash_sees_values_types_shapes_and_structure():
    x = torch.arange(6.0)
    different = [
        x,
        x.double(),
        x.view(2, 3),
        x + 1e-7,
        [x],
        {"x": x},
        {"y": x},
        (x, "a"),
        (x, "b"),
        x.bfloat16(),
        UserDict(a=x),
        UserDict(a=x + 1),
    ]
    assert len({hash_batch(batch) for batch in different}) == len(different)
    assert hash_batch({"x": x, "n": 3}) == hash_batch({"x": x.clone(), "n": 3})


def same(differ):
    rank = dist.get_rank()
    check_same_batch({"x": torch.full((2,), float(differ and rank == 2))}, dist.group.WORLD, "batch 1")
    return broadcast_batch({"x": torch.tensor(rank)}, dist.group.WORLD)["x"].item()


def test_ranks_with_another_batch_are_named_on_all_ranks(pool):
    assert pool.run(same, 3, False) == [0, 0, 0]
    with pytest.raises(WorkerError) as error:
        pool.run(same, 3, True)
    assert len(error.value.failures) == 3
    assert all("rank 2 differs from rank 0" in str(failure) for failure in error.value.failures)
