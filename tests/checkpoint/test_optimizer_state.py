"""Optimizer state and options follow parameter names, whatever stage, group or layout a parameter is in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dist import checkpoint
from lightning_dist.testing import WorkerPool

# Two stages of two layers; each layer has its own options, as learning rates by depth do.
LAYERS = ["0", "1", "2", "3"]
STAGES = {"pp=1": [LAYERS], "pp=2": [LAYERS[:2], LAYERS[2:]], "interleaved": [["0", "2"], ["1", "3"]]}


def build(layers: list[str], seed: int) -> nn.ModuleDict:
    modules = nn.ModuleDict()
    for name in LAYERS:
        torch.manual_seed(seed + int(name))
        layer = nn.Linear(3, 3).double()
        if name in layers:
            modules[name] = layer
    return modules


def groups_by_layer(model: nn.ModuleDict, factor: float = 1.0) -> list[dict[str, Any]]:
    """A group for each layer of the whole model; those of other stages are empty."""
    return [
        {
            "params": list(model[name].parameters()) if name in model else [],
            "lr": factor * 0.1 / (1 + int(name)),
            "weight_decay": factor * 0.01 * int(name),
            "betas": (0.9 - 0.1 * int(name) * factor, 0.99),
        }
        for name in LAYERS
    ]


def step(model: nn.ModuleDict, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Gradients that depend on the name alone, so that stages need not exchange anything."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    optimizer.step()


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def my_layers(layout: str) -> list[str]:
    return STAGES[layout][dist.get_rank() if dist.is_initialized() else 0]


def save_under(layout: str, directory: str) -> None:
    model = build(my_layers(layout), seed=1)
    optimizer = torch.optim.AdamW(groups_by_layer(model))
    step(model, optimizer, seed=10)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # as a scheduler does
    tensors = {
        "state_dict": model.state_dict(),
        "optimizer_0": checkpoint.optimizer_state_by_name(optimizer, names_of(model)),
    }
    checkpoint.save(
        directory, tensors, {"global_step": 1}, info={"parameter_order": [f"state_dict.{n}" for n in whole_names()]}
    )


def whole_names() -> list[str]:
    return list(build(LAYERS, seed=0).state_dict())


def load_under(layout: str, directory: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    model = build(my_layers(layout), seed=50)
    optimizer = torch.optim.AdamW(groups_by_layer(model, factor=0.0))
    names = names_of(model)
    tensors = {
        "state_dict": model.state_dict(),
        "optimizer_0": checkpoint.optimizer_state_to_fill(directory, "optimizer_0", optimizer, names),
    }
    checkpoint.load_into(directory, tensors)
    checkpoint.restore_optimizer(optimizer, names, tensors["optimizer_0"])
    step(model, optimizer, seed=20)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    return weights, [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    model = build(LAYERS, seed=1)
    optimizer = torch.optim.AdamW(groups_by_layer(model))
    step(model, optimizer, seed=10)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    step(model, optimizer, seed=20)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    return weights, [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("saved_as", STAGES)
def test_options_and_moments_follow_the_parameter_from_stage_to_stage(
    saved_as: str, uninterrupted: Any, tmp_path: Path, pool: WorkerPool
) -> None:
    """pytorch#126595 and #143828: the same keys on two stages, and groups that are empty on one."""
    directory = str(tmp_path / "one")
    pool.run(save_under, len(STAGES[saved_as]), saved_as, directory)
    weights, options = uninterrupted
    for loaded_as, stages in STAGES.items():
        found: dict[str, Any] = {}
        for stage_weights, stage_options in pool.run(load_under, len(stages), loaded_as, directory):
            found |= stage_weights
            assert stage_options == options, "an empty group has its options too"
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            assert torch.equal(found[name], value), f"{name} as {loaded_as}"


def test_the_single_file_is_what_one_device_would_have_saved(tmp_path: Path, pool: WorkerPool) -> None:
    pool.run(save_under, 2, "interleaved", str(tmp_path / "one"))
    checkpoint.consolidate(tmp_path / "one", tmp_path / "one.ckpt")
    loaded = torch.load(tmp_path / "one.ckpt", weights_only=True)
    model = build(LAYERS, seed=1)
    optimizer = torch.optim.AdamW(groups_by_layer(model))
    step(model, optimizer, seed=10)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    assert list(loaded["state_dict"]) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded["state_dict"].items())
    (saved,) = loaded["optimizer_states"]
    expected = optimizer.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert all(torch.equal(values[key], saved["state"][number][key]) for key in values)
    assert loaded["global_step"] == 1


