"""AdaScale's gain, against fairscale's where that is right, and its life as an optimizer."""

import gc
import io

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.parallel.adascale import AdaScale, ScaleInvariantSchedule


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def groups(module):
    return [{"params": list(module[0].parameters())}, {"params": list(module[2].parameters()), "lr": 0.02}]


def batch(number):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def loss(module, number):
    return (module(batch(number)) - 1).square().mean()


def train_both(accumulate):
    """Ours and fairscale's, side by side under DDP: the gains of both and the weights' largest difference."""
    import torch.distributed as dist
    from fairscale.optim import AdaScale as Fairscales

    ours, theirs = network(), network()
    mine = AdaScale(
        torch.optim.SGD(groups(ours), lr=0.05, momentum=0.9), smoothing=0.7, num_gradients_to_accumulate=accumulate
    )
    other = Fairscales(
        torch.optim.SGD(groups(theirs), lr=0.05, momentum=0.9), smoothing=0.7, num_gradients_to_accumulate=accumulate
    )
    gains = []
    wrapped = [DistributedDataParallel(ours), DistributedDataParallel(theirs)]
    for step in range(4):
        for optimizer, module in zip((mine, other), wrapped, strict=True):
            optimizer.zero_grad()
            for place in range(accumulate):
                number = (step * accumulate + place) * 2 + dist.get_rank()
                if place < accumulate - 1:
                    with module.no_sync():
                        (loss(module, number) / accumulate).backward()
                else:
                    (loss(module, number) / accumulate).backward()
            optimizer.step()
        gains.append([[float(optimizer.gain(g)) for g in (None, 0, 1)] for optimizer in (mine, other)])
    difference = max(float((a - b).abs().max()) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    return gains, difference, mine.scale_invariant_steps


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gain_is_fairscales_under_ddp(pool, accumulate):
    """Fairscale sums squares in float32."""
    for gains, difference, steps in pool.run(train_both, 2, accumulate):
        for mine, theirs in gains:
            assert mine == pytest.approx(theirs, rel=1e-5)
            assert 1.0 < mine[0] <= 2 * accumulate
        assert difference < 1e-6
        assert steps == pytest.approx(sum(mine[0] for mine, _ in gains), rel=1e-12)


def accumulated(module, optimizer, numbers):
    optimizer.zero_grad()
    for number in numbers:
        (loss(module, number) / len(numbers)).backward()
    optimizer.step()


def test_accumulation_alone_gives_gradients_to_compare():
    module = network()
    optimizer = AdaScale(torch.optim.SGD(module.parameters(), 0.05), smoothing=0.0, num_gradients_to_accumulate=2)
    singles = [torch.autograd.grad(loss(module, number), list(module.parameters())) for number in range(2)]
    first, second = (torch.cat([g.flatten() for g in single]) for single in singles)
    mean = (first + second) / 2
    spread = float((first - second).square().sum() / 2)
    square = max(float(mean.square().sum()) - spread / 2, 0.0)
    before = torch.cat([p.detach().flatten() for p in module.parameters()])
    accumulated(module, optimizer, range(2))
    gain = (spread + square) / (spread / 2 + square)
    assert optimizer.gain() == pytest.approx(gain, rel=1e-12)
    after = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(before - after, 0.05 * gain * mean, rtol=1e-9, atol=1e-15)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_parameter_that_thaws_is_measured():
    frozen, whole = network(), network()
    frozen[0].requires_grad_(False)
    optimizers = []
    for module in (frozen, whole):
        optimizer = AdaScale(torch.optim.SGD(module.parameters(), 0.05), smoothing=0.0, num_gradients_to_accumulate=2)
        assert module[0].weight.requires_grad is (module is whole)
        module.requires_grad_(True)
        accumulated(module, optimizer, range(2))
        optimizers.append(optimizer)
    assert optimizers[0].gain() == optimizers[1].gain() > 1


def test_a_parameter_without_a_gradient_is_passed_over():
    module = network()
    unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = AdaScale(torch.optim.SGD([*module.parameters(), unused], 0.05), num_gradients_to_accumulate=2)
    accumulated(module, optimizer, range(2))
    assert 1 < optimizer.gain() <= 2


def test_a_skipped_step_leaves_no_trace():
    """A loss scaler skips ``step`` after an overflow; the next window begins with ``zero_grad``."""
    gains = []
    for skip in (False, True):
        module = network()
        optimizer = AdaScale(torch.optim.SGD(module.parameters(), 0.05), num_gradients_to_accumulate=2)
        if skip:
            optimizer.zero_grad()
            (loss(module, 9) * torch.inf).backward()
        accumulated(module, optimizer, range(2))
        gains.append(optimizer.gain())
    assert gains[0] == gains[1] > 1


def test_a_single_gradient_is_plain_sgd_or_refused():
    module = network()
    optimizer = AdaScale(torch.optim.SGD(module.parameters(), 0.05))
    accumulated(module, optimizer, [0])
    assert optimizer.gain() == 1.0
    with pytest.raises(ValueError, match=r"scale=8 does not fit 1 gradient\(s\)"):
        AdaScale(torch.optim.SGD(module.parameters(), 0.05), scale=8)
    with pytest.raises(ValueError, match="smoothing=1 does not fit"):
        AdaScale(torch.optim.SGD(module.parameters(), 0.05), smoothing=1)


def test_hooks_outlive_lightnings_wrapper_and_end_with_adascale():
    module = network()
    optimizer = AdaScale(torch.optim.SGD(module.parameters(), 0.05), num_gradients_to_accumulate=2)
    wrapper = LightningOptimizer(optimizer)
    assert isinstance(wrapper, AdaScale)
    assert wrapper.gain() == 1.0
    wrapper.zero_grad()
    del wrapper
    gc.collect()
    assert all(len(parameter._backward_hooks) == 1 for parameter in module.parameters())
    accumulated(module, optimizer, range(2))
    assert optimizer.gain() > 1
    del optimizer
    gc.collect()
    assert not any(parameter._backward_hooks for parameter in module.parameters())


def test_state_is_read_with_weights_only_and_by_the_plain_optimizer():
    module = network()
    optimizer = AdaScale(torch.optim.SGD(module.parameters(), 0.05, momentum=0.9), num_gradients_to_accumulate=2)
    accumulated(module, optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again = AdaScale(torch.optim.SGD(module.parameters(), 7.0, momentum=0.9), num_gradients_to_accumulate=2)
    again.load_state_dict(state)
    assert (again.gain(), again.scale_invariant_steps) == (optimizer.gain(), optimizer.scale_invariant_steps)
    assert again.param_groups[0]["lr"] == 0.05
    bare = torch.optim.SGD(module.parameters(), 7.0, momentum=0.9)
    bare.load_state_dict(state)
    assert torch.equal(
        bare.state[module[0].weight]["momentum_buffer"], again.state[module[0].weight]["momentum_buffer"]
    )
    again.load_state_dict(bare.state_dict())
    assert again.gain() == 1.0
    more = AdaScale(torch.optim.SGD(groups(module), 0.1), num_gradients_to_accumulate=2)
    with pytest.raises(ValueError, match="saved AdaScale has 1 parameter groups, this one 2"):
        more.load_estimates(state["adascale"])


def test_schedule_counts_steps_of_the_small_batch():
    module = network()
    optimizer = AdaScale(torch.optim.SGD(module.parameters(), 0.05), num_gradients_to_accumulate=2)
    schedule = ScaleInvariantSchedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), optimizer)
    for step in range(12):
        accumulated(module, optimizer, range(2 * step, 2 * step + 2))
        schedule.step()
        worth = int(optimizer.scale_invariant_steps)
        assert schedule.get_last_lr() == pytest.approx([0.05 * 0.9**worth])
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**worth)
    assert worth > 12
    other = ScaleInvariantSchedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), optimizer)
    other.load_state_dict(schedule.state_dict())
    other.step()
    assert other.get_last_lr() == schedule.get_last_lr()
