"""Sequence parallelism: between the sharded parts of its blocks, a network holds each token on one rank only.

Norms, dropout and residuals then work on 1/size of the tokens, and so do the activations kept for backward. After
arXiv:2205.05198, section 4.2.2. Positions and masks are made before the first block and stay whole.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_dist.parallel.tensor.collectives import cut, gather, gather_for_both
from lightning_dist.parallel.tensor.shards import Forward, override_forward
from lightning_dist.parallel.tensor.styles import TensorGroup, first_argument


def cut_before(block: nn.Module, group: TensorGroup) -> None:
    """Lets the first block begin with this rank's part of the sequence; in backward, one all-gather per call."""
    dim = _dim(group)

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        hidden, put = _hidden(args, kwargs)
        if hidden.shape[dim] % group.size:
            raise ValueError(
                f"Sequence parallelism over {group.size} ranks does not fit a sequence of {hidden.shape[dim]} tokens:"
                f" pad batches to a multiple of {group.size}."
            )
        args, kwargs = put(cut(hidden, dim, group.group))
        return original(*args, **kwargs)

    override_forward(block, forward)


def gather_after(block: nn.Module, group: TensorGroup) -> None:
    """Lets the last block end with the whole sequence; one all-gather per call."""
    dim = _dim(group)

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        output = original(*args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        whole = gather(hidden, dim, hidden.shape[dim] * group.size, group.group)
        if whole._is_view():  # FSDP2 hangs its backward on a block's output, and warns of views
            whole = whole.clone()
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    override_forward(block, forward)


def draw_own_numbers(block: nn.Module, group: TensorGroup) -> None:
    """Makes dropout inside the block differ between ranks, which hold different tokens. No collectives."""

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        if not self.training:
            return original(*args, **kwargs)
        hidden, _ = _hidden(args, kwargs)
        with group.random.on(hidden.device):
            return original(*args, **kwargs)

    override_forward(block, forward)


def gather_inside(module: nn.Module, group: TensorGroup) -> None:
    """Lets attention or an MLP see the whole sequence, and return this rank's part.

    Collectives per call: an all-gather, and a reduce-scatter in backward; a module that returns the whole sequence
    gets it cut, which takes an all-gather in backward.
    """
    dim = _dim(group)

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        hidden, put = _hidden(args, kwargs)
        whole = gather_for_both(hidden, dim, group.group)
        args, kwargs = put(whole)
        output = original(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        if first.shape[dim] == whole.shape[dim]:
            first = cut(first, dim, group.group)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    override_forward(module, forward)


def _dim(group: TensorGroup) -> int:
    assert group.sequence_dim is not None
    return group.sequence_dim


def _hidden(args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
    """The hidden states of a call, and a function that puts others in their place."""
    if not args and "hidden_states" in kwargs:
        return kwargs["hidden_states"], lambda value: (args, {**kwargs, "hidden_states": value})
    hidden, rest, others = first_argument(args, kwargs)
    return hidden, lambda value: ((value, *rest), others)
