"""The tensor-parallel styles of single modules, by the names that Hugging Face's plans use.

Each takes a module and changes how it holds its parameters (DTensors on the tensor mesh) and what its forward does at
its borders. In between, code runs on plain tensors: this rank's heads, this rank's part of the hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lightning_dist.parallel.tensor.collectives import cut, gather, part_sizes, sum_and_cut, sum_gradients_of, sum_parts
from lightning_dist.parallel.tensor.dropout import RandomRegion
from lightning_dist.parallel.tensor.shards import (
    Forward,
    RowExchange,
    as_dtensor,
    distribute_parameter,
    local_parameters,
    local_part,
    override_forward,
    replicate_parameters,
    shown_as,
)


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share each layer, and how activations lie between the layers' sharded parts.

    Args:
        mesh: One-dimensional mesh of the tensor axis.
        random: Where this rank's own random numbers come from inside sharded work.
        sequence_dim: The dimension along which activations between sharded parts are cut (sequence parallelism), or
            None where they are replicated.
    """

    mesh: DeviceMesh
    random: RandomRegion
    sequence_dim: int | None = None

    @cached_property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @cached_property
    def size(self) -> int:
        return self.mesh.size()

    @cached_property
    def rank(self) -> int:
        return self.mesh.get_local_rank()


def cut_columns(
    module: nn.Module,
    group: TensorGroup,
    *,
    gather_output: bool = False,
    keep_dtensor: bool = False,
    rows: Sequence[Tensor] | None = None,
    own_random: bool = False,
) -> None:
    """Cuts a matrix by its outputs: replicated input, this rank's part of the output.

    Collectives per call: in backward, an all-reduce of the input's gradient (one for all that share the input); with
    ``gather_output``, an all-gather of the output; with ``rows``, an all-to-all of the weights, and one in backward.

    Args:
        module: ``nn.Linear`` or GPT-2's ``Conv1D``.
        group: The tensor group.
        gather_output: Join the parts of the output.
        keep_dtensor: Return the output as a DTensor cut along its last dimension (sharded logits).
        rows: For each rank, the outputs it computes, where these are not an equal cut in order.
        own_random: Sharded work begins here and a later :func:`cut_rows` ends it.
    """
    output_dim, _ = matrix_dims(module)
    width = output_width(module)
    exchange = None if rows is None else RowExchange(list(rows), width, group.group)
    local_width = part_sizes(width, group.size)[group.rank] if rows is None else len(rows[group.rank])
    _distribute_matrix(module, group, Shard(output_dim), Shard(0))
    if is_conv1d(module):
        module.nf = local_width  # type: ignore[assignment]

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        x, args, kwargs = first_argument(args, kwargs)
        x = sum_gradients_of(plain_replica(x), group.group)
        values = local_parameters(self)
        if exchange is not None:
            values = {name: exchange(value, output_dim if name == "weight" else 0) for name, value in values.items()}
        if own_random and self.training:
            group.random.enter(x.device)
        with shown_as(self, values):
            output = original(x, *args, **kwargs)
        if keep_dtensor:
            return as_dtensor(output, group.mesh, Shard(output.dim() - 1), (*output.shape[:-1], width))
        return gather(output, -1, width, group.group) if gather_output else output

    override_forward(module, forward)


def cut_rows(module: nn.Module, group: TensorGroup, *, split_input: bool = False, ends_random: bool = False) -> None:
    """Cuts a matrix by its inputs: this rank's part of the input, the sum of all parts as output.

    Collectives per call: an all-reduce of the output, or under sequence parallelism a reduce-scatter (and an
    all-gather in backward); with ``split_input``, an all-gather of the input's gradient in backward.

    Args:
        module: ``nn.Linear`` or GPT-2's ``Conv1D``.
        group: The tensor group.
        split_input: The input is replicated, and cut here.
        ends_random: See ``own_random`` of :func:`cut_columns`.
    """
    _, input_dim = matrix_dims(module)
    _distribute_matrix(module, group, Shard(input_dim), Replicate())
    conv1d = is_conv1d(module)

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        x, _, _ = first_argument(args, kwargs)
        if split_input:
            x = cut(plain_replica(x), -1, group.group)
        weight = local_part(self, "weight")
        assert weight is not None
        output = x @ weight if conv1d else F.linear(x, weight)
        if group.sequence_dim is None:
            output = sum_parts(output, group.group)
            bias = local_part(self, "bias")
        else:
            output = sum_and_cut(output, group.sequence_dim, group.group)
            # Each rank adds the bias to its tokens only, so its gradient is a part of the sum.
            bias = local_part(self, "bias", Partial())
        if ends_random:
            group.random.leave()
        return output if bias is None else output + bias.to(output.dtype)

    override_forward(module, forward)


