"""Warm worker processes that run functions as the ranks of a distributed job."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_dist.testing.worker import STACK_SIGNAL, Task, WorkerFailure, serve

_START_LIMIT = 300.0  # seconds for a worker to import torch and Lightning, on a busy machine too
_CLEANUP_LIMIT = 15.0  # seconds for a worker to destroy its process groups


class WorkerError(RuntimeError):
    """Raised by `WorkerPool.run` when a rank raised, died, or was left waiting for one that did.

    Attributes:
        failures: One `WorkerFailure` per rank that did not finish, the first to fail first.
    """

    def __init__(self, message: str, failures: list[WorkerFailure]) -> None:
        super().__init__(message)
        self.failures = failures


class WorkerPool:
    """Worker processes, started once, that run a function as ranks 0 to ``world_size - 1``.

    Starting a process and importing torch and Lightning takes seconds; a pool pays for it once. Workers are started
    lazily up to the largest world asked for, with one thread each. Every run gets fresh process groups (Gloo), a
    fresh rendezvous store on a port chosen by the system, the environment that ``torchrun`` would set, the same
    random seed, and the caller's folder and search path. After a run each worker destroys its groups and takes back
    changes to the environment, signal handlers and default dtype. What workers print goes to stderr. A worker that
    outlives its limit or that dies takes the pool down with it; the next run starts new workers. Workers end with
    the process that owns the pool.

    A script that uses a pool needs the usual ``if __name__ == "__main__":`` guard, since workers are spawned.

    Args:
        max_workers: The largest world this pool will start.
        grace: Seconds that the other ranks have to finish or fail after one rank failed.

    Example::

        with WorkerPool() as pool:
            sums = pool.run(sum_of_ranks, 2)  # def sum_of_ranks() at the top level of an importable module
    """

    def __init__(self, max_workers: int = 8, grace: float = 5.0) -> None:
        self.max_workers = max_workers
        self.grace = grace
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="lightning-dist-pool-")
        self._lock = threading.Lock()
        # atexit runs last in, first out: this comes before multiprocessing would wait for the workers.
        atexit.register(_shut_down, weakref.ref(self))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Kills every worker together with the processes it started; a later `run` starts new ones."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()

    @property
    def process_ids(self) -> list[int]:
        """The process ids of the workers that are running, in rank order."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        env: Mapping[str, str | None] | None = None,
        init_process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls ``function(*args, **kwargs)`` on ranks 0 to ``world_size - 1`` and returns the results by rank.

        Args:
            function: A function at the top level of an importable module; it travels by name.
            world_size: Number of ranks, from 1 to ``max_workers``.
            args: Pickled and given to the function on every rank.
            timeout: Seconds that the call may take on the slowest rank (starting workers does not count).
            env: Environment variables to set during the call, or to unset where the value is ``None``.
            init_process_group: Whether the default process group (Gloo) exists when the function is called. With
                ``False`` the function, or Lightning in it, makes it from the environment as under ``torchrun``, once:
                the store of a run is not emptied when a group is destroyed.
            kwargs: Pickled and given to the function on every rank.

        Raises:
            ValueError: If the function cannot be found by name from another process, or the size does not fit.
            WorkerError: If a rank raises or dies; shows the traceback of every rank that failed.
            TimeoutError: If ranks are still running after ``timeout`` seconds; shows the Python stack of each.
        """
        _check_importable(function)
        if not 1 <= world_size <= self.max_workers:
            raise ValueError(f"world_size={world_size} does not fit this pool: give 1 to {self.max_workers}.")
        call = pickle.dumps((function, args, kwargs))
        with self._lock:
            self._start_workers(world_size)
            workers = self._workers[:world_size]
            try:
                results = self._run(workers, call, timeout, dict(env or {}), init_process_group)
            except (WorkerError, TimeoutError):
                raise
            except BaseException:  # an interrupt: ranks are in the middle of the call
                self.shutdown()
                raise
        return results

    def _start_workers(self, count: int) -> None:
        if any(not worker.process.is_alive() for worker in self._workers):
            self.shutdown()  # a worker that was killed from outside between two runs
        new = range(len(self._workers), count)
        with _environment_for_workers():
            self._workers += [_Worker(rank, Path(self._folder.name)) for rank in new]
        try:
            for worker in self._workers[new.start :]:
                worker.wait_until_ready(_START_LIMIT)
        except BaseException:
            self.shutdown()
            raise

    def _run(
        self,
        workers: list[_Worker],
        call: bytes,
        timeout: float,
        environment: dict[str, str | None],
        init_process_group: bool,
    ) -> list[Any]:
        import torch.distributed

        # The pool hosts the store, as torchrun's agent does: the port is taken before anybody is told its number.
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        deadline = time.monotonic() + timeout
        for rank, worker in enumerate(workers):
            variables = torchrun_environment(rank, len(workers), store.port) | environment
            worker.send(Task(rank, call, variables, list(sys.path), os.getcwd(), init_process_group, timeout))
        outcomes = _collect(workers, deadline, self.grace)
        failures = [outcome for outcome in outcomes.values() if isinstance(outcome, WorkerFailure)]
        if any(failure.kind in ("Died", "Stuck") for failure in failures):
            self.shutdown()
        else:
            self._clean_up(workers)
        if failures:
            _raise_for(failures, len(workers), timeout)
        return [outcomes[rank][1] for rank in range(len(workers))]

    def _clean_up(self, workers: list[_Worker]) -> None:
        try:
            for worker in workers:
                worker.send("clean up")
            for worker in workers:
                worker.wait_until_ready(_CLEANUP_LIMIT)
        except (WorkerError, TimeoutError, OSError):
            self.shutdown()  # the call itself is over, only the next one needs workers


def _shut_down(reference: weakref.ref[WorkerPool]) -> None:
    pool = reference()
    if pool is not None:
        pool.shutdown()


class _Worker:
    """One worker process as the pool sees it."""

    def __init__(self, rank: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self.stack_file = folder / f"stack-{rank}-{time.monotonic_ns()}"
        ours, theirs = context.Pipe()
        self.connection: Connection = ours
        # Not daemonic, because data loaders start processes of their own; the pool ends it itself.
        self.process: SpawnProcess = context.Process(
            target=serve, args=(theirs, str(self.stack_file)), name=f"rank {rank}", daemon=False
        )
        self.process.start()
        theirs.close()

    def send(self, message: object) -> None:
        # A worker that is gone is noticed by its sentinel, with its exit code.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send_bytes(pickle.dumps(message))

    def wait_until_ready(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        outcome = _collect([self], deadline, grace=0.0)[self.rank]
        if isinstance(outcome, WorkerFailure):
            raise WorkerError(f"Worker {self.rank} did not get ready: {outcome.message}.", [outcome])

    def kill(self) -> None:
        """Ends the process and those that it started."""
        self.connection.close()
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()

    def stack(self) -> str:
        """The Python stacks of all its threads, from the interpreter's fault handler: a held GIL is no hindrance."""
        assert self.process.pid is not None
        before = self.stack_file.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, STACK_SIGNAL)
        deadline = time.monotonic() + 2.0
        size = before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = self.stack_file.stat().st_size
            if now == size > before:
                break
            size = now
        return self.stack_file.read_text(errors="replace")[before:]


