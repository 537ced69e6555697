"""Runs a network with experts on one process and spread over ranks, on the same tokens, and compares the numbers."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_dist import ParallelLayout, _compat
from lightning_dist.parallel import gradients
from lightning_dist.parallel.activation import checkpoint_activations
from lightning_dist.parallel.expert import (
    apply_expert_parallel,
    build_expert_mesh,
    find_experts,
    share_tokens,
    update_expert_biases,
)
from tests.parallel.expert.networks import batch_for, build, force_routing


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst(reference, found):
    """The largest difference of any tensor relative to its largest element (or 1e-6 of the largest of all)."""
    assert found.keys() == reference.keys()
    largest = max(value.abs().max().item() for value in reference.values())
    differences = {}
    for name, expected in reference.items():
        assert found[name].shape == expected.shape, name
        scale = max(expected.abs().max().item(), 1e-6 * largest)
        differences[name] = (found[name] - expected).abs().max().item() / scale
    name = max(differences, key=differences.get)
    assert all(value == value for value in differences.values()), differences
    return differences[name], name


def gradients_of(network):
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
    return {name: whole(parameter.grad) for name, parameter in network.named_parameters()}


def weights_of(network):
    return {name: whole(parameter).detach().clone() for name, parameter in network.named_parameters()}


def spread(network, layout, *, blocks=()):
    """Expert parallelism, then FSDP2 (or copies) of the rest over the data axes, as a strategy does it."""
    mesh = layout.build_mesh("cpu")
    report = apply_expert_parallel(network, find_experts(network), build_expert_mesh(layout, "cpu"))
    axes = tuple(axis for axis in ("replicate", "shard") if layout.sizes()[axis] > 1)
    data_group = _compat.flatten_mesh(mesh, axes, "data").get_group()
    share_tokens(network, data_group)
    ignored = set(report.whole_parameters)
    for unit in (*blocks, network):
        if axes == ("replicate",):
            _compat.replicate_module(unit, mesh=mesh["replicate"], ignored_params=ignored)
        else:
            fully_shard(unit, mesh=mesh[axes], ignored_params=ignored)
    return report, data_group


def own_part(tensors, layout):
    coordinate = layout.data_coordinate(dist.get_rank())
    return [tensor.chunk(layout.data_size)[coordinate] for tensor in tensors]


def mean_over(value, group):
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value / dist.get_world_size(group)


def router_of(network):
    return network.blocks[0].moe.router


def expert_parity(
    text,
    routing="balanced",
    settings=None,
    *,
    steps=4,
    max_norm=0.05,
    accumulation=1,
    update=False,
    checkpointing=False,
):
    """Gradients, norms and clipped SGD steps of :mod:`networks`'s network against one process on the joined batch.

    Returns:
        The worst relative difference of each kind, which of this rank's experts were idle at each step, and which of
        their gradients were not zero then.
    """
    layout = ParallelLayout.parse(text).resolve(dist.get_world_size())
    reference, network = build(**settings or {}), build(**settings or {})
    if checkpointing:
        checkpoint_activations(network.blocks, "full")
    report, group = spread(network, layout, blocks=network.blocks)
    optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (reference, network)]
    outcome = {"loss": 0.0, "gradient": (0.0, ""), "norm": 0.0, "idle": [], "experts": report.experts}
    outcome["cut_inside"] = report.cut_inside
    for step in range(steps):
        for each in (reference, network):
            if not update:
                force_routing(each, routing, step)
        for part in range(accumulation):
            batch = batch_for(step * accumulation + part)
            expected = reference(*batch) / accumulation
            found = network(*own_part(batch, layout)) / accumulation
            for module in network.modules():
                if hasattr(module, "set_requires_gradient_sync"):
                    module.set_requires_gradient_sync(part == accumulation - 1, recurse=False)
            expected.backward()
            found.backward()
            outcome["loss"] = max(outcome["loss"], (mean_over(found, group) - expected).abs().item())
        outcome["gradient"] = max(outcome["gradient"], worst(gradients_of(reference), gradients_of(network)))
        first = network.blocks[0].moe.experts.down_proj.grad
        outcome["idle"].append(not whole(first)[list(report.experts["blocks.0.moe.experts"])].any().item())
        norms = [
            gradients.clip_grad_norm_(reference.parameters(), max_norm, holders=dist.get_world_size()),
            gradients.clip_grad_norm_(network.parameters(), max_norm),
        ]
        outcome["norm"] = max(outcome["norm"], (norms[1] / norms[0] - 1).abs().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if update:
            load = mean_over(router_of(network).load.double(), group) * layout.data_size
            assert torch.equal(load, router_of(reference).load.double())
            update_expert_biases(reference)
            update_expert_biases(network)
    outcome["weight"] = worst(weights_of(reference), weights_of(network))
    outcome["bias"], outcome["expected_bias"] = (router_of(each).expert_bias for each in (network, reference))
    return outcome


def gradient_ratios(text):
    """Sum of each parameter's gradient over that of one process, after one backward."""
    layout = ParallelLayout.parse(text).resolve(dist.get_world_size())
    reference, network = build(), build()
    spread(network, layout, blocks=network.blocks)
    reference(*batch_for(0)).backward()
    network(*own_part(batch_for(0), layout)).backward()
    expected, found = gradients_of(reference), gradients_of(network)
    return {name: (found[name].norm() / expected[name].norm()).item() for name in expected}


def norm_over_stages():
    """Four ranks: two hold a dense stage, two a stage with spread experts; clipping knows one norm.

    The stages train on their own losses: what is under test is the norm, not the pipeline.
    """
    layout = ParallelLayout.parse("pp=2,shard=2,ep=2").resolve(4)
    mesh, expert_mesh = layout.build_mesh("cpu"), build_expert_mesh(layout, "cpu")
    whole_stages = [build().blocks[0].dense, build().blocks[1]]
    stage_number = layout.coordinate(dist.get_rank())["pipeline"]
    stage = (build().blocks[0].dense, build().blocks[1])[stage_number]
    if stage_number:
        report = apply_expert_parallel(stage, find_experts(stage), expert_mesh)
        fully_shard(stage, mesh=mesh["shard"], ignored_params=set(report.whole_parameters))
    else:
        fully_shard(stage, mesh=mesh["shard"])
    x = batch_for(0)[0]
    for each in whole_stages:
        each(x).square().mean().backward()
    stage(own_part([x], layout)[0]).square().mean().backward()

    def norm(parts):
        return torch.stack([p.grad.norm() for part in parts for p in part.parameters()]).norm().item()

    outcome = {"expected": norm(whole_stages), "frozen_expected": norm(whole_stages[1:])}
    outcome["norm"] = gradients.gradient_norm(stage.parameters(), holders=2).item()
    trained = stage.parameters() if stage_number else []
    outcome["frozen_norm"] = gradients.gradient_norm(trained, holders=2).item()
    return outcome
