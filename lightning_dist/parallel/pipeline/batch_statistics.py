"""Running statistics of batch normalisation, moved once for each batch and not once for each microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchStatistics:
    """Normalises each microbatch by its own statistics and moves the running ones once, by those of the whole batch.

    Each microbatch gets running buffers as they were at the batch's start, and torch moves them by that microbatch's
    mean and variance, which are so read off. At the end the batch's mean and (unbiased)
    variance are put together from them and the buffers moved once, by the module's momentum.

    Args:
        stages: The modules to look through.
    """

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        self._norms = [
            module
            for stage in stages
            for module in stage.modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats and module.running_mean is not None
        ]

    @contextmanager
    def collect(self, sizes: Sequence[int]) -> Iterator[None]:
        """Runs one batch inside."""
        if not self._norms:
            yield
            return
        records = [_Record(norm) for norm in self._norms]
        try:
            yield
        finally:
            for record in records:
                record.finish()


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class _Record:
    """One norm's statistics during one batch.

    Each microbatch moves buffers of its own: backward still needs those of its forward, and checks that nobody has
    written into them.
    """

    def __init__(self, norm: _BatchNorm) -> None:
        self._norm = norm
        self._start = [self._buffer(name) for name in _BUFFERS]
        self._seen: list[tuple[int, Tensor, Tensor]] = []
        self._handles = [norm.register_forward_pre_hook(self._before), norm.register_forward_hook(self._after)]

    def _buffer(self, name: str) -> Tensor:
        buffer = self._norm._buffers[name]
        assert buffer is not None
        return buffer

    def _before(self, norm: nn.Module, inputs: Any) -> None:
        for name, start in zip(_BUFFERS, self._start, strict=True):
            norm._buffers[name] = start.clone() if norm.training else start

    def _after(self, norm: nn.Module, inputs: Any, output: Tensor) -> None:
        if not norm.training:
            return
        values = inputs[0].numel() // inputs[0].shape[1]
        if isinstance(norm, nn.SyncBatchNorm) and dist.is_initialized():
            values *= dist.get_world_size(norm.process_group)
        # Kept as the moved buffers; taken apart at the end, all microbatches at once.
        self._seen.append((values, self._buffer("running_mean"), self._buffer("running_var")))

    def finish(self) -> None:
        for handle in self._handles:
            handle.remove()
        for name, start in zip(_BUFFERS, self._start, strict=True):
            self._norm._buffers[name] = start
        if not self._seen:
            return
        old_mean, old_variance, tracked = self._start
        momentum = self._norm.momentum
        factor: Any = momentum if momentum is not None else 1.0 / (tracked.double() + 1)
        total = sum(values for values, _, _ in self._seen)
        means = [(moved - (1 - factor) * old_mean) / factor for _, moved, _ in self._seen]
        variances = [(moved - (1 - factor) * old_variance) / factor for _, _, moved in self._seen]
        mean = torch.stack([seen[0] / total * part for seen, part in zip(self._seen, means, strict=True)]).sum(0)
        spread = torch.stack(
            [
                (seen[0] - 1) * variance + seen[0] * (part - mean) ** 2
                for seen, variance, part in zip(self._seen, variances, means, strict=True)
            ]
        ).sum(0)
        old_mean.copy_((1 - factor) * old_mean + factor * mean)
        old_variance.copy_((1 - factor) * old_variance + factor * spread / max(total - 1, 1))
        tracked.add_(1)
        self._seen.clear()
