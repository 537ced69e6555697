"""The machines a layout would run on: devices, memory, links, and how fast one device computes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

_BYTES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_FLOPS = {"": 1.0, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}

INTRA_LATENCY = 5e-6
INTER_LATENCY = 15e-6
"""Seconds for one message inside a node and between nodes where nobody measured them: NVLink and InfiniBand class."""

ASSUMED_FLOPS = 400e12
"""What one device computes where nobody measured it: bf16 training on an H100 as published (40 % of its peak)."""

FLOPS_PER_BYTE = 150.0
"""Operations that a device computes in the time in which it reads a byte (A100, H100: about 150 at what they reach)."""


@dataclass(frozen=True)
class Link:
    """What one device can send over a kind of link while all its neighbours send too.

    Args:
        bandwidth: Bytes per second and device, one direction. A card shared by a node's devices counts for its share.
        latency: Seconds until a small message has arrived.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """What a plan is made for.

    Args:
        devices: Number of devices.
        devices_per_node: Devices that are joined by the fast link.
        memory: Bytes of one device; None if it is not known.
        intra: The link inside a node; None if it is not known.
        inter: The link between nodes; None if it is not known.
        flops: Floating-point operations per second that one device reaches in training (not its peak); None assumes
            :data:`ASSUMED_FLOPS` and says so.
        memory_bandwidth: Bytes per second that one device reads from its own memory; None takes what current GPUs have
            for their rate, :data:`FLOPS_PER_BYTE`.
        launch: Seconds that starting one operation takes, which bounds small models.
        usable: The part of the memory that tensors can have; the rest is left to the driver, to communication
            libraries and to fragmentation.
    """

    devices: int
    devices_per_node: int
    memory: float | None = None
    intra: Link | None = None
    inter: Link | None = None
    flops: float | None = None
    memory_bandwidth: float | None = None
    launch: float = 5e-6
    usable: float = 0.92

    def __post_init__(self) -> None:
        for name in ("devices", "devices_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} does not fit: give a whole number of at least 1.")
        if self.devices > self.devices_per_node and self.devices % self.devices_per_node:
            raise ValueError(
                f"devices={self.devices} does not fit devices_per_node={self.devices_per_node}: give whole nodes, a"
                f" multiple of {self.devices_per_node}."
            )

    @property
    def nodes(self) -> int:
        return max(1, self.devices // self.devices_per_node)

    @property
    def rate(self) -> float:
        return self.flops or ASSUMED_FLOPS

    @property
    def weight_bandwidth(self) -> float:
        """Bytes per second at which weights are read."""
        return self.memory_bandwidth or self.rate / FLOPS_PER_BYTE

    @property
    def usable_memory(self) -> float:
        """Bytes that tensors can have; without limit if the memory is not known."""
        return float("inf") if self.memory is None else self.memory * self.usable

    def of_size(self, devices: int) -> Cluster:
        """The same machines, fewer or more of them."""
        return replace(self, devices=devices)


def parse_bytes(text: str | float, argument: str) -> float:
    """Reads ``"80GB"``, ``"900GB/s"``, ``"64GiB"``, ``"400Gb/s"`` (bits) or a number, in bytes.

    Raises:
        ValueError: If it is no such quantity, or not positive.
    """
    if isinstance(text, int | float):
        value = float(text)
    else:
        found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?)?(b|bit)?(/s|ps)?\s*", text, re.IGNORECASE)
        if found is None or found[1].count(".") > 1:
            raise ValueError(f"{argument}={text!r} does not fit: write a number and a unit, such as 80GB or 50GB/s.")
        value = float(found[1]) * _BYTES[(found[2] or "").lower()]
        if found[3] == "bit" or (found[3] == "b" and (found[2] or "")[:1].isupper()):  # "Gb", as networks are sold
            value /= 8
    if value <= 0:
        raise ValueError(f"{argument}={text!r} does not fit: give more than zero.")
    return value


def parse_flops(text: str | float, argument: str) -> float:
    """Reads ``"400TFLOPS"``, ``"400T"`` or a number of floating-point operations per second.

    Raises:
        ValueError: If it is no such quantity, or not positive.
    """
    if isinstance(text, int | float):
        value = float(text)
    else:
        found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([mgtp])?(flops?)?(/s)?\s*", text, re.IGNORECASE)
        if found is None or found[1].count(".") > 1:
            raise ValueError(f"{argument}={text!r} does not fit: write a number and a unit, such as 400TFLOPS.")
        value = float(found[1]) * _FLOPS[(found[2] or "").lower()]
    if value <= 0:
        raise ValueError(f"{argument}={text!r} does not fit: give more than zero.")
    return value


def parse_link(bandwidth: str | float | None, latency: float | None, default: float, argument: str) -> Link | None:
    """A link of that bandwidth; None stays None: an unknown link is not made up."""
    if bandwidth is None:
        return None
    return Link(parse_bytes(bandwidth, argument), default if latency is None else latency)


def read_links(path: str | Path) -> tuple[Link | None, Link | None]:
    """The measured links inside a node and between nodes, from a file that ``lightning-dist doctor`` wrote.

    Raises:
        ValueError: If the file is no such file.
    """
    try:
        measured = json.loads(Path(path).read_text())["links"]
        links = [
            Link(float(entry["bandwidth"]), float(entry["latency"])) if entry else None
            for entry in (measured.get("intra"), measured.get("inter"))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"links={str(path)!r} can't be read ({type(error).__name__}: {error}); give a links.json that"
            " `lightning-dist doctor` wrote."
        ) from None
    return links[0], links[1]
