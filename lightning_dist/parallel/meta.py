"""Modules built on the meta device get real, initialised memory, one unit at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn


def has_meta_tensors(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def materialise(
    module: nn.Module, device: torch.device, initialise: Callable[[nn.Module], None], module_name: str = ""
) -> None:
    """Gives the meta tensors of ``module`` memory on ``device`` and initialises them; ties between them stay.

    Memory is filled with NaN first, so that whatever initialisation leaves out is found, not trained on.

    Args:
        module: Module with tensors on the meta device, maybe beside real ones.
        device: Where they go.
        initialise: Called with each submodule that owns such tensors, in module order; see :func:`initialiser_of`.
        module_name: The full name of ``module``.

    Raises:
        RuntimeError: Naming the parameter or buffer that was left uninitialised.
    """
    real: dict[int, Tensor] = {}
    owners: list[tuple[str, nn.Module]] = []
    names: list[tuple[nn.Module, str, str]] = []
    for prefix, submodule in module.named_modules(prefix=module_name):
        for tensors in (submodule._parameters, submodule._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in real:
                    fresh = torch.empty_like(tensor, device=device)
                    if fresh.is_floating_point():
                        fresh.fill_(float("nan"))
                    if isinstance(tensor, nn.Parameter):
                        fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
                    real[id(tensor)] = fresh
                tensors[name] = real[id(tensor)]  # type: ignore[index, assignment]
                names.append((submodule, name, f"{prefix}.{name}" if prefix else name))
                if not owners or owners[-1][1] is not submodule:
                    owners.append((prefix, submodule))
    # A stream of random numbers for each module: what it is initialised with must not depend on which others this
    # rank holds, and equal layers of different pipeline stages must differ.
    seed = torch.initial_seed()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for prefix, submodule in owners:
            torch.manual_seed(zlib.crc32(f"{seed} {prefix}".encode()))
            initialise(submodule)
    for submodule, name, full_name in names:
        tensor = getattr(submodule, name)
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise RuntimeError(
                f"{full_name} was built on the meta device and {type(submodule).__name__} leaves it uninitialised; give"
                " that class a reset_parameters() that fills it, or build the module on a real device."
            )


def initialiser_of(root: nn.Module) -> Callable[[nn.Module], None]:
    """How a submodule of ``root`` is initialised: by the ``_init_weights`` of the model around it (Hugging Face), else
    by its own ``reset_parameters``."""
    parents: dict[int, nn.Module] = {}
    for model in root.modules():
        if callable(getattr(model, "_init_weights", None)):
            for submodule in model.modules():
                parents[id(submodule)] = model

    def initialise(submodule: nn.Module) -> None:
        model = parents.get(id(submodule))
        if model is not None:
            with torch.no_grad():
                model._init_weights(submodule)  # type: ignore[operator]
        elif callable(getattr(submodule, "reset_parameters", None)):
            submodule.reset_parameters()  # type: ignore[operator]
        else:
            raise RuntimeError(
                f"{type(submodule).__name__} was built on the meta device and has no reset_parameters() to initialise"
                " it with; give it one, or build the module on a real device."
            )

    return initialise
