"""The exchange of tokens: ranks with many, few and no tokens, and what is exchanged how often."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from lightning_dist import ParallelLayout
from lightning_dist.parallel.expert import (
    Experts,
    apply_expert_parallel,
    build_expert_mesh,
    exchange_tokens,
    experts_within,
    find_experts,
)
from tests.parallel.expert.networks import WIDTH, batch_for, build


def uneven_tokens(own_tokens):
    """Each rank has as many tokens as ``own_tokens`` says; gradients of all together against one process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    whole = Experts(4, WIDTH, 6).double()
    tokens = torch.randn(sum(own_tokens), WIDTH, dtype=torch.float64)
    index = torch.randint(0, 5, (sum(own_tokens), 2))  # 4 is dropped
    weights = torch.rand(sum(own_tokens), 2, dtype=torch.float64)
    expected_output = whole(tokens.requires_grad_(), index, weights.requires_grad_())
    expected_output.square().sum().backward()

    part = Experts(4 // ranks, WIDTH, 6).double()
    held = slice(rank * (4 // ranks), (rank + 1) * (4 // ranks))
    with torch.no_grad():
        for mine, all_of_them in zip(part.parameters(), whole.parameters(), strict=True):
            mine.copy_(all_of_them[held])
    mine = slice(sum(own_tokens[:rank]), sum(own_tokens[: rank + 1]))
    own, own_weights = (t[mine].detach().clone().requires_grad_() for t in (tokens, weights))
    output, _ = exchange_tokens(own, index[mine], own_weights, 4, dist.group.WORLD, part)
    output.square().sum().backward()
    differences = [output - expected_output[mine], own.grad - tokens.grad[mine], own_weights.grad - weights.grad[mine]]
    differences += [p.grad - q.grad[held] for p, q in zip(part.parameters(), whole.parameters(), strict=True)]
    return max([d.abs().max().item() for d in differences if d.numel()], default=0.0)


@pytest.mark.parametrize("own_tokens", [(0, 7), (9, 1), (0, 0)])
def test_ranks_with_different_numbers_of_tokens(pool, own_tokens):
    assert max(pool.run(uneven_tokens, 2, own_tokens)) <= 1e-12


def counted_collectives():
    layout = ParallelLayout.parse("shard=2,ep=2").resolve(2)
    network = build(bias_update_rate=0.0)
    apply_expert_parallel(network, find_experts(network), build_expert_mesh(layout, "cpu"))
    with CommDebugMode() as forward:
        loss = network(*batch_for(0))
    with CommDebugMode() as backward:
        loss.backward()
    return forward.get_total_counts(), backward.get_total_counts()


def test_a_layer_exchanges_three_times_forward_and_twice_backward(pool):
    layers = 2
    for counts in pool.run(counted_collectives, 2):
        assert counts == (3 * layers, 2 * layers)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("shard=2,ep=2", {"expert": 2}),
        ("shard=4,cp=2,ep=4,pp=2,tp=2", {"pipeline": 2, "expert_shard": 2, "expert": 4, "tensor": 2}),
        ("replicate=2,shard=8,ep=2", {"replicate": 2, "expert_shard": 4, "expert": 2}),
    ],
)
def test_the_mesh_takes_experts_out_of_shard_and_context(text, axes, monkeypatch):
    layout = ParallelLayout.parse(text)
    layout = layout.resolve(layout.minimum_world_size)
    built = {}
    monkeypatch.setattr(
        "lightning_dist.parallel.expert.apply.init_device_mesh",
        lambda _device, shape, mesh_dim_names: built.update(zip(mesh_dim_names, shape, strict=True)),
    )
    build_expert_mesh(layout, "cpu")
    assert built == axes


def test_a_layout_without_experts_has_no_expert_mesh():
    with pytest.raises(ValueError, match="expert=1"):
        build_expert_mesh(ParallelLayout(shard=2), "cpu")


def refusals():
    mesh = build_expert_mesh(ParallelLayout.parse("shard=2,ep=2").resolve(2), "cpu")
    odd = nn.ModuleDict({"experts": Experts(3, WIDTH, 6)})
    biased = nn.ModuleDict({"experts": Experts(4, WIDTH, 6)})
    biased["experts"].norm = nn.LayerNorm(WIDTH)
    dense = nn.ModuleDict({"experts": nn.Linear(WIDTH, WIDTH)})
    messages = []
    for network in (odd, biased, dense):
        try:
            apply_expert_parallel(network, ["experts"], mesh)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_spread_is_refused_by_name(pool):
    for odd, biased, dense in pool.run(refusals, 2):
        assert odd == "experts has 3 experts, which do not divide among 2 expert ranks."
        assert "experts.norm.weight of shape (8,)" in biased
        assert "experts (Linear) does not fit" in dense


def test_a_plan_may_name_the_layer_or_its_experts():
    network = build()
    assert experts_within(network, ["blocks.0.moe", "blocks.1.moe.experts"]) == find_experts(network)
