"""Every layout of the data axes trains to the numbers of one process."""

import math

import pytest
import torch

from tests.strategies.training import Classifier, MaskedClassifier, data, make, reference, train, worst

LAYOUTS = ["replicate=2", "shard=2", "replicate=2,shard=2", "shard=4"]


def world(layout: str) -> int:
    return math.prod(int(part.split("=")[1]) for part in layout.split(","))


def global_steps(dataset, batch_size: int, ranks: int, accumulate: int = 1, epochs: int = 1):
    """The batches of each optimizer step over all data ranks: those of one process."""
    shares = [[dataset[i] for i in range(rank, len(dataset), ranks)] for rank in range(ranks)]
    cut = [[share[i : i + batch_size] for i in range(0, len(share), batch_size)] for share in shares]
    batches = [
        [batch for share in cut for batch in share[i : i + accumulate]] for i in range(0, len(cut[0]), accumulate)
    ]
    collated = [[[torch.stack(column) for column in zip(*batch, strict=True)] for batch in step] for step in batches]
    return collated * epochs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_and_gradient_norms_equal_one_process(pool, layout, optimizer):
    dataset, ranks = data(48), world(layout)
    wanted, norms = reference(make(Classifier, optimizer=optimizer), global_steps(dataset, 2, ranks))
    for result in pool.run(
        train, ranks, layout, Classifier, dataset, 2, factory_kwargs={"optimizer": optimizer}, init_process_group=False
    ):
        assert worst(result["weights"], wanted) < 1e-9
        assert result["norms"] == pytest.approx(norms, rel=1e-9)
