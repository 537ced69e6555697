"""Runs one training step with tensors that have shapes and no values, and counts what it does and keeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_dist import _compat
from lightning_dist.advisor.profile import Amount, LayerProfile
from lightning_dist.advisor.weights import Weights
from lightning_dist.parallel.activation import SAVED_OPERATIONS
from lightning_dist.parallel.tensor.resolve import COLUMNS, EMBEDDINGS, ROWS, ResolvedPlan

TAIL = "behind the chain"
GATHERED = ("colwise_gather_output", "colwise_rep", "embedding_colwise")
INDEX_NAMES = ("layer_idx", "layer_id", "layer_index", "layer_number", "index", "idx", "block_id")

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = 2.5
"""Backward of fused attention over its forward: five matrix products instead of two."""


@dataclass
class Traced:
    """What a step does: for each module of the chain, outside it (``""``) and behind its last module."""

    parts: dict[str, LayerProfile]
    tail: LayerProfile
    samples: int | None
    failure: str = ""
    query_heads: int = 0
    key_value_heads: int = 0
    notes: list[str] = field(default_factory=list)


def trace_step(
    module: nn.Module,
    batch: Any,
    chain: Sequence[str],
    rules: ResolvedPlan | None,
    weights: Weights,
    *,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> Traced:
    """Calls ``module.training_step`` once on fake tensors.

    Kernels, floating-point operations, saved tensors and messages are booked to the module of the chain that runs, per
    sample. Of modules that are alike only the first is run. What the tensor plan cuts is followed from the modules that
    cut to those that sum.

    Args:
        module: On the meta device; left there.
        batch: One batch, on any device.
        chain: Module names in calling order.
        rules: The tensor plan, by full names; None if there is none.
        weights: Where experts are.
        autocast: The dtype of mixed precision.
        dtype: The dtype of weights and floating inputs; None leaves them as they are.
    """
    samples = _samples(batch)
    if not samples:
        return Traced({}, LayerProfile(), None, "the batch has no tensor with a first dimension, so no samples")
    mode = _compat.fake_mode()
    originals = _tensors_of(module)
    try:
        _make_fake(module, mode, dtype)
        book = _Book(module, chain, rules)
        failure = _run(module, _fake_batch(batch, mode, dtype), book, mode, weights, autocast)
    finally:
        _restore(originals)
    parts = {name: book.profile(name, samples) for name in ("", *chain)}
    tail = book.profile(TAIL, samples)
    done = not chain or chain[-1] in book.finished
    notes = []
    if failure and done:
        notes.append(f"what runs behind {chain[-1] if chain else 'the network'} could not be traced: {failure}")
        failure = ""
    return Traced(parts, tail, samples, failure, book.query_heads, book.key_value_heads, notes)


def _run(module: nn.Module, batch: Any, book: _Book, mode: Any, weights: Weights, autocast: torch.dtype | None) -> str:
    was_training = module.training
    module.train()
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(mode)
            stack.enter_context(book.hooks())
            stack.enter_context(_fused_attention())
            stack.enter_context(_compat.masks_as_with_values())
            stack.enter_context(_without_experts(module, weights.experts, book))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(book.save, lambda tensor: tensor))
            stack.enter_context(book)
            if autocast is not None:
                stack.enter_context(torch.autocast("cpu", dtype=autocast))
            module.training_step(batch, 0)  # type: ignore[operator]
    except Exception as error:
        first = str(error).splitlines()[0][:200] if str(error) else ""
        return f"training_step can't be traced without values ({type(error).__name__}: {first})"
    finally:
        module.train(was_training)
    return ""


class _Book(TorchDispatchMode):
    """Books operations and saved tensors to the module of the chain that runs."""

    def __init__(self, module: nn.Module, chain: Sequence[str], rules: ResolvedPlan | None) -> None:
        super().__init__()
        self.module, self.chain, self.rules = module, list(chain), rules
        self.current = ""
        self.finished: list[str] = []
        self.sums: dict[str, dict[str, list[float]]] = {}
        self.query_heads = self.key_value_heads = 0
        self._own = {_storage(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self._casts: dict[int, tuple[Tensor, bool]] = {}  # 16-bit copies of weights, and whether they get a gradient
        self._cut: dict[int, Tensor] = {}
        self._saved: dict[int, Tensor] = {}
        self._column_inputs: dict[int, Tensor] = {}
        self._all: dict[int, Tensor] = {}  # answers to "is it so for all?"
        self._inside_cut = 0
        self._seen: dict[Any, tuple[Any, str]] = {}

    # --- booking -----------------------------------------------------------------------------------------------------

    def add(self, quantity: str, amount: float, cut: bool = False, largest: bool = False) -> None:
        entry = self.sums.setdefault(self.current, {}).setdefault(quantity, [0.0, 0.0])
        entry[cut] = max(entry[cut], amount) if largest else entry[cut] + amount

    def profile(self, part: str, samples: int) -> LayerProfile:
        sums = self.sums.get(part, {})

        def amount(quantity: str, divisor: float = samples) -> Amount:
            whole, cut = sums.get(quantity, (0.0, 0.0))
            return Amount(whole / divisor, cut / divisor)

        def number(quantity: str, divisor: float = samples) -> float:
            return sum(sums.get(quantity, (0.0, 0.0))) / divisor

        largest = amount("largest")
        return LayerProfile(
            name="" if part == TAIL else part,
            forward=amount("forward"),
            backward=amount("backward"),
            saved=amount("saved"),
            # Selective checkpointing keeps inputs and dear results, but never more than keeping everything would.
            kept=min(amount("kept") + amount("received"), amount("saved"), key=lambda a: a.total)
            if part in self.chain
            else amount("saved"),
            received=amount("received") if part in self.chain else amount("saved"),
            largest=Amount(0, largest.cut) if largest.cut > largest.whole else Amount(largest.whole),
            cast=amount("cast", 1),
            operations=number("operations", 1),
            sent=number("sent"),
            reduced=number("reduced"),
            reductions=number("reductions", 1),
            reduced_backward=number("reduced_backward"),
            reductions_backward=number("reductions_backward", 1),
            gathered=number("gathered"),
            query=number("query"),
            key_value=number("key_value"),
            attentions=number("attentions", 1),
            routed=number("routed"),
            routers=number("routers", 1),
        )

    def save(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key in self._own or key in self._saved:
            return tensor
        self._saved[key] = tensor
        if key in self._casts:
            return tensor  # counted where it was made, once
        self.add("saved", tensor.untyped_storage().nbytes(), key in self._cut)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return _value_of(args[0], _storage(args[0]) in self._all)
        out = func(*args, **kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        if not outputs:
            return out
        cut = self._inside_cut > 0 or any(_storage(tensor) in self._cut for tensor in inputs)
        known = {_storage(tensor) for tensor in inputs}
        fresh = [tensor for tensor in outputs if _storage(tensor) not in known]
        if not fresh:
            return out  # a view, or in place
        if getattr(func, "overloadpacket", None) is torch.ops.aten.all:
            self._all.update((_storage(tensor), tensor) for tensor in fresh)
        if func is torch.ops.aten._to_copy.default and _storage(args[0]) in self._own:
            for tensor in fresh:
                if tensor.element_size() < args[0].element_size() and isinstance(args[0], Tensor):
                    self._casts[_storage(tensor)] = tensor, self._own[_storage(args[0])].requires_grad
                    self.add("cast", tensor.numel(), cut)
        for tensor in fresh:
            if cut:
                self._cut[_storage(tensor)] = tensor
            self.add("largest", tensor.untyped_storage().nbytes(), cut, largest=True)
        self.add("operations", 1)
        flops, backward = self._flops(func, args, kwargs, out, inputs)
        if flops:
            self.add("forward", flops, cut)
            self.add("backward", backward, cut)
        if func in SAVED_OPERATIONS:
            self.add("kept", sum(tensor.untyped_storage().nbytes() for tensor in fresh), cut)
        return out

    def _flops(self, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Tensor]) -> tuple[float, float]:
        packet = getattr(func, "overloadpacket", func)
        if packet is _ATTENTION:
            query, key = args[0], args[1]
            causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
            forward = 4 * query.numel() * key.shape[2] * (0.5 if causal else 1.0)
            self.add("query", query.numel() * query.element_size())
            self.add("key_value", 2 * self._distinct(key) * key.element_size())
            self.add("attentions", 1)
            self.query_heads = max(self.query_heads, query.shape[1])
            return forward, _FLASH_BACKWARD * forward
        if packet not in flop_registry:
            return 0.0, 0.0
        forward = flop_registry[packet](*args, **kwargs, out_val=out)
        keys = [_storage(tensor) for tensor in inputs]
        frozen = any(key in self._own and not self._own[key].requires_grad for key in keys)
        frozen |= any(key in self._casts and not self._casts[key][1] for key in keys)
        return forward, forward * (1.0 if frozen else 2.0)

    def _distinct(self, key: Tensor) -> float:
        """Elements of keys without the copies that grouped-query attention makes of them."""
        heads = getattr(self, "grouped_heads", 0)
        self.key_value_heads = max(self.key_value_heads, heads or key.shape[1])
        return key.numel() * (heads / key.shape[1] if heads and key.shape[1] > heads else 1.0)

    # --- modules -----------------------------------------------------------------------------------------------------

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles: list[Any] = []
        config = getattr(next((m for m in self.module.modules() if hasattr(m, "config")), None), "config", None)
        config = getattr(config, "text_config", config)
        self.grouped_heads = int(getattr(config, "num_key_value_heads", 0) or 0)
        shortcuts: list[nn.Module] = []
        for name in self.chain:
            child = self.module.get_submodule(name)
            handles.append(child.register_forward_pre_hook(self._entered(name), with_kwargs=True))
            handles.append(child.register_forward_hook(self._left(name)))
            shortcuts.append(child)
            own_forward = child.forward
            child.forward = self._once(name, child, own_forward)  # type: ignore[method-assign]
        if self.rules is not None:
            for name, rule in self.rules.rules.items():
                child = self.module.get_submodule(name)
                before, after = self._rule_hooks(rule)
                if before is not None:
                    handles.append(child.register_forward_pre_hook(before, with_kwargs=True))
                if after is not None:
                    handles.append(child.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for child in shortcuts:
                child.__dict__.pop("forward", None)

    def _entered(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self.current = name
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    self.add("received", tensor.untyped_storage().nbytes(), _storage(tensor) in self._cut)

        return hook

    def _left(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            if tensors:
                self.add("sent", tensors[0].numel() * tensors[0].element_size())
            self.finished.append(name)
            if name == self.chain[-1]:
                self.current = TAIL

        return hook

    def _once(self, name: str, child: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Runs the first of like modules; the others return tensors of the same shape and cost the same."""

        def run(*args: Any, **kwargs: Any) -> Any:
            key = (_likeness(child), tuple(_shape_of(leaf) for leaf in pytree.tree_leaves((args, kwargs))))
            if key not in self._seen:
                out = forward(*args, **kwargs)
                leaves, spec = pytree.tree_flatten(out)
                shapes = [_shape_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                self._seen[key] = ((shapes, spec), name)
                return out
            (shapes, spec), first = self._seen[key]
            leaves = [_like(shape) if isinstance(shape, tuple) else shape for shape in shapes]
            received = self.sums.setdefault(name, {}).get("received")
            self.sums[name] = {quantity: list(values) for quantity, values in self.sums[first].items()}
            if received is not None:
                self.sums[name]["received"] = received
            self.sums[name].pop("sent", None)
            return pytree.tree_unflatten(leaves, spec)

        return run

    def _rule_hooks(self, rule: Any) -> tuple[Callable[..., None] | None, Callable[..., None] | None]:
        def mark(tensor: Tensor, cut: bool) -> None:
            if cut:
                self._cut[_storage(tensor)] = tensor
            else:
                self._cut.pop(_storage(tensor), None)

        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._inside_cut += 1
            if rule in (*COLUMNS, "attention", "moe_tp_experts"):
                for tensor in pytree.tree_leaves((args, kwargs)):
                    if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.requires_grad:
                        if _storage(tensor) not in self._column_inputs:
                            self._column_inputs[_storage(tensor)] = tensor
                            self.add("reduced_backward", tensor.numel() * tensor.element_size())
                            self.add("reductions_backward", 1)
                        break

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            self._inside_cut -= 1
            for tensor in (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)):
                size = tensor.numel() * tensor.element_size()
                if rule in GATHERED:
                    mark(tensor, False)
                    self.add("gathered", size)
                elif rule in COLUMNS:
                    mark(tensor, True)
                else:
                    mark(tensor, False)
                    self.add("reduced", size)
                    self.add("reductions", 1)
                break

        if isinstance(rule, str) and rule in (*COLUMNS, *ROWS, *EMBEDDINGS, "attention", "moe_tp_experts"):
            return enter, leave
        return None, None


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Leaves attention's dropout out: with it, the CPU takes another way than a GPU and would keep whole matrices."""
    own = F.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **rest: Any) -> Any:
        return own(query, key, value, attn_mask, 0.0, **rest)

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


