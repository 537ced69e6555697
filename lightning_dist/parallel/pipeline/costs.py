"""What each module of the chain costs, to balance stages by."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_dist.parallel.pipeline.trace import Trace


def module_costs(module: nn.Module, chain: Sequence[str], trace: Trace | None = None) -> list[float]:
    """The cost of each module of the chain: operations of its forward where one was traced, else its parameters.

    Parameters stand for operations: a weight is used once for each token. The rows of a lookup table are not, so an
    embedding counts one row, and an output head, tied or not, its whole matrix.

    Args:
        module: The module that the chain's names are relative to; on meta is enough.
        chain: Module names.
        trace: A complete trace of one step, if there is one.
    """
    if trace is not None and trace.incomplete is None and any(trace.flops.values()):
        return [float(trace.flops.get(position, 0)) for position in range(len(chain))]
    return [_parameters_used(module.get_submodule(name)) for name in chain]


def _parameters_used(module: nn.Module) -> float:
    total = 0.0
    for inner in module.modules():
        table = isinstance(inner, nn.Embedding | nn.EmbeddingBag)
        for parameter in inner.parameters(recurse=False):
            total += parameter.shape[-1] if table else parameter.numel()
    return total
