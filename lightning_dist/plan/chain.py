"""Finds the pipeline's chain: the modules of a network in the order in which it calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_dist.plan.model_plan import ModelPlan, expand_names
from lightning_dist.plan.units import find_network


@dataclass(frozen=True)
class Chain:
    """Modules in calling order, and how many of them each stage has where that was written by hand.

    Args:
        names: Full module names, relative to the LightningModule.
        sizes: Modules of each stage; None leaves it to be balanced.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...] | None = None


def find_chain(module: nn.Module, plan: ModelPlan | None = None) -> Chain:
    """The chain of ``module``: what the plan says, else what its structure says.

    The plan's ``pipeline`` is a list of names with wildcards, or a list of such lists, one for each stage, or a list of
    numbers: how many modules of the chain that is found each stage has. Without it, the chain is the longest list of
    like modules (a Hugging Face model's ``pp_plan`` says which list that is), the modules with parameters that stand
    before it and behind it, and so on up to the network. A parallel embedding beside the largest one, and parameters
    that no module of the chain holds, stay outside: every stage has them.

    Raises:
        ValueError: If a name fits nothing, stands twice or inside another; or nothing can be found, with the modules
            there are and a plan to start from.
    """
    prefix, network = find_network(module, plan)
    written = plan.pipeline if plan is not None else None
    if written is not None and not len(written):
        raise ValueError(
            "ModelPlan.pipeline is empty; name modules in calling order, or leave it out to have them found."
        )
    sizes: tuple[int, ...] | None = None
    if written is None or all(isinstance(entry, int) for entry in written):
        names = _find(network)
        sizes = tuple(written) if written is not None else None  # type: ignore[arg-type]
    elif all(isinstance(entry, str) for entry in written):
        names = expand_names(network, written, "pipeline")  # type: ignore[arg-type]
    elif any(isinstance(entry, str) for entry in written):
        raise ValueError(
            "ModelPlan.pipeline mixes names and lists of names; write one list, or one list for each stage."
        )
    else:
        stages = [expand_names(network, entry, "pipeline") for entry in written]  # type: ignore[arg-type]
        names = [name for stage in stages for name in stage]
        sizes = tuple(map(len, stages))
    if sizes is not None and (sum(sizes) != len(names) or min(sizes) < 1):
        raise ValueError(
            f"ModelPlan.pipeline gives its stages {list(sizes)} modules, but the chain has {len(names)}:"
            f" {', '.join(names)}; every stage needs one, and they must add up."
        )
    _check(names)
    return Chain(tuple(f"{prefix}.{name}" if prefix else name for name in names), sizes)


def _check(names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"ModelPlan.pipeline names {', '.join(twice)} twice; each module is called once in a step.")
    for outer in names:
        inner = [name for name in names if name.startswith(f"{outer}.")]
        if inner:
            raise ValueError(
                f"ModelPlan.pipeline names {outer} and, inside it, {inner[0]}; name a module or its parts, not both."
            )


def _find(network: nn.Module) -> list[str]:
    main = _main_list(network)
    if main is None:
        modules = ", ".join(name for name, _ in _with_work(network, "")) or "none with parameters"
        first = next(iter(_with_work(network, "")), ("first_module", network))[0]
        raise ValueError(
            f"The pipeline's chain could not be found in {type(network).__name__}: it has no ModuleList or Sequential"
            f" of at least two like modules. Its modules: {modules}. Write the plan, naming modules in calling order:"
            f" ModelPlan(pipeline=[{first!r}, ...])."
        )
    return _along(network, "", main)


def _main_list(network: nn.Module) -> str | None:
    """The list of most like modules; of equally long ones, that with the most parameters."""
    lists = {
        name: container
        for name, container in network.named_modules()
        if isinstance(container, nn.ModuleList | nn.Sequential)
    }
    planned: Any = getattr(network, "pp_plan", None)
    if isinstance(planned, dict):
        lists = {name: container for name, container in lists.items() if name in planned} or lists
    best: tuple[int, int] = (1, 0)
    found = None
    for name, container in lists.items():
        kinds = Counter(type(child) for child in container.children() if _has_work(child))
        parameters = sum(parameter.numel() for parameter in container.parameters())
        if kinds and (max(kinds.values()), parameters) > best and max(kinds.values()) > 1:
            best, found = (max(kinds.values()), parameters), name
    if found is None and isinstance(network, nn.Sequential) and sum(map(_has_work, network.children())) > 1:
        return ""
    return found


def _along(module: nn.Module, name: str, main: str) -> list[str]:
    """The chain inside ``module``, which is the main list or holds it."""
    if name == main:
        return [child for part, inner in _with_work(module, name) for child in _spread(inner, part)]
    before: list[tuple[str, nn.Module]] = []
    behind: list[str] = []
    inside: list[str] = []
    for child, inner in _with_work(module, name):
        if child == main or not main or main.startswith(f"{child}."):
            inside = _along(inner, child, main)
        elif inside:
            behind += _spread(inner, child)
        else:
            before.append((child, inner))
    embeddings = [inner for _, inner in before if isinstance(inner, nn.Embedding)]
    largest = max(embeddings, key=lambda inner: inner.weight.numel(), default=None)
    in_front = [
        part
        for child, inner in before
        if not isinstance(inner, nn.Embedding) or inner is largest
        for part in _spread(inner, child)
    ]
    return [*in_front, *inside, *behind]


def _spread(module: nn.Module, name: str) -> list[str]:
    """A module, or the parts of one that only calls them one after the other."""
    if isinstance(module, nn.ModuleList):
        return []  # how its members are called can't be seen
    if type(module) is nn.Sequential and sum(map(_has_work, module.children())) > 1:
        return [part for child, inner in _with_work(module, name) for part in _spread(inner, child)]
    return [name]


def _with_work(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        if _has_work(child):
            yield (f"{name}.{key}" if name else key), child


def _has_work(module: nn.Module) -> bool:
    """Whether a module has something to own: parameters, or running statistics."""
    return any(True for _ in module.parameters()) or any(
        getattr(inner, "running_mean", None) is not None for inner in module.modules()
    )
