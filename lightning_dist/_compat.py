"""The only door to private API of torch and Lightning, with the versions each entry was tested on.

Tested on torch 2.13 and Lightning 2.6.6.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def _missing(what: str, package: str) -> ImportError:
    version = torch.__version__ if package == "torch" else _lightning_version()
    return ImportError(f"lightning_dist needs {what}, which {package} {version} does not have; see _compat.py.")


def _lightning_version() -> str:
    from lightning import __version__

    return __version__


def flatten_mesh(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """The one-dimensional mesh over ``axes`` of ``mesh`` (torch 2.13: ``DeviceMesh._flatten``)."""
    if len(axes) == 1:
        return mesh[axes[0]]
    return mesh[axes]._flatten(name)


def replicate_module(module: nn.Module, *, mesh: DeviceMesh, mp_policy: Any) -> None:
    """Whole copies on FSDP2's machinery: gradients are all-reduced as backward makes them (torch 2.13)."""
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError as error:
        raise _missing("torch.distributed._composable.replicate_with_fsdp", "torch") from error
    replicate(module, mesh=mesh, mp_policy=mp_policy)


def initialise_fsdp_root(module: nn.Module) -> None:
    """Makes ``module`` the root of its FSDP tree now, not at whatever forward happens to come first (torch 2.13)."""
    module._get_fsdp_state()._lazy_init()  # type: ignore[operator, union-attr]


def default_store() -> dist.Store:
    """The key-value store through which the default process group met (torch 2.13)."""
    return dist.distributed_c10d._get_default_store()


def broadcast_flattened(tensors: list[torch.Tensor], group: dist.ProcessGroup | None, source: int) -> None:
    """Broadcasts tensors of any dtype in buckets of 64 MiB (torch 2.13: ``dist._broadcast_coalesced``)."""
    dist._broadcast_coalesced(group or dist.group.WORLD, tensors, 64 * 2**20, source)


def default_timeout() -> datetime.timedelta:
    """How long torch lets a collective wait when nothing else is said (torch 2.13)."""
    from torch.distributed.constants import default_pg_timeout

    return default_pg_timeout


def clear_dtensor_caches() -> None:
    """Forgets what DTensor remembers about earlier meshes (torch 2.11 to 2.13).

    Meshes of one shape compare equal whatever their process groups are, so a process that destroys its groups and
    builds new ones would be handed cached results that name the old groups.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for clear in (
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
    ):
        if clear is not None:
            clear()
