"""A rank's side of its watchdog: starts it, tells it what the rank does, and hands it the reason of a crash."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from lightning_dist.telemetry.watchdog.heartbeat import (
    ABORT,
    CLOSED,
    CRASHED,
    ENABLED,
    EXITING,
    HeartbeatPage,
    RunningThread,
)
from lightning_dist.telemetry.watchdog.limits import limits_from

# Real-time signals have no other user in Python programs; the first ones are taken by the test kit's workers.
STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 3

# The package itself imports torch and Lightning: the side process gets its parts only.
_PROGRAM = """
import sys, types
for name, path in {packages!r}:
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module
from lightning_dist.telemetry.watchdog.process import main
main()
"""


class RankWatchdog:
    """Starts the side process and writes the rank's page.

    Args:
        rank, world_size, local_rank: This rank.
        folder: Where reports go; rank 0's counts.
        place: Mesh coordinates and host, in words.
        counts: Gives the number of collectives by group; called in a thread.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        folder: str | os.PathLike[str],
        place: str,
        counts: Callable[[], dict[str, int]],
    ) -> None:
        self._private = Path(tempfile.mkdtemp(prefix="lightning-dist-watchdog-", dir=_memory_folder()))
        self._crash_file = self._private / "crash.txt"
        self.page = HeartbeatPage(self._private / "page", create=True)
        self.rank = rank
        self._stacks = (self._private / "stacks").open("w")
        self.token = secrets.token_hex(16)
        self.register_stack_signal()
        self._settings = {
            "rank": rank,
            "world_size": world_size,
            "local_rank": local_rank,
            "pid": os.getpid(),
            "page": str(self.page.path),
            "folder": str(folder),
            "place": f"{place}, {socket.gethostname()}".lstrip(", "),
            "crash_file": str(self._crash_file),
            "stack_file": self._stacks.name,
            "stack_signal": int(STACK_SIGNAL),
            "listen": "127.0.0.1"
            if world_size == int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or world_size == 1
            else "",
        }
        self._process: subprocess.Popen[str] | None = None
        self._counts = counts
        self._thread: RunningThread | None = None
        if rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)

    def start(self, share: Callable[[tuple[str, int, str]], tuple[str, int, str]], host: str) -> None:
        """Starts the process and has it meet the others.

        Args:
            share: Gives every rank what rank 0 has; all ranks call this together.
            host: Where the others reach rank 0's machine.
        """
        root = Path(__file__).parents[2]
        packages = [("lightning_dist", str(root)), ("lightning_dist.telemetry", str(root / "telemetry"))]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM.format(packages=packages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        address = (host, 0, self.token)
        if self.rank == 0:
            self._say(self._settings | {"token": self.token})
            address = (host, json.loads(self._process.stdout.readline())["port"], self.token)
        host, port, token = share(address)
        if self.rank != 0:
            self._say(self._settings | {"token": token})
        self._say({"host": "127.0.0.1" if self._settings["listen"] or self.rank == 0 else host, "port": port})
        self._thread = RunningThread(self.page, self._counts)
        atexit.register(self._at_exit)

    def register_stack_signal(self) -> None:
        """Has the fault handler answer the watchdog's signal; again where something has put handlers back."""
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True, chain=False)

    def configure(self, hang_timeout: object, abort: bool, enabled: bool = True) -> None:
        """Sets limits and action; at any time."""
        self.page.set_limits(limits_from(hang_timeout))
        self.page.set_flags(ABORT, abort)
        self.page.set_flags(ENABLED, enabled)

    def crash(self, error: BaseException) -> None:
        """Publishes the traceback of an exception that ends this rank's run."""
        what = f"{cause_of(error)}: {type(error).__name__}: {error}".replace("\n", " ")
        text = "".join(traceback.format_exception(error))
        self._crash_file.write_text(f"{what}\n{text}")
        self.page.set_flags(CRASHED)

    def close(self) -> None:
        """The run has ended in order, or has crashed and said so: the watchdog ends."""
        if self._process is None:
            return
        self.page.set_flags(CLOSED)
        if self._thread is not None:
            self._thread.stop()
        atexit.unregister(self._at_exit)
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Rank 0's stays for the others where they have not ended yet; it must not keep this process.
            self._process.wait(3.0)
        self._process = None
        faulthandler.unregister(STACK_SIGNAL)
        self._stacks.close()
        for file in self._private.glob("*"):
            file.unlink()
        self._private.rmdir()

    def _say(self, message: Mapping[str, object]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _at_exit(self) -> None:
        self.page.set_flags(EXITING)


def cause_of(error: BaseException) -> str:
    """An exception's kind, in words: out of memory, exited, or raised."""
    if isinstance(error, SystemExit):
        return "exited"
    text = str(error).lower()
    memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return "out of memory" if memory or "out of memory" in text or "can't allocate memory" in text else "raised"


def launcher_restarts() -> bool:
    """Whether whoever started this job starts it again after it failed: torchrun with restarts left, SLURM requeue."""
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    done = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return done < most or "SLURM_RESTART_COUNT" in os.environ


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
