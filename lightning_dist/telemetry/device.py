"""What a device reports of itself, and what a step asks of it: memory, power, floating-point operations."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_dist import _compat

PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}
"""Dense bfloat16 (float16 on V100 and T4) operations a second, from the makers' data sheets; the first that fits."""

ENERGY = Path("/sys/class/powercap/intel-rapl:0/energy_uj")


def peak_flops(device: torch.device) -> float | None:
    """Operations a second that a device can do at most; None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def memory_of(device: torch.device) -> tuple[float, float]:
    """Bytes in use now and at the most: of a GPU's allocator, of this process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device)), float(torch.cuda.max_memory_allocated(device))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return most, most
    return float(pages * resource.getpagesize()), most


class EnergyMeter:
    """Energy used by a device (NVML, where its Python binding is installed) or processor package (RAPL).

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last_time, self._last_joules = time.monotonic(), self._package()

    def take(self) -> float | None:
        """Joules since the last call; None where nothing reports it. A GPU's is its power now times the time."""
        now, before = time.monotonic(), self._last_time
        self._last_time = now
        if self._device.type == "cuda":
            try:
                return torch.cuda.power_draw(self._device) / 1000 * (now - before)
            except (ModuleNotFoundError, RuntimeError):
                return None
        joules, last = self._package(), self._last_joules
        self._last_joules = joules
        return joules - last if joules is not None and last is not None and joules >= last else None

    @staticmethod
    def _package() -> float | None:
        try:
            return int(ENERGY.read_text()) / 1e6
        except (OSError, ValueError):
            return None


class _FlopCount(TorchDispatchMode):
    """torch's own formulas for each operation, without its bookkeeping of modules: a pipeline's stages confuse it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_compat.wraps_tensors(kind) for kind in types):
            return NotImplemented  # comes again, with the local tensors
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


@contextlib.contextmanager
def counted_flops() -> Iterator[_FlopCount]:
    """Counts the floating-point operations that this rank runs inside (``.flops``); slows them down."""
    with _FlopCount() as count:
        yield count