def test_frozen_and_not_yet_stepped_parameters_have_no_state_and_need_none(tmp_path: Path) -> None:
    """A layer that is frozen after the save keeps nothing back, one that never had a gradient gets nothing."""
    model = build(LAYERS, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for name in ("0", "1"):
        for parameter in model[name].parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names = names_of(model)
    checkpoint.save(tmp_path / "one", {"optimizer_0": checkpoint.optimizer_state_by_name(optimizer, names)}, {})
    restored = torch.optim.AdamW(model.parameters(), lr=9.0)
    room = checkpoint.optimizer_state_to_fill(tmp_path / "one", "optimizer_0", restored, names)
    checkpoint.load_into(tmp_path / "one", {"optimizer_0": room})
    checkpoint.restore_optimizer(restored, names, room)
    assert {names[parameter].split(".")[0] for parameter in restored.state} == {"0", "1"}
    for parameter, values in optimizer.state.items():
        assert all(torch.equal(values[key], restored.state[parameter][key]) for key in values)


def test_what_the_optimizer_keeps_in_another_dtype_is_not_rounded(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["master"] = torch.tensor([1.0, 1.0001, 1e-9, 3.14159265])
    names = {parameter: "p"}
    checkpoint.save(tmp_path / "one", {"optimizer_0": checkpoint.optimizer_state_by_name(optimizer, names)}, {})
    restored = torch.optim.SGD([parameter], lr=0.2)
    room = checkpoint.optimizer_state_to_fill(tmp_path / "one", "optimizer_0", restored, names)
    checkpoint.load_into(tmp_path / "one", {"optimizer_0": room})
    checkpoint.restore_optimizer(restored, names, room)
    assert torch.equal(restored.state[parameter]["master"], optimizer.state[parameter]["master"])


def test_a_learning_rate_that_is_a_tensor_and_options_of_two_optimizers_stay_apart(tmp_path: Path) -> None:
    model = build(LAYERS, seed=1)
    names = names_of(model)
    first = torch.optim.Adam(model["0"].parameters(), lr=torch.tensor(0.25), amsgrad=True)
    second = torch.optim.SGD(model["3"].parameters(), lr=0.5, momentum=0.9)
    step(model, first, seed=1)
    step(model, second, seed=1)
    tensors = {
        f"optimizer_{i}": checkpoint.optimizer_state_by_name(optimizer, names)
        for i, optimizer in enumerate((first, second))
    }
    checkpoint.save(tmp_path / "one", tensors, {})
    again = [
        torch.optim.Adam(model["0"].parameters(), lr=torch.tensor(9.0)),
        torch.optim.SGD(model["3"].parameters(), lr=9.0),
    ]
    for i, (optimizer, original) in enumerate(zip(again, (first, second), strict=True)):
        room = checkpoint.optimizer_state_to_fill(tmp_path / "one", f"optimizer_{i}", optimizer, names)
        checkpoint.load_into(tmp_path / "one", {f"optimizer_{i}": room})
        checkpoint.restore_optimizer(optimizer, names, room)
        assert str(optimizer.state_dict()) == str(original.state_dict())


def test_parameters_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = build(["0", "1"], seed=1)
    groups = [{"params": model["0"].parameters(), "lr": 0.1}, {"params": model["1"].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    names = names_of(model)
    saved = checkpoint.optimizer_state_by_name(optimizer, names)
    with pytest.raises(ValueError, match=r"shape \(3, 3\) of the optimizer is not in the model"):
        checkpoint.optimizer_state_by_name(optimizer, {})
    joined = torch.optim.SGD(model.parameters(), lr=0.3)
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are in one group .* had different options"):
        checkpoint.restore_optimizer(joined, names, saved)
    other = build(["2"], seed=1)
    with pytest.raises(ValueError, match=r"parameter 2\.weight is in no group of the saved optimizer"):
        checkpoint.restore_optimizer(torch.optim.SGD(other.parameters(), lr=1.0), names_of(other), saved)