def _collect(workers: list[_Worker], deadline: float, grace: float) -> dict[int, Any]:
    """Waits for one message from each worker: a value, or a `WorkerFailure` for one that failed, died or is stuck.

    Returns:
        The messages by rank, in the order in which they came.
    """
    outcomes: dict[int, Any] = {}
    while len(outcomes) < len(workers):
        waiting = [worker for worker in workers if worker.rank not in outcomes]
        handles = [handle for worker in waiting for handle in (worker.connection, worker.process.sentinel)]
        ready = wait(handles, max(0.0, deadline - time.monotonic()))
        for worker in waiting:
            if worker.connection in ready or worker.process.sentinel in ready:
                outcomes[worker.rank] = outcome = _receive(worker)
                if isinstance(outcome, WorkerFailure):
                    deadline = min(deadline, time.monotonic() + grace)
        if not ready:  # time is up
            for worker in waiting:
                outcomes[worker.rank] = WorkerFailure(worker.rank, "Stuck", "it did not finish in time", worker.stack())
    return outcomes


def _receive(worker: _Worker) -> Any:
    try:
        if worker.connection.poll():  # what it said before it ended still counts
            message = pickle.loads(worker.connection.recv_bytes())
            return message[1] if message[0] == "failure" else message
    except (EOFError, ConnectionResetError):
        pass
    worker.process.join(5.0)
    return WorkerFailure(worker.rank, "Died", _how_it_ended(worker.process.exitcode), "")


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "its process closed the connection to the pool and is still running"
    if code < 0:
        return f"its process was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"its process ended with exit code {code}"


def _raise_for(failures: list[WorkerFailure], world_size: int, timeout: float) -> None:
    """Raises the error of a run that failed, first line first: who, then each rank's account."""
    accounts = [f"--- rank {f.rank}: {f.kind}: {f.message}\n{f.traceback}".rstrip() for f in failures]
    if all(failure.kind == "Stuck" for failure in failures):
        ranks = _list_of_ranks(failures)
        raise TimeoutError("\n".join([f"{ranks} of {world_size} did not finish within {timeout:g} s.", *accounts]))
    first = [failure for failure in failures if failure.kind != "Stuck"]
    kinds = "; ".join(f"rank {failure.rank}: {failure.kind}: {failure.message}" for failure in first)
    raise WorkerError("\n".join([f"{_list_of_ranks(first)} of {world_size} failed: {kinds}", *accounts]), failures)


def _list_of_ranks(failures: list[WorkerFailure]) -> str:
    ranks = ", ".join(str(failure.rank) for failure in failures)
    return f"Rank{'s' if len(failures) > 1 else ''} {ranks}"


def _check_importable(function: Callable[..., Any]) -> None:
    name = getattr(function, "__qualname__", None)
    if name is None or not (inspect.isroutine(function) or inspect.isclass(function)):
        raise ValueError(f"function={function!r} does not fit: give a function at the top level of a module.")
    if "<" in name:
        raise ValueError(
            f"function={name} cannot be found by name from another process: give a function at the top level of an"
            " importable module, not a lambda or a function inside another."
        )


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str | None]:
    """The variables by which torch and Lightning recognise a process that ``torchrun`` started."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "lightning-dist-pool",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@contextlib.contextmanager
def _environment_for_workers() -> Iterator[None]:
    """What the workers inherit: one thread each, before torch is imported, and no rank of an outer launcher."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's own name may not resolve
    for name in torchrun_environment(0, 1, 0):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
