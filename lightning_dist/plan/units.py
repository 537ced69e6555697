"""Finds the modules that FSDP2 gathers and frees one at a time: the repeated layers of a network."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_dist.plan.model_plan import ModelPlan, expand_names


def find_network(module: nn.Module, plan: ModelPlan | None) -> tuple[str, nn.Module]:
    """The name and module of the network inside a LightningModule: what the plan says, or the part with the layers.

    Without a word from the plan it is the child that holds more than 90 % of the parameters, or the module itself.

    Raises:
        ValueError: If the plan names an attribute that is no module.
    """
    if plan is not None and plan.network is not None:
        if not plan.network:
            return "", module
        try:
            return plan.network, module.get_submodule(plan.network)
        except AttributeError:
            children = ", ".join(name for name, _ in module.named_children()) or "none"
            raise ValueError(
                f"ModelPlan.network={plan.network!r} is no module of {type(module).__name__}; its children: {children}."
            ) from None
    total = sum(parameter.numel() for parameter in module.parameters())
    for name, child in module.named_children():
        if total and sum(parameter.numel() for parameter in child.parameters()) > 0.9 * total:
            return name, child
    return "", module


def find_units(module: nn.Module, plan: ModelPlan | None = None) -> list[str]:
    """Names, relative to ``module``, of the modules to shard one at a time.

    In this order: what the plan says; what a Hugging Face model calls its unsplittable layers
    (``_no_split_modules``); the members of each ``ModuleList`` or ``Sequential`` of at least two like modules that
    hold parameters (the outermost of nested ones). Modules that share a parameter with something outside themselves
    are left to the root, for FSDP2 keeps a shared parameter in one unit only.
    """
    prefix, network = find_network(module, plan)
    if plan is not None and plan.shard is not None:
        names = expand_names(network, plan.shard, "shard")
    else:
        names = _no_split_modules(network) or _repeated_layers(network)
    units = [f"{prefix}.{name}" if prefix else name for name in names]
    return _without_shared(module, _outermost(units), complain=plan is not None and plan.shard is not None)


def _no_split_modules(network: nn.Module) -> list[str]:
    classes = getattr(network, "_no_split_modules", None) or ()
    return [
        name
        for name, child in network.named_modules()
        if name and type(child).__name__ in classes and any(True for _ in child.parameters())
    ]


def _repeated_layers(network: nn.Module) -> list[str]:
    names: list[str] = []
    for name, container in network.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        layers = [(key, child) for key, child in container.named_children() if any(True for _ in child.parameters())]
        kinds = [type(child) for _, child in layers]
        like = max((kinds.count(kind) for kind in set(kinds)), default=0)
        if like < 2 or not _is_composite(layers):
            continue
        names += [f"{name}.{key}" if name else key for key, _ in layers]
    return names


def _is_composite(layers: Sequence[tuple[str, nn.Module]]) -> bool:
    """Whether the layers are blocks of several modules, or at least matrices, rather than norms or embeddings."""
    return any(
        len(list(child.children())) > 0 or isinstance(child, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        for _, child in layers
    )


def _outermost(names: list[str]) -> list[str]:
    chosen: list[str] = []
    for name in sorted(dict.fromkeys(names), key=lambda name: name.count(".")):
        if not any(name.startswith(f"{outer}.") for outer in chosen):
            chosen.append(name)
    return [name for name in names if name in set(chosen)]


def _without_shared(module: nn.Module, units: list[str], complain: bool) -> list[str]:
    owners: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), "")
        owners.setdefault(id(parameter), set()).add(unit)
    sharing = {unit for owner in owners.values() if len(owner) > 1 for unit in owner if unit}
    if sharing and complain:
        raise ValueError(
            f"ModelPlan.shard names {', '.join(sorted(sharing))}, which share a parameter with a module outside"
            " themselves; leave them out, FSDP2 keeps a shared parameter in one unit only."
        )
    return [unit for unit in units if unit not in sharing]
