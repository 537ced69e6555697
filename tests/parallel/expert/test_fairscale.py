"""fairscale's MOELayer with its Top2Gate gives what our layer gives, where both keep a token."""

import torch
from torch import nn

from lightning_dist.parallel.expert import MixtureOfExperts, load_balancing_loss
from lightning_dist.parallel.expert.capacity import drop_beyond_capacity

WIDTH = 8


class OneExpert(nn.Module):
    """One of our experts as a module of its own."""

    def __init__(self, experts, index):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Parameter(weights[index].detach().clone()) for weights in experts.parameters()
        )

    def forward(self, x):
        return (nn.functional.silu(x @ self.gate.T) * (x @ self.up.T)) @ self.down.T


def both_layers(num_experts):
    """Outputs, dropped choices, balancing losses and gradients of both layers on the same tokens and weights."""
    from fairscale.nn.moe import top2gate
    from fairscale.nn.moe.moe_layer import MOELayer

    top2gate.gumbel_rsample = lambda shape, device: torch.zeros(shape, device=device)  # its noise has no switch
    torch.manual_seed(0)
    ours = MixtureOfExperts(WIDTH, 6, num_experts, 2, capacity_factor=1.0)
    gate = top2gate.Top2Gate(WIDTH, num_experts)
    with torch.no_grad():
        gate.wg.weight.copy_(ours.router.weight)
    theirs = MOELayer(gate, nn.ModuleList(OneExpert(ours.experts, index) for index in range(num_experts)))
    x = torch.randn(4, 8, WIDTH)
    target = torch.randn(4, 8, WIDTH)
    outputs = [layer(x) for layer in (ours, theirs)]
    for output in outputs:
        (output * target).mean().backward()
    routing = ours.router(x.view(-1, WIDTH))
    kept = drop_beyond_capacity(routing.chosen, num_experts, 1.0, None)
    gradients = [ours.router.weight.grad, *(p.grad for p in ours.experts.parameters())]
    their_experts = zip(*(expert.parameters() for expert in theirs.experts), strict=True)
    their_gradients = [gate.wg.weight.grad, *(torch.stack([p.grad for p in same]) for same in their_experts)]
    # Their loss counts first choices only and is a mean over experts of f * P.
    loss = load_balancing_loss(routing.scores, routing.chosen[:, :1], None) / num_experts**2
    return {
        "outputs": [output.detach().view(-1, WIDTH) for output in outputs],
        "kept": kept < num_experts,
        "gradients": (gradients, their_gradients),
        "losses": (loss.item(), theirs.l_aux.item()),
    }


def test_without_drops_outputs_and_gradients_are_equal(pool):
    (found,) = pool.run(both_layers, 1, 2)
    assert found["kept"].all()
    torch.testing.assert_close(*found["outputs"], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(*found["gradients"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_same_tokens_are_dropped(pool):
    """fairscale divides by the weights that are left after drops, ours by those before: they differ where one of a
    token's two choices was dropped, and only there."""
    (found,) = pool.run(both_layers, 1, 4)
    whole, none = found["kept"].all(1), ~found["kept"].any(1)
    assert 0 < whole.sum() < 32
    ours, theirs = found["outputs"]
    torch.testing.assert_close(ours[whole], theirs[whole], rtol=1e-5, atol=1e-6)
    assert not ours[none].any() and not theirs[none].any()
    partly = ~whole & ~none
    assert ((ours - theirs)[partly].abs().amax(1) > 1e-6).all()
    assert abs(found["losses"][0] - found["losses"][1]) < 1e-6
