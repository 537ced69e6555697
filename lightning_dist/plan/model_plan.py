"""Which module goes where: the plan a user may write, and the wildcards it is written in."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ModelPlan:
    """Names the modules that a layout works on; every field is optional and what is left out is found.

    Module names are relative to ``network``. ``*`` stands for one part of a name (a layer's index, usually), and
    matches expand in the order of the modules.

    Args:
        network: Attribute of the LightningModule that holds the network; ``""`` is the module itself, None finds it.
        pipeline: Modules in the order in which the network calls them, the hidden state their first argument; a
            list of such lists, one for each stage; or how many modules of the chain that is found each stage has.
        tensor: Tensor-parallel style of modules: a name (``"colwise"``, ``"rowwise"``, …) or a torch
            ``ParallelStyle``.
        experts: Modules that hold experts.
        shard: Modules that FSDP2 gathers and frees one at a time.
        sequence_dims: The batch entries that context parallelism cuts, and along which dimension.
        shared: Parameters that a module of another stage may use directly.
    """

    network: str | None = None
    pipeline: Sequence[str] | Sequence[Sequence[str]] | Sequence[int] | None = None
    tensor: Mapping[str, Any] | None = None
    experts: Sequence[str] | None = None
    shard: Sequence[str] | None = None
    sequence_dims: Mapping[str, int] | None = None
    shared: Sequence[str] | None = None


def expand_names(network: nn.Module, patterns: Iterable[str], argument: str) -> list[str]:
    """Names of the modules that match ``patterns``, each pattern's matches in module order, none twice.

    Args:
        network: The module the names are relative to.
        patterns: Names with ``*`` for one part.
        argument: The plan's field, for the error.

    Raises:
        ValueError: If a pattern matches no module; names near ones.
    """
    names = [name for name, _ in network.named_modules() if name]
    found: dict[str, None] = {}
    for pattern in patterns:
        hits = [name for name in names if matches(name, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:5]
            raise ValueError(
                f"ModelPlan.{argument} names {pattern!r}, which matches no module of {type(network).__name__};"
                f" near names: {', '.join(near) or 'none, it has no submodules'}."
            )
        found.update(dict.fromkeys(hits))
    return list(found)


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name fits a pattern in which ``*`` stands for (a piece of) one part."""
    if not name:
        return not pattern
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
