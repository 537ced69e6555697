"""Reads a LightningModule without memory for its weights: sizes, plans, optimizer, and one traced step."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.advisor.profile import PRECISIONS, LayerProfile, ModelProfile, Precision, with_sequence_parallel
from lightning_dist.advisor.trace import trace_step
from lightning_dist.advisor.weights import count_weights
from lightning_dist.parallel.pipeline.costs import module_costs
from lightning_dist.parallel.tensor.resolve import ResolvedPlan
from lightning_dist.plan import ModelPlan
from lightning_dist.plan.chain import find_chain
from lightning_dist.plan.huggingface import find_tensor_plan
from lightning_dist.plan.units import find_network, find_units

TENSOR_SIZES = (2, 3, 4, 6, 8, 12, 16, 32)
"""Tensor sizes that are tried on a plan; what it says about a size that does not fit is what the advisor says."""


def build_on_meta(factory: Callable[[], Any], note: Callable[[str], None] = lambda _: None) -> tuple[nn.Module, Any]:
    """Calls the user's factory so that no weight takes memory.

    Args:
        factory: Returns the LightningModule, or a tuple of it and an iterable of batches.
        note: Told if the factory can't run like that and is called in the ordinary way.

    Returns:
        The module on the meta device, and one batch (None if the factory and the module have none).

    Raises:
        ValueError: If the factory returns something else.
    """
    try:
        with torch.device("meta"), _quiet():
            built = factory()
    except Exception as error:
        note(
            f"the factory can't run on the meta device ({type(error).__name__}: {str(error).splitlines()[0][:120]});"
            " building the module on the CPU instead, which takes the memory of its weights"
        )
        built = factory()
    module, batches = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"The factory returned a {type(module).__name__}; it must return a LightningModule, or a tuple of it and an"
            " iterable of batches."
        )
    batch = first_batch(batches) if batches is not None else _own_batch(module, note)
    return module.to("meta"), batch


def first_batch(batches: Iterable[Any]) -> Any:
    """The first of some batches.

    Raises:
        ValueError: If there is none.
    """
    try:
        return next(iter(batches))
    except StopIteration:
        raise ValueError("The iterable of batches is empty; the advisor needs one batch to see its shape.") from None


def _own_batch(module: nn.Module, note: Callable[[str], None]) -> Any:
    try:
        module.prepare_data()  # type: ignore[operator]
        module.setup("fit")  # type: ignore[operator]
        return first_batch(module.train_dataloader())  # type: ignore[operator]
    except Exception as error:
        note(f"{type(module).__name__}.train_dataloader() gave no batch ({type(error).__name__}: {error})")
        return None


def read_model(
    module: nn.Module, batch: Any = None, *, precision: str | Precision = "32-true", plan: ModelPlan | None = None
) -> ModelProfile:
    """What the advisor needs to know about a module; takes no memory for weights or activations.

    The step is traced once with tensors that have shapes and no values; of layers that are alike only the first is run.

    Args:
        module: A LightningModule, its parameters on any device; it is left on the meta device.
        batch: One batch, as the module's ``training_step`` takes it; None leaves activations and work unknown.
        precision: The Trainer's precision, ``"bf16-gathered"`` for FSDP2's own mixed precision, or bytes by use.
        plan: The user's plan; None asks ``module.parallel_plan()``.

    Raises:
        ValueError: If the precision is unknown, or the plan names what is not there.
    """
    bytes_of = _precision_of(precision)
    if plan is None and callable(getattr(module, "parallel_plan", None)):
        plan = module.parallel_plan()  # type: ignore[operator]
    module.to("meta")
    refused: dict[str, str] = {}
    names = _chain_names(module, plan, refused)
    rules, refused_sizes, sequence_parallel = _tensor_rules(module, plan, refused)
    weights = count_weights(module, names, rules, plan)
    if not weights.num_experts:
        refused["expert"] = f"{type(module).__name__} has no experts that a plan or its own names show"
    if not getattr(module, "automatic_optimization", True):
        refused["pipeline"] = "the module uses manual optimization, which a pipeline can't run"
    optimizer_bytes, notes = measure_optimizer(module)
    _context_refusal(plan, refused)

    parts = dict(weights.parts)
    outside, unknown, samples = parts.pop(""), "there is no batch to trace a step with", None
    query_heads = key_value_heads = 0
    units = find_units(module, plan)
    costs = module_costs(module, names)
    layers = [
        replace(parts[name], cost=cost, unit=any(unit == name or unit.startswith(f"{name}.") for unit in units))
        for name, cost in zip(names, costs, strict=True)
    ]
    if batch is not None:
        traced = trace_step(module, batch, names, rules, weights, autocast=_autocast(bytes_of), dtype=_dtype(bytes_of))
        layers = [_merged(layer, traced.parts.get(layer.name)) for layer in layers]
        outside = _merged(outside, traced.parts.get(""))
        layers.append(traced.tail)
        unknown, samples = traced.failure, traced.samples
        query_heads, key_value_heads = traced.query_heads, traced.key_value_heads
        notes += traced.notes
    profile = ModelProfile(
        name=type(module).__name__,
        layers=tuple(layers),
        outside=outside,
        samples=samples,
        optimizer_bytes=optimizer_bytes,
        precision=bytes_of,
        refused=refused,
        refused_tensor_sizes=refused_sizes,
        query_heads=query_heads,
        key_value_heads=key_value_heads,
        num_experts=weights.num_experts,
        unknown=unknown,
        notes=tuple(notes),
    )
    return with_sequence_parallel(profile) if sequence_parallel else profile


def measure_optimizer(module: nn.Module) -> tuple[float, list[str]]:
    """Bytes of optimizer state for each trainable element of float32, measured on an optimizer of the same kind.

    Returns:
        The bytes, and what had to be assumed.
    """
    try:
        with _quiet():
            configured = module.configure_optimizers()  # type: ignore[operator]
        optimizer = _first_optimizer(configured)
        parameter = nn.Parameter(torch.zeros(64, 64))
        known = inspect.signature(type(optimizer)).parameters
        arguments = {name: value for name, value in optimizer.defaults.items() if name in known and name != "fused"}
        twin = type(optimizer)([parameter], **arguments)
        parameter.grad = torch.ones_like(parameter)
        twin.step()
        state = [value for value in twin.state[parameter].values() if isinstance(value, Tensor) and value.dim() > 0]
        return sum(value.numel() * value.element_size() for value in state) / parameter.numel(), []
    except Exception as error:
        reason = str(error).splitlines()[0][:100] if str(error) else ""
        return 8.0, [f"Adam's 8 bytes of optimizer state are assumed: {type(error).__name__}: {reason}"]


def _first_optimizer(configured: Any) -> torch.optim.Optimizer:
    while not isinstance(configured, torch.optim.Optimizer):
        configured = configured["optimizer"] if isinstance(configured, dict) else configured[0]
    return configured


def _precision_of(precision: str | Precision) -> Precision:
    if isinstance(precision, Precision):
        return precision
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} does not fit: give one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[precision]


def _autocast(precision: Precision) -> torch.dtype | None:
    return torch.bfloat16 if precision.cast else None


def _dtype(precision: Precision) -> torch.dtype | None:
    """The dtype that weights and floating inputs are traced in; None leaves them as they are."""
    if precision.cast:
        return None
    width = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}
    return width.get(int(precision.gather))


def _chain_names(module: nn.Module, plan: ModelPlan | None, refused: dict[str, str]) -> list[str]:
    try:
        return list(find_chain(module, plan).names)
    except ValueError as error:
        refused["pipeline"] = str(error).rstrip(".")
        return find_units(module, plan)


def _tensor_rules(
    module: nn.Module, plan: ModelPlan | None, refused: dict[str, str]
) -> tuple[ResolvedPlan | None, dict[int, str], bool]:
    prefix, network = find_network(module, plan)
    if plan is not None and plan.tensor is not None:
        written = dict(plan.tensor)
        resolved = ResolvedPlan(network, written, 1)
    else:
        try:
            written = dict(find_tensor_plan(network))
            resolved = ResolvedPlan(network, written, 1)
        except ValueError as error:
            refused["tensor"] = str(error).splitlines()[0].split(". ")[0].rstrip(".")
            return None, {}, False
    resolved.rules = {f"{prefix}.{name}" if prefix else name: rule for name, rule in resolved.rules.items()}
    resolved.parameter_rules = {
        f"{prefix}.{name}" if prefix else name: named for name, named in resolved.parameter_rules.items()
    }
    sizes: dict[int, str] = {}
    for size in TENSOR_SIZES:
        try:
            ResolvedPlan(network, written, size)
        except ValueError as error:
            sizes[size] = str(error).rstrip(".")
    return resolved, sizes, "sequence_parallel" in written.values()


def _context_refusal(plan: ModelPlan | None, refused: dict[str, str]) -> None:
    if plan is None or not plan.sequence_dims:
        refused["context"] = (
            'the plan does not say which entries of a batch to cut; declare them: ModelPlan(sequence_dims={"input_ids":'
            ' 1, "labels": 1})'
        )


def _merged(weights: LayerProfile, traced: LayerProfile | None) -> LayerProfile:
    """Sizes from the module, work and activations from the trace."""
    if traced is None:
        return weights
    return replace(
        traced,
        name=weights.name,
        cost=weights.cost,
        unit=weights.unit,
        parameters=weights.parameters,
        trainable=weights.trainable,
        experts=weights.experts,
        trainable_experts=weights.trainable_experts,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
