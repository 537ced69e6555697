"""Stages are balanced by what their modules cost, the embedding and the head included."""

from __future__ import annotations

import torch

from lightning_dist.parallel.pipeline.costs import module_costs
from lightning_dist.parallel.pipeline.placement import plan_pipeline
from lightning_dist.parallel.pipeline.trace import Tracer
from tests.parallel.pipeline.networks import CHAIN, Network, Wrapper, language_model, language_step, token_batches


def test_parameters_stand_for_operations_but_an_embedding_is_looked_up() -> None:
    with torch.device("meta"):
        costs = module_costs(language_model(), CHAIN)
    block = 2 * 8 + (8 * 16 + 16) + (16 * 8 + 8)
    assert costs == [8, *[block] * 6, 8 * 11 + 11]


def test_traced_operations_move_the_cut() -> None:
    """A head over a large vocabulary costs as much as several blocks; a large embedding costs nothing."""
    module = Wrapper(Network(vocabulary=160)).double()
    trace = Tracer(module, CHAIN).trace(language_step, token_batches([4], vocabulary=160)[0])
    costs = module_costs(module, CHAIN, trace)
    assert costs[0] == 0 and costs[-1] == 5 * costs[1]
    plan = plan_pipeline(CHAIN, 2, costs=costs)
    assert plan.modules_of(1) == ["model.blocks.5", "model.head"]