def cut_vocabulary(module: nn.Embedding, group: TensorGroup) -> None:
    """Cuts an embedding by its rows: each rank looks up the tokens it holds, and the sum is everybody's.

    Collectives per call: an all-reduce of the output.
    """
    rows = module.num_embeddings
    sizes = part_sizes(rows, group.size)
    start, count = sum(sizes[: group.rank]), sizes[group.rank]
    padding = module.padding_idx
    own_padding = padding - start if padding is not None and start <= padding < start + count else None
    distribute_parameter(module, "weight", group.mesh, Shard(0))

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        tokens, args, kwargs = first_argument(args, kwargs)
        own = tokens - start
        foreign = (own < 0) | (own >= count)
        with shown_as(self, {**local_parameters(self), "padding_idx": own_padding}):
            output = original(own.masked_fill(foreign, 0), *args, **kwargs)
        return sum_parts(output.masked_fill(foreign.unsqueeze(-1), 0), group.group)

    override_forward(module, forward)


def cut_embedding_width(module: nn.Embedding, group: TensorGroup) -> None:
    """Cuts an embedding by its columns and joins the parts of the output.

    Collectives per call: an all-gather of the output.
    """
    width = module.embedding_dim
    distribute_parameter(module, "weight", group.mesh, Shard(1))

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        with shown_as(self, local_parameters(self)):
            return gather(original(*args, **kwargs), -1, width, group.group)

    override_forward(module, forward)


def replicate(module: nn.Module, group: TensorGroup) -> None:
    """Whole parameters on replicated activations: every rank computes the same. No collectives."""
    replicate_parameters(module, group.mesh)


def replicate_on_parts(module: nn.Module, group: TensorGroup) -> None:
    """Whole parameters on activations that are cut by heads, width or sequence.

    Each rank's gradient is a part of the sum; it is typed so (``Partial``), and summed once before the optimizer
    step by `sum_replicated_gradients`, whatever the number of backward passes. No collectives of its own.
    """
    replicate_parameters(module, group.mesh, Partial())


def sum_output(module: nn.Module, group: TensorGroup) -> None:
    """Sums the output of a module whose ranks each computed a part of it: one all-reduce per call."""

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        output = original(*args, **kwargs)
        return None if output is None else sum_parts(output, group.group)

    override_forward(module, forward)


def divide_input(module: nn.Module, group: TensorGroup) -> None:
    """Divides the input by the group's size, for an identity inside experts whose outputs will be summed."""

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        x, args, kwargs = first_argument(args, kwargs)
        return original(x / group.size, *args, **kwargs)

    override_forward(module, forward)


def replicate_with_rotary_tail(module: nn.Module, group: TensorGroup, rotary_size: int) -> None:
    """A replicated projection whose last ``rotary_size`` outputs go straight to this rank's heads (DeepSeek's MLA).

    Collectives per call: in backward, an all-reduce of the tail's gradient.
    """
    replicate_parameters(module, group.mesh)

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        output = original(*args, **kwargs)
        compressed, rotary = output.split([output.shape[-1] - rotary_size, rotary_size], dim=-1)
        return torch.cat([compressed, sum_gradients_of(rotary, group.group)], dim=-1)

    override_forward(module, forward)


def cut_parameters(module: nn.Module, group: TensorGroup, placements: Mapping[str, Placement]) -> None:
    """Runs a module on its parts of parameters that a plan names one by one, such as attention sinks per head."""
    for name, placement in placements.items():
        distribute_parameter(module, name, group.mesh, placement)

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        with shown_as(self, local_parameters(self)):
            return original(*args, **kwargs)

    override_forward(module, forward)


def close_random_region(block: nn.Module, group: TensorGroup) -> None:
    """Ends the sharded work of a block with it, also where an exception leaves it half-way.

    Activation checkpointing does that each time: it stops the repeated forward once it has what backward needs.
    """

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            group.random.leave()

    override_forward(block, forward)


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is GPT-2's linear layer with a transposed weight (transformers' ``Conv1D``)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def matrix_dims(module: nn.Module) -> tuple[int, int]:
    """The dimensions of ``module.weight`` that hold outputs and inputs."""
    return (1, 0) if is_conv1d(module) else (0, 1)


def output_width(module: nn.Module) -> int:
    """The number of outputs of a matrix, over all ranks."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.shape[matrix_dims(module)[0]]


def first_argument(args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """The first argument of a call and the rest; it may have been given by name."""
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(kwargs))
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}


def plain_replica(x: Tensor) -> Tensor:
    """A replicated activation as a plain tensor whose gradient will be equal on all ranks."""
    if isinstance(x, DTensor):
        return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()
    return x


def _distribute_matrix(module: nn.Module, group: TensorGroup, weight: Shard, bias: Shard | Replicate) -> None:
    distribute_parameter(module, "weight", group.mesh, weight)
    if module._parameters.get("bias") is not None:
        distribute_parameter(module, "bias", group.mesh, bias)
