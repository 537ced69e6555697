"""Real faults, on purpose: killed and stopped processes, flipped bits, disks that are full, broken, slow or stuck.

Use them on your own runs. Faults of processes and files act on anything; faults of storage act on the checkpoint
engine of this package, in the process that enters the context, at any single operation that it makes::

    with faults.full_disk(capacity=10_000_000):
        trainer.save_checkpoint("checkpoints/step_100")

    with faults.storage_fault("rename", faults.kill_this_process, file="step_*"):
        ...

    Trainer(callbacks=[faults.FaultAt(step=20, rank=1, action="kill")])
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fnmatch
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dist.checkpoint.storage import LocalStorage, RemoteStorage

Operation = Literal[
    "create",
    "write",
    "sync",
    "open",
    "read",
    "read_into",
    "rename",
    "copy_file",
    "remove_file",
    "remove_tree",
    "make_directory",
    "sync_directory",
]
OPERATIONS: tuple[Operation, ...] = Operation.__args__  # type: ignore[attr-defined]


class InjectedFault(RuntimeError):
    """What a fault of the kind "raise" raises."""


# --- processes -------------------------------------------------------------------------------------------------------


def kill(pid: int) -> None:
    """Ends a process at once, as the kernel does when memory runs out; it cannot clean up."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    """Freezes a process (SIGSTOP): it holds its connections and answers nothing. `resume` lets it go on."""
    os.kill(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    """Lets a stopped process go on."""
    os.kill(pid, signal.SIGCONT)


def hold_interpreter(seconds: float) -> None:
    """Sleeps while holding the interpreter's lock, as an extension that computes does: no other thread runs."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def kill_this_process(call: StorageCall | None = None) -> None:
    """Kills the calling process; also an action for `storage_fault`."""
    kill(os.getpid())


class FaultAt(Callback):
    """Makes one rank fail when it begins a step.

    Args:
        step: `trainer.global_step` at which the fault happens, before the batch is trained on.
        rank: The global rank that it happens on.
        action: "raise" an `InjectedFault`, "kill" the process, "stop" it (nothing resumes it), or "hold" the
            interpreter's lock for `seconds`.
        seconds: How long "hold" lasts.
        attempt: Only on this start of the run, counted from 0 as torchrun does, so that a restarted run gets past it.
    """

    def __init__(
        self,
        step: int,
        rank: int = 0,
        action: Literal["raise", "kill", "stop", "hold"] = "raise",
        seconds: float = 60.0,
        attempt: int = 0,
    ) -> None:
        if action not in ("raise", "kill", "stop", "hold"):
            raise ValueError(f"action is {action!r}; it can be 'raise', 'kill', 'stop' or 'hold'")
        self.step, self.rank, self.action, self.seconds, self.attempt = step, rank, action, seconds, attempt

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if trainer.global_step != self.step or trainer.global_rank != self.rank or attempt != self.attempt:
            return
        if self.action == "raise":
            raise InjectedFault(f"injected on rank {self.rank} at step {self.step}")
        if self.action == "kill":
            kill(os.getpid())
        elif self.action == "stop":
            stop(os.getpid())
        else:
            hold_interpreter(self.seconds)


# --- files -----------------------------------------------------------------------------------------------------------


