"""How many ranks each kind of parallelism takes, and which rank stands where."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MESH_AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""The mesh axes, outermost first: ranks that differ in the last axis are neighbours, so they share a node."""

SHORT_NAMES = {
    "pp": "pipeline",
    "replicate": "replicate",
    "shard": "shard",
    "cp": "context",
    "tp": "tensor",
    "ep": "expert",
}


@dataclass(frozen=True)
class ParallelLayout:
    """The sizes of a hybrid-parallel run: a checked product of mesh axes.

    Axes, outermost first: ``pipeline`` (stages), ``replicate`` (whole copies), ``shard`` (FSDP2), ``context``
    (parts of a sequence), ``tensor`` (parts of a layer). Tensor groups are consecutive ranks, hence inside a node
    where its size allows, then context, then data; pipeline neighbours are furthest apart.

    Views of the same ranks:

    * data ranks (different samples): ``replicate x shard``;
    * loss ranks (different tokens): ``replicate x shard x context``;
    * one model replica (same samples): ``pipeline x context x tensor``;
    * expert ranks: taken out of ``shard x context``, so ``expert`` adds no ranks of its own.

    Args:
        replicate: Whole copies of the model (HSDP where ``shard`` is above 1).
        shard: Ranks over which FSDP2 shards parameters; ``"auto"`` takes what the other sizes leave of the world.
        tensor: Ranks that share each layer.
        context: Ranks that share each sequence.
        pipeline: Ranks that hold consecutive stages.
        expert: Ranks over which experts are spread, out of ``shard x context``.

    Raises:
        ValueError: If a size is not a positive whole number.
    """

    replicate: int = 1
    shard: int | Literal["auto"] = "auto"
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.name == "shard" and size == "auto":
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                fits = "a whole number of at least 1" + (" or 'auto'" if field.name == "shard" else "")
                raise ValueError(f"The layout's size {field.name}={size!r} does not fit: give {fits}.")

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Reads the short form, such as ``"pp=2,shard=2"``; an axis that is not named has size 1, shard ``"auto"``.

        Raises:
            ValueError: If ``text`` is not such a list, names an unknown axis, or names one twice.
        """
        sizes: dict[str, int | str] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, separator, value = (piece.strip() for piece in part.partition("="))
            axis = SHORT_NAMES.get(name)
            if not separator or axis is None:
                known = ", ".join(SHORT_NAMES)
                raise ValueError(f"layout={text!r}: {part!r} does not fit; write NAME=SIZE with a NAME out of {known}.")
            if axis in sizes:
                raise ValueError(f"layout={text!r} names {name!r} twice; name each axis once.")
            if value == "auto" and axis == "shard":
                sizes[axis] = value
            elif value.isdecimal() and int(value) >= 1:
                sizes[axis] = int(value)
            else:
                raise ValueError(f"layout={text!r}: {part!r} does not fit; a size is a whole number of at least 1.")
        return cls(**sizes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        sizes = {short: getattr(self, axis) for short, axis in SHORT_NAMES.items()}
        return ",".join(f"{short}={size}" for short, size in sizes.items() if size != 1) or "shard=1"

    @property
    def minimum_world_size(self) -> int:
        """The number of ranks the named sizes need, with ``shard="auto"`` counted as 1 (or what ``expert`` needs)."""
        fixed = self.replicate * self.tensor * self.context * self.pipeline
        if self.shard != "auto":
            return fixed * self.shard
        return fixed * math.lcm(self.expert, self.context) // self.context

    def resolve(self, world_size: int) -> ParallelLayout:
        """Returns the layout with every size a number, or raises if the sizes do not multiply to ``world_size``.

        Raises:
            ValueError: With the arithmetic, if the product is not the world size or the expert size does not fit.
        """
        layout = self
        if self.shard == "auto":
            fixed = self.replicate * self.tensor * self.context * self.pipeline
            if world_size % fixed:
                raise ValueError(
                    f"The layout {self} does not fit the world: {self._product()} = {fixed} does not divide"
                    f" {world_size} ranks; start a multiple of {fixed} ranks or change a size."
                )
            layout = replace(self, shard=world_size // fixed)
        product = math.prod(layout.sizes().values())
        if product != world_size:
            raise ValueError(
                f"The layout {self} does not fit the world: {layout._product()} = {product}, but the world has"
                f" {world_size} rank{'s' if world_size != 1 else ''}; start {product} or change a size."
            )
        spread = layout.shard_size * layout.context
        if spread % layout.expert:
            raise ValueError(
                f"The layout {self} does not fit: expert={layout.expert} is taken out of shard x context ="
                f" {layout.shard_size} x {layout.context} = {spread} ranks and must divide it."
            )
        return layout

    def sizes(self) -> dict[str, int]:
        """The size of each mesh axis, outermost first. Needs a resolved layout."""
        return {axis: self.shard_size if axis == "shard" else getattr(self, axis) for axis in MESH_AXES}

    @property
    def shard_size(self) -> int:
        """The ``shard`` size as a number; only a resolved layout has one."""
        if self.shard == "auto":
            raise ValueError("The layout's size shard='auto' has no number yet: call resolve(world_size) first.")
        return self.shard

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes().values())

    @property
    def data_size(self) -> int:
        """How many ranks (or groups of ranks) see different samples."""
        return self.replicate * self.shard_size

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on each mesh axis; arithmetic only, no process group."""
        position = {}
        for axis, size in reversed(self.sizes().items()):
            rank, position[axis] = divmod(rank, size)
        return {axis: position[axis] for axis in MESH_AXES}

    def data_coordinate(self, rank: int) -> int:
        """Which of the ``data_size`` parts of the data ``rank`` sees."""
        position = self.coordinate(rank)
        return position["replicate"] * self.shard_size + position["shard"]

    def groups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """The ranks of the world in groups that differ only in ``axes``, each in order; arithmetic only."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            position = self.coordinate(rank)
            groups.setdefault(tuple(position[axis] for axis in MESH_AXES if axis not in axes), []).append(rank)
        return list(groups.values())

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """Builds the device mesh of the axes larger than 1; an axis of size 1 gets no process group.

        Issues the collectives of ``torch.distributed.new_group`` on every rank, so all ranks must call it.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``; the default process group must exist.
        """
        sizes = {axis: size for axis, size in self.sizes().items() if size > 1} or {"shard": 1}
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def _product(self) -> str:
        parts: Iterator[tuple[str, int]] = ((axis, getattr(self, axis)) for axis in MESH_AXES)
        return " x ".join(f"{size} ({axis})" for axis, size in parts if size not in (1, "auto")) or "1"
