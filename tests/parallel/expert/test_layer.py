"""The layer on one device, against loops written out token by token."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lightning_dist.parallel.activation import checkpoint_activations
from lightning_dist.parallel.expert import (
    MixtureOfExperts,
    TopKRouter,
    attach_loss,
    auxiliary_loss,
    experts,
    load_balancing_loss,
    update_expert_biases,
    z_loss,
)
from lightning_dist.parallel.expert.capacity import drop_beyond_capacity

HIDDEN = 8


def layer_for(**settings):
    torch.manual_seed(0)
    return MixtureOfExperts(
        **{"hidden_size": HIDDEN, "expert_size": 6, "num_experts": 4, "top_k": 2} | settings
    ).double()


def tokens(count=12, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=generator, dtype=dtype)


def written_out(layer, x, score, normalise, scale):
    """What the layer should give, one token and one expert at a time."""
    weights = dict(layer.named_parameters())
    rows = []
    for token in x:
        logits = weights["router.weight"] @ token
        scores = torch.exp(logits) / torch.exp(logits).sum() if score == "softmax" else 1 / (1 + torch.exp(-logits))
        chosen = sorted(range(4), key=lambda e, s=scores: -s[e].item())[:2]
        total = sum(scores[e] for e in chosen) if normalise else 1.0
        row = torch.zeros_like(token)
        for e in chosen:
            gate = weights["experts.gate_proj"][e] @ token
            inner = gate / (1 + torch.exp(-gate)) * (weights["experts.up_proj"][e] @ token)
            row = row + scale * scores[e] / total * (weights["experts.down_proj"][e] @ inner)
        if layer.shared is not None:
            gate = weights["shared.gate_proj.weight"] @ token
            inner = gate / (1 + torch.exp(-gate)) * (weights["shared.up_proj.weight"] @ token)
            row = row + weights["shared.down_proj.weight"] @ inner
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("score", "normalise", "scale", "shared_size"),
    [("softmax", True, 1.0, 0), ("softmax", False, 1.0, 5), ("sigmoid", True, 2.5, 0), ("sigmoid", False, 1.0, 5)],
)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(score, normalise, scale, shared_size):
    layer = layer_for(score=score, normalise=normalise, scale=scale, shared_size=shared_size)
    x = tokens().requires_grad_()
    expected = written_out(layer, x, score, normalise, scale)
    expected_gradients = torch.autograd.grad(expected.square().mean(), [x, *layer.parameters()])
    found = layer(x.view(3, 4, HIDDEN))
    gradients = torch.autograd.grad(found.square().mean(), [x, *layer.parameters()])
    torch.testing.assert_close(found.view(12, HIDDEN), expected, rtol=1e-12, atol=1e-14)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("rows", [0, 1])
def test_experts_without_tokens_have_zero_gradients(rows):
    layer = layer_for(top_k=1)
    layer(tokens(rows)).sum().backward()
    for parameter in layer.experts.parameters():
        assert parameter.grad is not None
        assert int((parameter.grad != 0).flatten(1).any(1).sum()) == rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_give_what_the_loop_gives(monkeypatch, dtype):
    """torch has a grouped product on CPU too, slower than the loop; on it the CUDA path is checked here."""
    layer = layer_for(expert_size=16, num_experts=5).to(dtype)
    x = tokens(40, dtype)
    outcomes = []
    for grouped in (False, True):
        monkeypatch.setattr(experts, "has_grouped_product", lambda _rows, grouped=grouped: grouped)
        layer.zero_grad()
        output = layer(x)
        output.float().square().mean().backward()
        outcomes.append([output, *(parameter.grad for parameter in layer.parameters())])
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for loop, group in zip(*outcomes, strict=True):
        assert (loop - group).abs().max() <= bound * loop.abs().max()


def test_capacity_serves_first_choices_and_earlier_tokens_first():
    chosen = torch.tensor([[0, 1], [0, 1], [0, 2], [1, 0]])
    kept = drop_beyond_capacity(chosen, num_experts=4, factor=1.0, group=None)  # 2 choices for each expert
    # Expert 0 takes the first two of three first choices; expert 1 the one first choice and one second choice.
    assert kept.tolist() == [[0, 1], [0, 4], [4, 2], [1, 4]]


def test_dropped_choices_count_zero():
    full, limited = layer_for(), layer_for(capacity_factor=0.5)
    x = tokens()
    routing = full.router(x)
    kept = drop_beyond_capacity(routing.chosen, 4, 0.5, None)
    assert 0 < int((kept == 4).sum()) < kept.numel()
    expected = torch.zeros_like(x)
    for token in range(len(x)):
        for choice in range(2):
            expert = kept[token, choice].item()
            if expert < 4:
                alone = full.experts(x[token : token + 1], torch.tensor([[expert]]), torch.ones(1, 1))
                expected[token] += routing.weights[token, choice] * alone[0]
    torch.testing.assert_close(limited(x), expected, rtol=1e-12, atol=1e-14)


def test_balancing_loss_is_hugging_faces():
    torch.manual_seed(0)
    logits = torch.randn(20, 4)
    chosen = logits.topk(2).indices
    expected = load_balancing_loss_func((logits,), num_experts=4, top_k=2)
    torch.testing.assert_close(load_balancing_loss(logits.softmax(-1), chosen, None), expected)
    even = torch.arange(20) % 4
    torch.testing.assert_close(
        load_balancing_loss(torch.full((20, 4), 0.25), torch.stack([even, (even + 1) % 4], 1), None), torch.tensor(2.0)
    )


def test_z_loss_is_the_mean_square_of_the_logarithm_of_the_sum():
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    assert z_loss(logits).item() == pytest.approx((math.log(2) ** 2 + math.log(4) ** 2) / 2)
    assert z_loss(logits[:0]).item() == 0


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_auxiliary_losses_are_collected_once(checkpointing):
    network = torch.nn.Sequential(layer_for(balance_coefficient=0.1), layer_for(z_coefficient=0.01))
    reference = copy.deepcopy(network)
    checkpoint_activations(network, checkpointing)
    x = tokens()
    routing, second = reference[0].router(x), reference[1].router(reference[0](x))
    auxiliary_loss(reference)
    expected = 0.1 * load_balancing_loss(routing.scores, routing.chosen, None) + 0.01 * z_loss(second.logits)
    total = network(x).square().mean()
    found = auxiliary_loss(network)
    torch.testing.assert_close(found, expected)
    (total + found).backward()
    (reference(x).square().mean() + auxiliary_loss(reference)).backward()
    for one, other in zip(network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)
    assert auxiliary_loss(network).item() == 0  # nothing is left, from the recomputation either
    network.eval()(x)
    assert auxiliary_loss(network).item() == 0


def test_a_layer_can_be_copied_while_its_loss_waits():
    layer = layer_for(balance_coefficient=0.1)
    layer(tokens())
    twin = copy.deepcopy(layer)
    assert auxiliary_loss(twin).item() == 0 < auxiliary_loss(layer).item()


def test_losses_that_are_never_collected_are_an_error():
    layer = layer_for(balance_coefficient=0.1)
    with pytest.raises(RuntimeError, match="add auxiliary_loss"):
        for _ in range(300):
            layer(tokens(1))


def test_an_attached_loss_has_the_gradient_of_an_added_one():
    layer = layer_for(balance_coefficient=0.1)
    parameters = list(layer.parameters())
    added = layer(tokens()).square().mean() + auxiliary_loss(layer)
    expected = torch.autograd.grad(3.0 * added, parameters)
    output = layer(tokens())
    output = attach_loss(output, auxiliary_loss(layer), scale=3.0)
    found = torch.autograd.grad(3.0 * output.square().mean(), parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_biases_rise_where_load_is_low_and_change_the_choice_only():
    router = TopKRouter(2, num_experts=2, top_k=1, bias_update_rate=0.5)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[0.6, 0.0], [0.0, 0.0]]))
    x = torch.tensor([[1.0, 0.0]] * 4)
    before = router(x)
    assert before.chosen.flatten().tolist() == [0] * 4
    update_expert_biases(router)
    assert router.expert_bias.tolist() == [-0.5, 0.5]
    after = router(x)
    assert after.chosen.flatten().tolist() == [1] * 4
    torch.testing.assert_close(after.scores, before.scores)
    router.eval()(x)
    assert router.load.tolist() == [0, 4]  # evaluation does not count


def test_biases_and_counts_survive_a_lower_precision():
    router = TopKRouter(4, num_experts=4, top_k=1, bias_update_rate=0.001).bfloat16()
    assert router.expert_bias.dtype == torch.float32
    router.load.fill_(2**20 + 1)
    assert router.bfloat16().load.tolist() == [2**20 + 1] * 4
    assert "load" not in router.state_dict()


def test_a_bf16_router_computes_in_float32_under_autocast():
    router = TopKRouter(HIDDEN, num_experts=4, top_k=2)
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(tokens(dtype=torch.bfloat16))
    assert routing.logits.dtype == torch.float32
    torch.testing.assert_close(routing.logits, F.linear(tokens(dtype=torch.bfloat16).float(), router.weight))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 5}, "top_k=5"),
        ({"score": "tanh"}, "score='tanh'"),
        ({"activation": "swish"}, "activation='swish'"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
        ({"bias_update_rate": -1.0}, "bias_update_rate=-1.0"),
    ],
)
def test_what_does_not_fit_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        layer_for(**settings)
