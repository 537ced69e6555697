"""Cross entropy on logits that are cut along the classes: no rank holds a whole row of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lightning_dist.parallel.tensor.collectives import part_sizes
from lightning_dist.parallel.tensor.shards import Forward, override_forward


class sharded_loss(TorchFunctionMode):
    """Inside, ``F.cross_entropy`` takes logits that are a DTensor cut along the classes, and returns a plain loss.

    The same numbers as on whole logits, with a part of their memory; backward may happen outside. Torch's
    ``loss_parallel()`` needs to be around backward too and makes several copies of the logits (measured in
    tests/parallel/tensor/test_loss_parallel.py). After Megatron-LM's vocabulary-parallel cross entropy
    (arXiv:1909.08053, section 3). A network whose plan says ``"loss_parallel"`` enters it in its forward by itself.

    Collectives per call: two all-reduces of one or two numbers for each row, over the tensor group; none in backward.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            logits = args[0] if args else kwargs["input"]
            if isinstance(logits, DTensor) and logits.placements == (Shard(min(1, logits.dim() - 1)),):
                return _cross_entropy(*args, **kwargs)
        return func(*args, **kwargs)


def return_plain_loss(network: nn.Module) -> None:
    """Lets the network's own loss be computed on sharded logits, and its output hold no DTensor but the logits."""

    def plain(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) and value.dim() == 0 else value

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        with sharded_loss():
            output = original(*args, **kwargs)
        return tree_map(plain, output)

    override_forward(network, forward)


def _cross_entropy(
    input: DTensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    if weight is not None or not (isinstance(target, DTensor) or target.dtype in (torch.int64, torch.uint8)):
        raise NotImplementedError(
            "cross_entropy on logits that are cut along the classes takes class numbers as targets and no class"
            " weights; give the head the style 'colwise_gather_output' instead of 'loss_parallel'."
        )
    classes = input.shape[min(1, input.dim() - 1)]
    mesh = input.device_mesh
    target = target.full_tensor() if isinstance(target, DTensor) else target
    logits = input.to_local()
    rows = logits.movedim(1, -1).flatten(0, -2) if logits.dim() > 1 else logits[None]  # [rows, own classes]
    counted = target != ignore_index
    start = sum(part_sizes(classes, mesh.size())[: mesh.get_local_rank()])
    own = torch.where(counted, target, 0).reshape(-1)
    losses = _ShardedCrossEntropy.apply(rows, own - start, classes, label_smoothing, mesh.get_group())
    losses = torch.where(counted.reshape(-1), losses, 0.0)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


class _ShardedCrossEntropy(torch.autograd.Function):
    """The loss of each row, given this rank's classes and each row's target counted from the first of them."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, classes: int, smoothing: float, group: dist.ProcessGroup
    ) -> Tensor:
        own = (target >= 0) & (target < logits.shape[-1])
        place = torch.where(own, target, 0)
        # A rank without classes has nothing to look up.
        chosen = logits.gather(-1, place[:, None])[:, 0] if logits.shape[-1] else logits.new_zeros(len(logits))
        partial = torch.logsumexp(logits, dim=-1)
        largest = partial.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        parts = [(partial - largest).exp(), torch.where(own, chosen, 0.0)]
        if smoothing:
            parts.append(logits.sum(dim=-1))
        sums = torch.stack(parts)
        dist.all_reduce(sums, group=group)
        log_total = largest + sums[0].log()
        ctx.save_for_backward(logits, log_total, own, place)
        ctx.smoothing, ctx.classes = smoothing, classes
        losses = log_total - (1 - smoothing) * sums[1]
        return losses - smoothing / classes * sums[2] if smoothing else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, log_total, own, place = ctx.saved_tensors
        result = (logits - log_total[:, None]).exp_()  # the probabilities
        if ctx.smoothing:
            result -= ctx.smoothing / ctx.classes
        if logits.shape[-1]:
            result.scatter_add_(-1, place[:, None], own.to(result.dtype).mul_(ctx.smoothing - 1.0)[:, None])
        return result.mul_(gradient[:, None]), None, None, None, None
