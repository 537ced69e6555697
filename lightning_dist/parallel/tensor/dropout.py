"""Random numbers inside tensor-parallel work: equal where activations are replicated, different where they are cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_MASK = (1 << 63) - 1


class RandomRegion:
    """A stretch of work on activations that are cut over a tensor group, such as query projection to output projection.

    Inside, the default generator of the device gives numbers of this rank's own, derived from the common state, so that
    recomputing the stretch (activation checkpointing) draws the same ones. Afterwards the common stream goes on, a
    fixed step further, as on every other rank. After Megatron-LM's model-parallel random state (arXiv:1909.08053, B.2).
    Without it, all ranks would drop the same positions of their different heads.

    No collectives, no wait for the device.

    Args:
        rank: This rank's place in the tensor group.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._common: tuple[torch.device, torch.Tensor] | None = None

    def enter(self, device: torch.device) -> None:
        """Switches to this rank's own numbers; does nothing where the region has been entered already."""
        if self._common is None and not torch.compiler.is_compiling():
            self._common = (device, _fork(device, self._rank))

    def leave(self) -> None:
        """Goes back to the common numbers; does nothing outside of a region."""
        if self._common is not None:
            _restore(*self._common)
            self._common = None

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """The region as a block of code."""
        self.enter(device)
        try:
            yield
        finally:
            self.leave()


def _fork(device: torch.device, rank: int) -> torch.Tensor:
    """Sets this rank's own numbers and returns the common state to go on with."""
    if device.type != "cuda":
        drawn = int(torch.randint(_MASK, ()))
        common = torch.get_rng_state()
        torch.default_generator.manual_seed(_mix(drawn, rank))
        return common
    # Philox: seed and offset, 8 bytes each, kept on the host; a draw would have to be read back from the device.
    common = torch.cuda.get_rng_state(device)
    numbers = common.view(torch.int64)
    own = common.clone()
    # The offset goes into the seed: ranks may draw different amounts, and no region may go on where another began.
    own.view(torch.int64)[0] = _mix(int(numbers[0]), int(numbers[1]), rank)
    own.view(torch.int64)[1] = 0
    torch.cuda.set_rng_state(own, device)
    numbers[1] += 4  # torch wants multiples of 4
    return common


def _mix(*numbers: int) -> int:
    """A seed that differs in about half of its bits where one of ``numbers`` differs (splitmix64)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        mixed ^= mixed >> 31
    return mixed & _MASK


def _restore(device: torch.device, common: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(common, device)
    else:
        torch.set_rng_state(common)