def flip_bit(file: str | os.PathLike[str], bit: int | None = None) -> None:
    """Flips one bit of a file in place; `bit` counts from the file's start, None is one in the middle."""
    with open(file, "r+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size == 0:
            raise ValueError(f"{os.fspath(file)} is empty; it has no bit to flip")
        byte, within = divmod(size * 4 if bit is None else bit, 8)
        stream.seek(byte)
        value = stream.read(1)[0] ^ (1 << within)
        stream.seek(byte)
        stream.write(bytes([value]))


def truncate(file: str | os.PathLike[str], size: int | None = None) -> None:
    """Cuts a file to `size` bytes; None takes half of it away."""
    os.truncate(file, os.path.getsize(file) // 2 if size is None else size)


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """A real file system of `size` bytes that can really fill up (a tmpfs); needs the right to mount.

    Raises:
        PermissionError: This process may not mount; `full_disk` needs no rights.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PermissionError(f"cannot mount a tmpfs at {folder}") from error
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True, capture_output=True)


# --- storage ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StorageCall:
    """One operation that the checkpoint engine is about to make: what, on which path, with how many bytes."""

    operation: Operation
    path: str
    size: int = 0


@contextlib.contextmanager
def storage_fault(
    operation: Operation | Literal["any"],
    action: Callable[[StorageCall], None],
    *,
    file: str = "*",
    nth: int = 1,
    times: int | None = 1,
) -> Iterator[None]:
    """Runs `action` just before an operation of the checkpoint engine in this process; what it raises, that raises.

    Args:
        operation: Which operation, or "any".
        action: `kill_this_process`, `fail(errno.EIO)`, `wait(seconds)`, or a function of your own.
        file: Pattern that the last name of the path must match (`manifest.json`, `*.distcp`, `COMMITTED*`).
        nth: The first matching call that it happens at, counted from 1.
        times: For how many matching calls; None is for all that follow.
    """
    seen = 0
    lock = threading.Lock()

    def watch(call: StorageCall) -> None:
        nonlocal seen
        if operation not in ("any", call.operation) or not fnmatch.fnmatch(os.path.basename(call.path), file):
            return
        with lock:
            seen += 1
            due = seen >= nth and (times is None or seen < nth + times)
        if due:
            action(call)

    with _watched(watch):
        yield


@contextlib.contextmanager
def recorded_storage_calls() -> Iterator[list[StorageCall]]:
    """Records every operation of the checkpoint engine in this process: the list of points at which it could fail."""
    calls: list[StorageCall] = []
    with _watched(calls.append):
        yield calls


def fail(number: int) -> Callable[[StorageCall], None]:
    """An action that fails with an error of the operating system, for example `errno.EIO` or `errno.EACCES`."""

    def action(call: StorageCall) -> None:
        raise OSError(number, os.strerror(number), call.path)

    return action


def wait(seconds: float) -> Callable[[StorageCall], None]:
    """An action that takes a while and then lets the operation happen: a stalled disk."""

    def action(call: StorageCall) -> None:
        time.sleep(seconds)

    return action


@contextlib.contextmanager
def full_disk(capacity: int) -> Iterator[None]:
    """Lets the checkpoint engine write `capacity` bytes more in this process; then the disk is full (ENOSPC)."""
    left = capacity
    lock = threading.Lock()

    def write(original: Callable[..., None], storage: Any, stream: Any, data: memoryview) -> None:
        nonlocal left
        with lock:
            fits = min(left, data.nbytes)
            left -= fits
        original(storage, stream, data[:fits])
        if fits < data.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), _path_of(stream))

    with _wrapped("write", write):
        yield


@contextlib.contextmanager
def failing_disk(file: str = "*") -> Iterator[None]:
    """Every write of the checkpoint engine in this process to a file of that name fails with EIO."""
    with storage_fault("write", fail(errno.EIO), file=file, times=None):
        yield


@contextlib.contextmanager
def slow_disk(bytes_per_second: float) -> Iterator[None]:
    """Slows every write of the checkpoint engine in this process down to a rate."""

    def action(call: StorageCall) -> None:
        time.sleep(call.size / bytes_per_second)

    with storage_fault("write", action, times=None):
        yield


@contextlib.contextmanager
def _watched(watch: Callable[[StorageCall], None]) -> Iterator[None]:
    def around(operation: Operation) -> Callable[..., Any]:
        def call(original: Callable[..., Any], storage: Any, target: Any, *rest: Any) -> Any:
            size = rest[0].nbytes if operation == "write" else 0
            watch(StorageCall(operation, _path_of(target), size))
            return original(storage, target, *rest)

        return call

    with contextlib.ExitStack() as stack:
        for operation in OPERATIONS:
            stack.enter_context(_wrapped(operation, around(operation)))
        yield


@contextlib.contextmanager
def _wrapped(operation: Operation, around: Callable[..., Any]) -> Iterator[None]:
    """Puts `around(original, storage, *args)` in the place of an operation of both kinds of storage."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda storage, *args: around(original, storage, *args)

    originals = {kind: getattr(kind, operation) for kind in (LocalStorage, RemoteStorage)}
    for kind, original in originals.items():
        setattr(kind, operation, wrap(original))
    try:
        yield
    finally:
        for kind, original in originals.items():
            setattr(kind, operation, original)


def _path_of(target: Any) -> str:
    if isinstance(target, str):
        return target
    return str(getattr(target, "name", None) or getattr(target, "path", ""))