@contextmanager
def _without_experts(module: nn.Module, names: Sequence[str], book: _Book) -> Iterator[None]:
    """Experts pick their tokens by value, so their work is computed from shapes instead of being run."""
    changed: list[nn.Module] = []
    for name in names:
        experts = module.get_submodule(name)
        experts.forward = _expert_work(experts, book)  # type: ignore[method-assign]
        changed.append(experts)
    try:
        yield
    finally:
        for experts in changed:
            experts.__dict__.pop("forward", None)


def _expert_work(experts: nn.Module, book: _Book) -> Callable[..., Tensor]:
    fused = [parameter for parameter in experts.parameters() if parameter.dim() == 3]
    count = fused[0].shape[0] if fused else 1

    def forward(hidden: Tensor, chosen: Tensor | None = None, *_args: Any, **_kwargs: Any) -> Tensor:
        if not fused or chosen is None or not chosen.dim():
            raise NotImplementedError("experts that are not fused into one parameter each are not known to the advisor")
        tokens, width = hidden.numel() / hidden.shape[-1], hidden.shape[-1]
        each = tokens * chosen.shape[-1]
        elements = sum(parameter.numel() for parameter in fused) / count
        book.add("forward", 2 * each * elements, book._inside_cut > 0)
        book.add("backward", 4 * each * elements, book._inside_cut > 0)
        inner = sum(parameter.numel() / count / width for parameter in fused)  # widths between the matrices
        size = hidden.element_size()
        book.add("saved", each * (width + 1.5 * inner) * size, book._inside_cut > 0)
        book.add("kept", each * (width + inner) * size, book._inside_cut > 0)
        book.add("routed", each * width * size)
        book.add("routers", 1)
        book.add("operations", 8)
        return torch.empty_like(hidden).requires_grad_(hidden.requires_grad)

    return forward


