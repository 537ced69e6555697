"""What is saved under one layout is there, to the bit, under any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_dist import checkpoint
from lightning_dist.testing import WorkerPool

LAYOUTS = {"one": 1, "replicas": 2, "shard2": 2, "shard4": 4, "hsdp": 4, "tensor2": 2, "shard_and_tensor": 4}


def build_model(seed: int) -> torch.nn.Module:
    """Rows of 5 and 2 do not divide among 4 ranks: some own less than others, some nothing."""
    torch.manual_seed(seed)
    layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5), torch.nn.Linear(5, 2)
    return torch.nn.Sequential(*layers).double()


def apply_layout(model: torch.nn.Module, layout: str) -> None:
    if layout in ("one", "replicas"):
        return
    if layout.startswith("shard") and layout != "shard_and_tensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    elif layout == "tensor2":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    if "tensor" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if layout != "tensor2":
        data_mesh = mesh["shard"] if layout == "shard_and_tensor" else mesh
        for index in (0, 2, 3):
            fully_shard(model[index], mesh=data_mesh)  # type: ignore[index]
        fully_shard(model, mesh=data_mesh)


def names_of(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def optimizer_of(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    """The same batch on every rank, so that data-parallel gradients are those of one process."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = {f"model.{name}": full(value) for name, value in model.state_dict().items()}
    for name, values in checkpoint.optimizer_state_by_name(optimizer, names_of(model))["state"].items():
        state |= {f"{name}.{key}": full(value) for key, value in values.items()}
    return state


def save_under(layout: str, directory: str) -> dict[str, Any]:
    model = build_model(seed=1)
    apply_layout(model, layout)
    optimizer = optimizer_of(model, lr=0.01)
    train(model, optimizer, steps=2, seed=5)
    tensors = {
        "state_dict": model.state_dict(),
        "optimizer_0": checkpoint.optimizer_state_by_name(optimizer, names_of(model)),
    }
    rank = dist.get_rank() if dist.is_initialized() else 0
    checkpoint.save(directory, tensors, {"global_step": 2}, rank_state={"rank": rank})
    return whole_state(model, optimizer)


def load_under(layout: str, directory: str) -> tuple[dict[str, Any], float]:
    model = build_model(seed=99)
    apply_layout(model, layout)
    optimizer = optimizer_of(model, lr=7.0)
    names = names_of(model)
    tensors = {
        "state_dict": model.state_dict(),
        "optimizer_0": checkpoint.optimizer_state_to_fill(directory, "optimizer_0", optimizer, names),
    }
    checkpoint.load_into(directory, tensors)
    model.load_state_dict(tensors["state_dict"])
    checkpoint.restore_optimizer(optimizer, names, tensors["optimizer_0"])
    loaded = whole_state(model, optimizer)
    train(model, optimizer, steps=2, seed=6)
    return {"loaded": loaded, "continued": whole_state(model, optimizer)}, optimizer.param_groups[0]["lr"]


def save_all(folder: str) -> dict[str, Any]:
    return {name: save_under(name, f"{folder}/{name}") for name in layouts_of(dist.get_world_size())}


def load_all(folder: str) -> dict[tuple[str, str], Any]:
    return {
        (saved_as, loaded_as): load_under(loaded_as, f"{folder}/{saved_as}")
        for loaded_as in layouts_of(dist.get_world_size())
        for saved_as in LAYOUTS
    }


def layouts_of(world_size: int) -> list[str]:
    return [name for name, size in LAYOUTS.items() if size == world_size]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, pool: WorkerPool) -> tuple[str, dict[str, Any]]:
    """A checkpoint under every layout, all after the same two steps, and the whole state that each rank saw."""
    folder = str(tmp_path_factory.mktemp("layouts"))
    states: dict[str, Any] = {}
    for world_size in (4, 2, 1):
        states |= pool.run(save_all, world_size, folder)[0]
    return folder, states


@pytest.fixture(scope="module")
def continued() -> dict[str, Any]:
    """The state of one process after four steps without a break."""
    model = build_model(seed=1)
    optimizer = optimizer_of(model, lr=0.01)
    train(model, optimizer, steps=2, seed=5)
    train(model, optimizer, steps=2, seed=6)
    return whole_state(model, optimizer)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_layout_loads_what_any_other_saved_to_the_bit(
    world_size: int, saved: tuple[str, dict[str, Any]], continued: dict[str, Any], pool: WorkerPool
) -> None:
    folder, expected = saved
    for results in pool.run(load_all, world_size, folder):
        for (saved_as, loaded_as), (states, lr) in results.items():
            assert lr == 0.01
            assert states["loaded"].keys() == expected[saved_as].keys() == continued.keys()
            for name, value in expected[saved_as].items():
                assert torch.equal(states["loaded"][name], value), f"{name} of {saved_as} differs as {loaded_as}"
                assert torch.allclose(states["continued"][name], continued[name], rtol=1e-9, atol=1e-12)


def test_one_process_reads_the_whole_of_every_layout(saved: tuple[str, dict[str, Any]]) -> None:
    folder, expected = saved
    for layout, state in expected.items():
        assert checkpoint.verify(f"{folder}/{layout}").intact
        alone = checkpoint.read_tensors(f"{folder}/{layout}")
        assert len(alone["state_dict"]) == 6
        for name, value in alone["state_dict"].items():
            assert torch.equal(value, state[f"model.{name}"])
        for name, values in alone["optimizer_0"]["state"].items():
            assert all(torch.equal(value, state[f"{name}.{key}"]) for key, value in values.items())


def test_stock_torch_reads_the_data_folder(saved: tuple[str, dict[str, Any]]) -> None:
    folder, expected = saved
    tensors = {"state_dict": {"2.weight": torch.zeros(5, 8, dtype=torch.float64)}}
    torch.distributed.checkpoint.load(tensors, checkpoint_id=f"{folder}/shard4/data", no_dist=True)
    assert torch.equal(tensors["state_dict"]["2.weight"], expected["shard4"]["model.2.weight"])
