"""The process groups of a layout: the mesh for tensors, and CPU groups of the same ranks for control."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist import _compat
from lightning_dist.layout import MESH_AXES, ParallelLayout

DATA_AXES = ("replicate", "shard")


@dataclass(frozen=True)
class ProcessGroups:
    """Groups that a rank is in; None where it would be alone. Control traffic must not mix with tensors.

    Args:
        mesh: The mesh of the axes larger than 1.
        control: The world, on the CPU.
        data: The data ranks (replicate x shard) of this rank.
        data_control: The same, on the CPU.
        tokens: The ranks that see other tokens: the data ranks, and those that share sequences.
        replica_control: The ranks of one model replica, which see the same batch, on the CPU.
        pipeline_control: The ranks of one pipeline, on the CPU.
        stage: The ranks that have the same stages of a pipeline.
    """

    mesh: DeviceMesh | None = None
    control: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    data_control: dist.ProcessGroup | None = None
    tokens: dist.ProcessGroup | None = None
    replica_control: dist.ProcessGroup | None = None
    pipeline_control: dist.ProcessGroup | None = None
    stage: dist.ProcessGroup | None = None

    @property
    def data_mesh(self) -> DeviceMesh | None:
        """The mesh of the data axes that are larger than 1."""
        names = (self.mesh.mesh_dim_names if self.mesh is not None else None) or ()
        axes = tuple(axis for axis in DATA_AXES if axis in names)
        return self.mesh[axes] if self.mesh is not None and axes else None


def make_process_groups(
    layout: ParallelLayout,
    device_type: str,
    timeout: datetime.timedelta,
    control: dist.ProcessGroup | None = None,
) -> ProcessGroups:
    """Makes a layout's groups; all ranks of the world must call it.

    Args:
        layout: The resolved layout of a world of at least two.
        device_type: ``"cpu"`` or ``"cuda"``.
        timeout: How long a collective of these groups may wait.
        control: The world's CPU group, where it has been made before the layout was known.
    """
    world_size = dist.get_world_size()

    def cpu_group(axes: tuple[str, ...]) -> dist.ProcessGroup:
        group, _ = dist.new_subgroups_by_enumeration(layout.groups(axes), timeout=timeout, backend="gloo")
        return group

    mesh = layout.build_mesh(device_type)
    control = control or dist.new_group(backend="gloo", timeout=timeout)
    data = data_control = tokens = replica_control = pipeline_control = stage = None
    if layout.data_size > 1:
        axes = tuple(axis for axis in DATA_AXES if layout.sizes()[axis] > 1)
        data = _compat.flatten_mesh(mesh, axes, "data").get_group()
        data_control = cpu_group(DATA_AXES)
        tokens = data
    if layout.context > 1:
        axes = tuple(axis for axis in (*DATA_AXES, "context") if layout.sizes()[axis] > 1)
        tokens = (_compat.flatten_mesh(mesh, axes, "tokens") if len(axes) > 1 else mesh["context"]).get_group()
    if layout.pipeline > 1:
        pipeline_control = cpu_group(("pipeline",))
        if layout.pipeline < world_size:
            ranks = layout.groups(tuple(axis for axis in MESH_AXES if axis != "pipeline"))
            stage, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
    if layout.data_size < world_size:
        replica_control = cpu_group(("pipeline", "context", "tensor"))
    return ProcessGroups(mesh, control, data, data_control, tokens, replica_control, pipeline_control, stage)
