"""Two networks on this machine, joined by one cable that can be made slow: needs root, ``ip`` and ``tc``."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

_HOSTS = ("10.177.0.1", "10.177.0.2")


def can_make_networks() -> bool:
    """Whether this process may, and has the tools."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


@contextlib.contextmanager
def two_networks(port: int = 29871) -> Iterator[list[str]]:
    """Makes the networks and gives the beginning of a command that runs a Python program as rank 0 in one and rank 1
    in the other; a program slows the cable down from inside with `slow_down`.

    Args:
        port: Of the rendezvous; the networks are new, so any is free.

    Raises:
        PermissionError: This process may not make networks.
    """
    if not can_make_networks():
        raise PermissionError("making network namespaces needs root, ip and tc")
    names = [f"lightning-{os.getpid()}-{side}" for side in range(2)]
    cables = [f"ld{os.getpid() % 100000}s{side}" for side in range(2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable, host in zip(names, cables, _HOSTS, strict=True):
            _run("ip", "link", "set", cable, "netns", name)
            inside = ("ip", "netns", "exec", name, "ip")
            _run(*inside, "addr", "add", f"{host}/24", "dev", cable)
            _run(*inside, "link", "set", cable, "up")
            _run(*inside, "link", "set", "lo", "up")
        start = " ".join(
            f"ip netns exec {name} env GLOO_SOCKET_IFNAME={cable} {sys.executable} -m torch.distributed.run --nnodes 2"
            f' --node-rank {side} --nproc-per-node 1 --master-addr {_HOSTS[0]} --master-port {port} "$@" &'
            for side, (name, cable) in enumerate(zip(names, cables, strict=True))
        )
        yield ["bash", "-c", f"{start} wait", "bash"]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def slow_down(megabits: int) -> None:
    """Limits what the calling process's network sends, in megabits a second (a token bucket)."""
    cable = os.environ["GLOO_SOCKET_IFNAME"]
    rate = ("rate", f"{megabits}mbit", "burst", "64kbit", "latency", "400ms")
    _run("tc", "qdisc", "add", "dev", cable, "root", "tbf", *rate)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
