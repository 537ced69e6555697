"""Numbers from a device, read one step later so that nobody waits for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostValues:
    """Starts a copy of a step's numbers and gives those of the step before.

    On a CPU the numbers are there at once and are given at once.
    """

    def __init__(self) -> None:
        self._waiting: tuple[list[str], Tensor, torch.cuda.Event, dict[str, float]] | None = None

    def read(self, values: Mapping[str, Tensor | float]) -> dict[str, float]:
        """The numbers of these values where they lie on the host, else of those that were given before.

        Args:
            values: Scalars by name; tensors of any floating or integer type with one element.
        """
        own = {
            name: float(value) for name, value in values.items() if not (isinstance(value, Tensor) and value.is_cuda)
        }
        distant = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.is_cuda}
        earlier = self.finish()
        if not distant:
            return {**earlier, **own}
        together = torch.stack([value.detach().double().reshape(()) for value in distant.values()])
        host = torch.empty(len(distant), dtype=torch.float64, pin_memory=True)
        host.copy_(together, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting = (list(distant), host, event, own)
        return earlier

    def finish(self) -> dict[str, float]:
        """What still waits, at the end of a run or an evaluation."""
        if self._waiting is None:
            return {}
        names, host, event, own = self._waiting
        self._waiting = None
        event.synchronize()
        return {**own, **dict(zip(names, host.tolist(), strict=True))}
