"""What stands where another stage's activations and parameters would be, and refuses to be mistaken for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class PipelineError(RuntimeError):
    """The module does something that a pipeline can't do exactly, so it does not do it at all."""


READS = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__"}
    | {"__contains__", "__format__", "is_nonzero", "equal", "allclose"}
)
_WRITES = frozenset(
    {"__setitem__", "copy_"} | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv")}
)


class ForeignActivation(Tensor):
    """Stands for the output of a module of an earlier stage: right in shape, type and device, wrong in value.

    Code between two modules of earlier stages runs on it, and its result is thrown away, which is right. Whatever is
    computed from it is again of this class, so that a value which does reach this stage's modules, or Python, is seen
    and refused.

    Attributes:
        origin: The chain module whose output it stands for.
    """

    origin: str

    @staticmethod
    def stand_for(origin: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> ForeignActivation:
        stand_in = torch.zeros(shape, dtype=dtype, device=device).as_subclass(ForeignActivation)
        stand_in.origin = origin
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = first_foreign((args, kwargs))
        name = getattr(func, "__name__", "")
        if found is not None:
            if name in READS:
                raise PipelineError(
                    f"The values of a tensor made from the output of {found.origin} are read on the host ({name})"
                    " between modules of the pipeline's chain, on a stage that does not have them; do this inside a"
                    " chain module, or name this code's module in the chain."
                )
            if writes(name, kwargs) and args and not isinstance(kwargs.get("out", args[0]), ForeignActivation):
                raise PipelineError(
                    f"A tensor made from the output of {found.origin} is written into another tensor ({name}) between"
                    " modules of the pipeline's chain, on a stage that does not have its values; do this inside a"
                    " chain module."
                )
        result = super().__torch_function__(func, types, args, kwargs)
        if found is not None:
            for leaf in pytree.tree_leaves(result) if not isinstance(result, Tensor) else [result]:
                if isinstance(leaf, ForeignActivation):
                    leaf.origin = found.origin
        return result


def writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether the function of that name changes one of its arguments."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITES or kwargs.get("out") is not None


def first_foreign(values: Any) -> ForeignActivation | None:
    """The first foreign activation in any nesting of values, or None. Asked at every call of a chain module."""
    kind = type(values)
    if kind is ForeignActivation:
        return values if hasattr(values, "origin") else None
    if isinstance(values, Tensor | str | int | float | None):
        return None
    if kind is tuple or kind is list or kind is dict:
        parts = values.values() if kind is dict else values
        return next((found for part in parts if (found := first_foreign(part)) is not None), None)
    leaves = pytree.tree_leaves(values)
    return next((leaf for leaf in leaves if type(leaf) is ForeignActivation and hasattr(leaf, "origin")), None)


class ForeignParameter(Tensor):
    """Stands for a parameter or buffer of another rank's stage: answers for its shape and type, and holds nothing.

    Attributes:
        sentence: What to tell whoever tries to compute with it.
    """

    sentence: str

    @staticmethod
    def stand_for(tensor: Tensor, sentence: str) -> ForeignParameter:
        stand_in = Tensor._make_wrapper_subclass(
            ForeignParameter, tensor.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=False
        )
        stand_in.sentence = sentence
        return stand_in

    def __deepcopy__(self, memo: dict[int, Any]) -> ForeignParameter:
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ForeignParameter(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        stand_in = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ForeignParameter))
        raise PipelineError(stand_in.sentence)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        stand_in = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ForeignParameter))
        raise PipelineError(stand_in.sentence)


_METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "ndim",
        "is_leaf",
        "layout",
        "is_cuda",
        "is_meta",
        "grad",
        "grad_fn",
    )
)
_METADATA_NAMES = frozenset(
    {"size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "__len__", "__repr__"}
)


def is_metadata(func: Any) -> bool:
    """Whether the function asks for a tensor's shape, type or place only."""
    return func in _METADATA or getattr(func, "__name__", "") in _METADATA_NAMES


def drop_parameters(module: nn.Module, name: str, owner: str, kept: set[int]) -> None:
    """Takes the parameters and buffers out of a module of another rank's stage; everything else of it stays.

    A name that is looked up all the same gives a stand-in that says who has it.

    Args:
        module: The module.
        name: Its full name.
        owner: Who has it, for the error: ``"stage 1 on rank 3"``.
        kept: ids of parameters and buffers that stay, for this rank has them in another place too.
    """
    for inner_name, inner in module.named_modules():
        for store in (inner._parameters, inner._buffers):
            for key, tensor in list(store.items()):
                if tensor is None or id(tensor) in kept:
                    continue
                full = ".".join(filter(None, (name, inner_name, key)))
                del store[key]
                inner.__dict__[key] = ForeignParameter.stand_for(
                    tensor,
                    f"{full} is used directly, but it belongs to {owner}; call its module through the chain, or name"
                    " it in ModelPlan.shared so that every stage has it.",
                )
