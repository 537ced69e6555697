"""The process on the other end of `WorkerPool`: imports torch and Lightning once, then runs what it is sent."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

# Real-time signals have no other user in Python programs; SIGUSR1 and SIGUSR2 belong to the code under test.
STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1)


@dataclass(frozen=True)
class Task:
    """One call on one rank: everything the worker needs, sent as bytes."""

    rank: int
    call: bytes  # pickled (function, args, kwargs), opened only once `search_path` is in place
    environment: dict[str, str | None]
    search_path: list[str]
    folder: str
    init_process_group: bool
    timeout: float


@dataclass(frozen=True)
class WorkerFailure:
    """How one rank failed.

    Attributes:
        rank: The rank that failed.
        kind: The exception's class name, ``"Died"`` for a process that ended, ``"Stuck"`` for one that did not answer.
        message: The exception's text, or what happened.
        traceback: The rank's Python traceback or stack as text; empty where there is none.
    """

    rank: int
    kind: str
    message: str
    traceback: str


def serve(connection: Connection, stack_file: str) -> None:
    """The worker's main loop: receive a task, answer, wait for every rank to be through, clean up."""
    os.setsid()  # its own process group, so that the pool can end it together with its data loader workers
    os.dup2(2, 1)  # whatever a worker prints goes to stderr: the caller's stdout may be read by a program
    threading.Thread(target=_end_with_the_parent, daemon=True, name="parent-watch").start()
    _import_heavy_modules()
    # A Trainer ends by putting back the handlers of all valid signals as Python knows them, which is not how the fault
    # handler installs its own: the signal would then end the process instead of showing its stack.
    others = signal.valid_signals() - {STACK_SIGNAL}
    signal.valid_signals = lambda: set(others)
    baseline = dict(os.environ)
    with open(stack_file, "w") as stacks:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True, chain=False)
        connection.send_bytes(pickle.dumps("ready"))
        while True:
            try:
                task: Task = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            with _restored_state(baseline):
                connection.send_bytes(_answer(task))
                # No rank takes its process group down while another may still be reading from it.
                try:
                    connection.recv_bytes()
                except EOFError:
                    return
            connection.send_bytes(pickle.dumps("ready"))


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _import_heavy_modules() -> None:
    import torch

    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "torch.distributed.fsdp", "torch.distributed.tensor", "lightning_dist"):
        importlib.import_module(name)


def _answer(task: Task) -> bytes:
    """Runs the task and returns the pickled outcome: ``("result", value)`` or ``("failure", WorkerFailure)``."""
    try:
        result = _run(task)
        try:
            return pickle.dumps(("result", result))
        except Exception as error:
            raise TypeError(f"The result of type {type(result).__name__} cannot be pickled: {error}") from error
    except BaseException as error:  # SystemExit and KeyboardInterrupt of the function under test are failures too
        failure = WorkerFailure(task.rank, type(error).__name__, str(error), traceback.format_exc())
        # Frees the tensors and groups that the traceback's frames hold; what is then closed lets the peers fail fast,
        # as the sockets of a dead process would.
        traceback.clear_frames(error.__traceback__)
    _destroy_process_groups()
    return pickle.dumps(("failure", failure))


def _run(task: Task) -> Any:
    import torch.distributed
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    for name, value in task.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.path[:] = task.search_path
    os.chdir(task.folder)
    rank_zero_only.rank = task.rank  # type: ignore[attr-defined]
    function: Callable[..., Any]
    function, args, kwargs = pickle.loads(task.call)
    if task.init_process_group:
        # The pool's own limit comes first, so that a hang is reported with stacks and not as a broken connection.
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=task.timeout + 30))
    return function(*args, **kwargs)


@contextlib.contextmanager
def _restored_state(environment: dict[str, str]) -> Iterator[None]:
    """Runs one task from a known state and takes back what it changed in the process."""
    import numpy
    import torch
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    folder = os.getcwd()
    search_path = list(sys.path)
    default_dtype = torch.get_default_dtype()
    rank_zero_rank = getattr(rank_zero_only, "rank", 0)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    try:
        yield
    finally:
        _destroy_process_groups()
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = search_path
        rank_zero_only.rank = rank_zero_rank  # type: ignore[attr-defined]
        torch.set_default_dtype(default_dtype)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


def _destroy_process_groups() -> None:
    import torch.distributed

    from lightning_dist._compat import clear_dtensor_caches

    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    clear_dtensor_caches()
    gc.collect()
