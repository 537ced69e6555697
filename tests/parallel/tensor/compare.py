"""Runs one network on one process and spread over a mesh, and compares losses, gradients and weights."""

import torch
from torch.distributed.tensor import DTensor

from lightning_dist import ParallelLayout
from lightning_dist.parallel.tensor import apply_tensor_parallel, check_replicas, sum_replicated_gradients
from lightning_dist.plan.huggingface import find_tensor_plan
from tests.parallel.tensor.models import HAND_WRITTEN_PLAN, batch_for, build, loss_of


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst_difference(reference, found):
    """The largest difference of any tensor, relative to that tensor's largest element, and its name.

    Gradients that are zero but for rounding (the bias of an attention key) are measured against the others.
    """
    worst, where = 0.0, ""
    largest = max(value.abs().max().item() for value in reference.values() if value is not None)
    assert found.keys() == reference.keys()
    for name, expected in reference.items():
        if expected is None:
            continue
        assert found[name] is not None, f"{name} has no gradient"
        assert found[name].shape == expected.shape, name
        scale = max(expected.abs().max().item(), 1e-6 * largest)
        difference = (found[name] - expected).abs().max().item() / scale
        if not difference <= worst:
            worst, where = difference, name
    return worst, where


def gradients(network):
    return {name: None if p.grad is None else whole(p.grad) for name, p in network.named_parameters()}


def weights(network):
    return {name: whole(p).detach() for name, p in network.named_parameters()}


def accumulate(network, batch, parts):
    """One backward for each part of the batch, each loss divided by their number; the sum of the losses."""
    total = 0.0
    for part in zip(*(tensor.chunk(parts) for tensor in batch.values()), strict=True):
        loss = loss_of(network, dict(zip(batch, part, strict=True))) / parts
        loss.backward()
        total += float(whole(loss))
    return total


def plan_for(kind, network, sequence_parallel=False):
    if kind == "hand_written":
        plan = dict(HAND_WRITTEN_PLAN)
        if network.blocks[0].attention.fused:
            plan = {name: style for name, style in plan.items() if ".attention." not in name}
            plan |= {"blocks.*.attention.qkv": "colwise", "blocks.*.attention.o": "rowwise"}
        return plan
    return find_tensor_plan(network, sequence_parallel=sequence_parallel)


def tensor_parity(kind, settings=None, *, accumulation=1, steps=2, sequence_parallel=False, changes=None, length=12):
    """Gradients of the first step and weights after some SGD steps, against one process.

    Returns:
        The loss's difference, worst gradient and weight differences with their names, and the report.
    """
    settings = settings or {}
    mesh = (
        ParallelLayout.parse(f"tp={torch.distributed.get_world_size()}")
        .resolve(torch.distributed.get_world_size())
        .build_mesh("cpu")
    )
    batch = batch_for(kind, vocabulary=settings["vocab_size"]) if "vocab_size" in settings else batch_for(kind)
    reference, network = build(kind, **settings), build(kind, **settings)
    plan = plan_for(kind, network, sequence_parallel) | (changes or {})
    report = apply_tensor_parallel(network, mesh, plan)
    expected_start = weights(reference)
    assert all(torch.equal(expected_start[name], value) for name, value in weights(network).items())

    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (reference, network)]
    outcome = {}
    for step in range(steps):
        expected = accumulate(reference, batch, accumulation)
        found = accumulate(network, batch, accumulation)
        sum_replicated_gradients(network.parameters())
        if step == 0:
            outcome["loss"] = abs(found - expected)
            outcome["gradient"], outcome["gradient_of"] = worst_difference(gradients(reference), gradients(network))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    outcome["weight"], outcome["weight_of"] = worst_difference(weights(reference), weights(network))
    check_replicas(network, mesh)
    outcome["report"] = report
    return outcome