def _likeness(module: nn.Module) -> Any:
    """Equal for modules that do the same work: classes, shapes and plain settings, without their place in a list."""
    parts = []
    for name, inner in module.named_modules():
        settings = tuple(
            (key, value)
            for key, value in vars(inner).items()
            if isinstance(value, int | float | str | bool) and key not in INDEX_NAMES
        )
        shapes = tuple((key, _shape_of(parameter)) for key, parameter in inner._parameters.items())
        parts.append((name, type(inner), settings, shapes))
    return tuple(parts)


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)


def _like(shape: tuple[torch.Size, torch.dtype, bool]) -> Tensor:
    tensor = torch.empty(shape[0], dtype=shape[1])
    return tensor.requires_grad_() if shape[2] else tensor


def _storage(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else 0


def _value_of(tensor: Tensor, everywhere: bool) -> float | int | bool:
    """What code that reads a value sees: zero, no; and yes to whether something holds everywhere (no padding)."""
    if tensor.dtype == torch.bool:
        return everywhere
    return 0.0 if tensor.is_floating_point() else 0


def _samples(batch: Any) -> int | None:
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    return None


def _fake_batch(batch: Any, mode: Any, dtype: torch.dtype | None) -> Any:
    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        wanted = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        with mode:
            return torch.empty(leaf.shape, dtype=wanted, device="cpu")

    return pytree.tree_map(fake, batch)


def _tensors_of(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    return [
        (tensors, name, tensor)
        for submodule in module.modules()
        for tensors in (submodule._parameters, submodule._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]


def _make_fake(module: nn.Module, mode: Any, dtype: torch.dtype | None) -> None:
    """Gives the module's tensors shapes on the CPU, without memory; ties stay."""
    made: dict[int, Tensor] = {}
    for tensors, name, tensor in _tensors_of(module):
        if id(tensor) not in made:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            with mode:
                fake: Tensor = torch.empty(tensor.shape, device="cpu", dtype=wanted)
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            made[id(tensor)] = fake
        tensors[name] = made[id(tensor)]


def _restore(originals: list[tuple[dict[str, Any], str, Tensor]]) -> None:
    for tensors, name, tensor in originals:
        tensors[name] = tensor
