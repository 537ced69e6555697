"""Sharded optimizers step like the plain ones, whatever their class, and give and take the plain one's state."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dist.parallel.gradients import gradient_norm
from lightning_dist.parallel.optimizer_shards import gather_state, local_part, refuse_unsuited, scatter_state

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
}


class OwnRule(torch.optim.SGD):
    """An optimizer whose constructor can't be called with its defaults."""

    def __init__(self, params, *, strength: float) -> None:
        super().__init__(params, lr=0.1)
        self.strength = strength

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["total"] = self.state[parameter].get("total", 0) + parameter.grad
                parameter -= group["lr"] * self.strength * self.state[parameter]["total"]


def network(tensors: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.ParameterList([torch.randn(3 + i, 4, dtype=torch.float64) for i in range(tensors)])


def plain(module, kind, kwargs):
    parameters = list(module.parameters())
    half = len(parameters) // 2
    return kind([{"params": parameters[:half], "lr": 0.03}, {"params": parameters[half:]}], **kwargs)


def give_gradients(module, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def shard(optimizer, way):
    if way == "fairscale":
        from lightning_dist.parallel.fairscale_adapter import ShardedOptimizer as kind
    else:
        from lightning_dist.parallel.zero_redundancy import ZeroRedundancy as kind
    return kind(optimizer)


def run_steps(way, kind, kwargs, tensors):
    """Three steps, through a file in the middle: sharded, and plain from the same state."""
    ours, theirs = network(tensors), network(tensors)
    reference = plain(theirs, kind, kwargs)
    optimizer = shard(plain(ours, kind, kwargs), way)
    for step in range(2):
        for module, stepping in ((ours, optimizer), (theirs, reference)):
            give_gradients(module, step)
            stepping.step()
    whole = gather_state(optimizer, dist.group.WORLD)
    if dist.get_rank() == 0:
        torch.testing.assert_close(whole, reference.state_dict(), rtol=1e-9, atol=1e-15)
        assert list(whole["state"]) == list(reference.state_dict()["state"])
    else:
        assert whole == {}
    fresh = network(tensors)
    fresh.load_state_dict(theirs.state_dict())
    resumed = shard(plain(fresh, kind, {**kwargs, "lr": 7.0} if "lr" in kwargs else kwargs), way)
    scatter_state(resumed, copy.deepcopy(reference.state_dict()) if dist.get_rank() == 0 else None, dist.group.WORLD)
    for module, stepping in ((ours, optimizer), (theirs, reference), (fresh, resumed)):
        give_gradients(module, 2)
        stepping.step()
    held = sum(parameter.numel() for group in optimizer.optim.param_groups for parameter in group["params"])
    difference = max(
        float((a - b).abs().max())
        for module in (ours, fresh)
        for a, b in zip(module.parameters(), theirs.parameters(), strict=True)
    )
    return difference, held, len(optimizer.optim.state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_steps_saves_and_loads_as_the_plain_one(pool, name):
    results = pool.run(run_steps, 2, "fairscale", *OPTIMIZERS[name], 6)
    assert max(difference for difference, _, _ in results) < 1e-12
    assert [state for _, _, state in results] == [3, 3]
    assert sum(held for _, held, _ in results) == sum(p.numel() for p in network().parameters())


@pytest.mark.parametrize("way", ["fairscale", "zero"])
def test_an_optimizer_with_a_constructor_of_its_own(pool, way):
    results = pool.run(run_steps, 2, way, OwnRule, {"strength": 0.5}, 6)
    assert max(difference for difference, _, _ in results) < 1e-12


@pytest.mark.parametrize("way", ["fairscale", "zero"])
def test_ranks_without_any_parameter_take_part(pool, way):
    """Two tensors on three ranks."""
    results = pool.run(run_steps, 3, way, *OPTIMIZERS["adamw"], 2)
    assert max(difference for difference, _, _ in results) < 1e-12
    assert sorted(state for _, _, state in results) == [0, 1, 1]


def norm_of_parts():
    module = network(2)
    give_gradients(module, 0)
    expected = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
    for place, parameter in enumerate(module.parameters()):
        if place != dist.get_rank():
            parameter.grad = None
    return float(gradient_norm(module.parameters(), holders=1) / expected)


def test_norm_counts_each_gradient_once_where_one_rank_has_none(pool):
    assert pool.run(norm_of_parts, 3) == pytest.approx([1.0] * 3, rel=1e-12)


def shard_twice():
    """A module that keeps one optimizer for two fits."""
    ours, theirs = network(), network()
    reference, kept = (plain(module, *OPTIMIZERS["sgd"]) for module in (theirs, ours))
    for fit in range(2):
        sharded = shard(kept, "fairscale")
        for step in range(2):
            for module, stepping in ((ours, sharded), (theirs, reference)):
                give_gradients(module, 2 * fit + step)
                stepping.step()
    return max(float((a - b).abs().max()) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_an_optimizer_can_be_sharded_again_and_keeps_its_momentum(pool):
    assert max(pool.run(shard_twice, 2)) < 1e-12


def schedule_in_closure(way):
    """A learning rate set by the closure counts in its own step, and stays."""
    module = network()
    sharded = shard(torch.optim.SGD(module.parameters(), lr=1.0), way)
    before = [parameter.detach().clone() for parameter in module.parameters()]

    def closure():
        give_gradients(module, 0)
        sharded.param_groups[0]["lr"] = 0.25
        return 3.0

    assert sharded.step(closure) == 3.0
    moved = [(b - p) / p.grad for b, p in zip(before, module.parameters(), strict=True)]
    return float(torch.cat([m.flatten() for m in moved]).mean()), sharded.param_groups[0]["lr"]


@pytest.mark.parametrize("way", ["fairscale", "zero"])
def test_options_set_in_the_closure_count(pool, way):
    for moved, rate in pool.run(schedule_in_closure, 2, way):
        assert moved == pytest.approx(0.25, rel=1e-9)
        assert rate == 0.25


def load_other_groups():
    sharded = shard(plain(network(), *OPTIMIZERS["sgd"]), "fairscale")
    other = torch.optim.SGD(network().parameters(), 0.1).state_dict()
    scatter_state(sharded, other if dist.get_rank() == 0 else None, dist.group.WORLD)


def test_state_of_other_groups_is_refused_on_all_ranks(pool):
    with pytest.raises(Exception, match=r"parameter groups of \[6\] tensors, this one of \[3, 3\]") as caught:
        pool.run(load_other_groups, 2)
    assert {failure.rank for failure in caught.value.failures} == {0, 1}


def test_local_part_leaves_the_optimizer_whole():
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    part = local_part(optimizer, [{**optimizer.param_groups[0], "params": [module[0]]}])
    give_gradients(module, 0)
    before = [parameter.detach().clone() for parameter in module]
    part.step()
    changed = [not torch.equal(b, p) for b, p in zip(before, module, strict=True)]
    assert changed == [True] + [False] * 5
    assert len(optimizer.param_groups[0]["params"]) == 6


def test_what_cannot_be_sharded_is_named():
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).double()})
    with pytest.raises(ValueError, match=r"SGD has parameters of torch\.float32, torch\.float64 on cpu"):
        refuse_unsuited(module, [torch.optim.SGD(module.parameters(), 0.1)])
    module["b"].requires_grad_(False)  # What is frozen shares no buffer.
    refuse_unsuited(module, [torch.optim.SGD(module.parameters(), 0.1)])
    two = [torch.optim.SGD(module["a"].parameters(), 0.1), torch.optim.SGD([module["a"].bias], 0.1)]
    with pytest.raises(ValueError, match=r"a\.bias: a parameter that is in two optimizers"):
        refuse_unsuited(module, two)
    with pytest.raises(ValueError, match="LBFGS works on all parameters at once"):
        refuse_unsuited(module, [torch.optim.LBFGS(module["a"].parameters())])
    module["table"] = nn.Embedding(2, 2, sparse=True)
    with pytest.raises(ValueError, match="table: sparse gradients can't be sharded"):
        refuse_unsuited(module, two[:1])
