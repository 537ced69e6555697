"""``nn.MultiheadAttention`` over ranks gives what torch's own gives, for each of its arguments."""

import pytest
import torch
from torch import nn

from lightning_dist import ParallelLayout
from lightning_dist.parallel.tensor import apply_tensor_parallel, sum_replicated_gradients
from tests.parallel.tensor.compare import gradients, worst_difference

CASES = {
    "self": {},
    "sequence first": {"module": {"batch_first": False}},
    "unbatched": {"batch": None},
    "no bias": {"module": {"bias": False}},
    "cross": {"keys": 7},
    "other widths": {"module": {"kdim": 6, "vdim": 10}, "keys": 7},
    "weights": {"call": {"need_weights": True}},
    "weights of each head": {"call": {"need_weights": True, "average_attn_weights": False}},
    "padding": {"padding": True},
    "causal": {"mask": "causal", "call": {"is_causal": True}},
    "causal and padding": {"mask": "causal", "padding": True},
    "mask of each head": {"mask": "heads", "call": {"need_weights": True}},
}


def attention_parity(name):
    case = CASES[name]
    torch.manual_seed(0)
    batch, length, width, heads = case.get("batch", 3), 5, 16, 4
    keys = case.get("keys", length)
    settings = {"batch_first": True, "dtype": torch.float64} | case.get("module", {})
    modules = []
    for _ in range(2):
        torch.manual_seed(1)
        modules.append(nn.MultiheadAttention(width, heads, **settings))
        for parameter in modules[-1].parameters():
            nn.init.normal_(parameter)
    mesh = ParallelLayout.parse("tp=2").resolve(2).build_mesh("cpu")
    apply_tensor_parallel(modules[1], mesh, {"": "attention"})

    def inputs(size, features):
        shape = (size, features) if batch is None else (batch, size, features)
        tensor = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(features + size))
        return tensor.transpose(0, 1).contiguous() if not settings["batch_first"] and batch else tensor

    query = inputs(length, width)
    if "keys" in case or "kdim" in settings:
        key, value = inputs(keys, settings.get("kdim", width)), inputs(keys, settings.get("vdim", width))
    else:
        key = value = query
    call = {"need_weights": False} | case.get("call", {})
    if case.get("padding"):
        call["key_padding_mask"] = torch.arange(keys).expand(batch, keys) >= torch.tensor([[keys], [3], [4]])
    if case.get("mask") == "causal":
        call["attn_mask"] = torch.ones(length, keys, dtype=torch.bool).triu(1)
    elif case.get("mask") == "heads":
        call["attn_mask"] = torch.randn(batch * heads, length, keys, dtype=torch.float64)
    results, entering = [], []
    for module in modules:
        own = [x.clone().requires_grad_() for x in (query, key, value)]
        if key is query:
            own = [own[0]] * 3
        output, weights = module(*own, **call)
        scale = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
        loss = (output * scale).sum()
        if weights is not None:
            loss = loss + (weights * torch.linspace(0, 1, weights.shape[-1], dtype=torch.float64)).sum()
        loss.backward()
        results.append((output.detach(), None if weights is None else weights.detach()))
        entering.append({str(index): x.grad for index, x in enumerate(own)})
    sum_replicated_gradients(modules[1].parameters())
    (expected, expected_weights), (output, weights) = results
    assert output.shape == expected.shape
    assert (weights is None) == (expected_weights is None)
    if weights is not None:
        assert weights.shape == expected_weights.shape
        assert (weights - expected_weights).abs().max() <= 1e-12
    assert (output - expected).abs().max() <= 1e-11
    inside = worst_difference(gradients(modules[0]), gradients(modules[1]))
    return max(inside, worst_difference(entering[0], entering[1]))


def all_cases(names):
    return {name: attention_parity(name) for name in names}


def test_every_argument(pool):
    for results in pool.run(all_cases, 2, list(CASES)):
        for name, (difference, where) in results.items():
            assert difference <= 1e-11, (name, where)


def evaluate():
    """Without gradients torch's layers would take a fast path that reads whole weights."""
    from tests.parallel.tensor.compare import plan_for
    from tests.parallel.tensor.models import batch_for, build, loss_of

    batch = batch_for("torch_encoder")
    reference, network = build("torch_encoder").eval(), build("torch_encoder").eval()
    network.encoder.use_nested_tensor = True
    mesh = ParallelLayout.parse("tp=2").resolve(2).build_mesh("cpu")
    apply_tensor_parallel(network, mesh, plan_for("torch_encoder", network))
    with torch.no_grad():
        return abs(loss_of(reference, batch).item() - loss_of(network, batch).item())


def test_evaluation_without_gradients(pool):
    assert max(pool.run(evaluate, 2)) <= 1e-12


def test_too_few_heads_are_refused():
    from lightning_dist.parallel.tensor.resolve import ResolvedPlan

    with pytest.raises(ValueError, match="its 2 heads do not divide by 4"):
        ResolvedPlan(nn.Sequential(nn.MultiheadAttention(8, 2)), {"0": "attention"}, 4)
