"""Turns a module into this rank's part of it: the order of everything that is done to it, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_dist.layout import ParallelLayout
from lightning_dist.parallel import data, meta
from lightning_dist.parallel.activation import ActivationCheckpointing, checkpoint_activations


@dataclass(frozen=True)
class ParallelSettings:
    """How units are treated, whatever the layout."""

    reshard_after_forward: data.ReshardAfterForward = "auto"
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: bool = False


@dataclass(frozen=True)
class ParallelModule:
    """What was made of a module, kept with it from fit to test."""

    layout: ParallelLayout
    settings: ParallelSettings
    units: dict[str, nn.Module]
    fsdp_modules: list[FSDPModule] = field(default_factory=list)


def parallelise(
    module: nn.Module,
    unit_names: Sequence[str],
    layout: ParallelLayout,
    mesh: DeviceMesh | None,
    device: torch.device,
    settings: ParallelSettings,
    *,
    convert: Callable[[nn.Module], nn.Module],
    roots: Sequence[nn.Module],
    root_methods: Sequence[str],
) -> ParallelModule:
    """Unit by unit: memory, precision, equal weights, checkpointing, compile, shard; then what is left.

    Collectives: broadcasts of all parameters and buffers over the world.

    Args:
        module: The whole module, its parameters real or on the meta device.
        unit_names: The modules that are gathered and freed one at a time, relative to ``module``.
        layout: The resolved layout.
        mesh: Its mesh, or None in a world of one.
        device: This rank's device.
        settings: How units are treated.
        convert: Changes a module's precision.
        roots: The outermost modules to shard: ``module`` itself, or parts that cover it.
        root_methods: Methods of ``module`` that use its parameters as its forward does, where it is the root.
    """
    units = {name: module.get_submodule(name) for name in unit_names}
    initialise = meta.initialiser_of(module)
    sharded = mesh is not None and layout.data_size > 1

    def make_real(part: nn.Module) -> None:
        if meta.has_meta_tensors(part):
            meta.materialise(part, device, initialise)
        convert(part)
        part.to(device)
        if dist.is_initialized():
            data.equalise_weights(part)

    for unit in units.values():
        make_real(unit)
        # Checkpointing inside compile, so that the compiler sees what is computed again; both inside FSDP2's hooks.
        checkpoint_activations([unit], settings.activation_checkpointing)
        if settings.compile:
            unit.compile()
        if sharded:
            assert mesh is not None
            data.shard_module(unit, mesh, reshard_after_forward=settings.reshard_after_forward)
    make_real(module)
    if not sharded:
        return ParallelModule(layout, settings, units)
    assert mesh is not None
    for root in roots:
        if not isinstance(root, FSDPModule):
            data.shard_module(root, mesh, reshard_after_forward=settings.reshard_after_forward, root=True)
        data.make_root(root, root_methods if root is module else ())
    return ParallelModule(layout, settings, units, data.fsdp_modules(module))
