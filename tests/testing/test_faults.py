"""Each fault really happens, where and when it was asked for, and is gone afterwards."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_dist.checkpoint.storage import LocalStorage
from lightning_dist.testing import faults


@pytest.fixture
def sleeper() -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_kill_stop_and_resume(sleeper: Any) -> None:
    faults.stop(sleeper.pid)
    wait_until(lambda: state_of(sleeper.pid) == "T")
    faults.resume(sleeper.pid)
    wait_until(lambda: state_of(sleeper.pid) == "S")
    faults.kill(sleeper.pid)
    assert sleeper.wait(10) == -signal.SIGKILL


def test_holding_the_interpreter_stops_other_threads() -> None:
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.01)

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.1)
    began = time.monotonic()
    faults.hold_interpreter(0.5)
    ended = time.monotonic()
    done.set()
    thread.join()
    assert ended - began >= 0.5
    assert not [moment for moment in ticks if began + 0.1 < moment < ended - 0.1]


def test_one_bit_is_flipped_and_flipped_back(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(16))
    faults.flip_bit(file, 9)
    assert file.read_bytes() == b"\0\2" + bytes(14)
    faults.flip_bit(file, 9)
    faults.flip_bit(file)
    assert file.read_bytes() == bytes(8) + b"\1" + bytes(7)
    faults.truncate(file)
    assert file.stat().st_size == 8
    faults.truncate(file, 0)
    with pytest.raises(ValueError, match="is empty"):
        faults.flip_bit(file)


def write(path: Path, size: int) -> int:
    """Writes through the storage that the checkpoint engine uses; returns what is then in the file."""
    storage = LocalStorage()
    stream = storage.create(str(path))
    try:
        storage.write(stream, memoryview(bytes(size)))
        storage.sync(stream)
    finally:
        stream.close()
    return path.stat().st_size


def test_a_full_disk_takes_what_fits_and_no_more(tmp_path: Path) -> None:
    with faults.full_disk(150):
        assert write(tmp_path / "a", 100) == 100
        with pytest.raises(OSError, match="No space left on device"):
            write(tmp_path / "b", 100)
        assert (tmp_path / "b").stat().st_size == 50
    assert write(tmp_path / "c", 100) == 100


def test_a_small_disk_is_really_full(tmp_path: Path) -> None:
    try:
        with faults.small_disk(64 * 1024) as disk:
            assert write(disk / "a", 32 * 1024) == 32 * 1024
            with pytest.raises(OSError, match="No space left on device"):
                write(disk / "b", 64 * 1024)
        assert not disk.exists()
    except PermissionError as error:
        pytest.skip(f"no right to mount: {error}")


def test_a_failing_disk_fails_for_the_files_named(tmp_path: Path) -> None:
    with faults.failing_disk("*.bad"):
        assert write(tmp_path / "a.good", 10) == 10
        with pytest.raises(OSError, match="Input/output error") as caught:
            write(tmp_path / "a.bad", 10)
        assert caught.value.errno == errno.EIO and str(caught.value.filename).endswith("a.bad")
    assert write(tmp_path / "b.bad", 10) == 10


def test_a_slow_disk_has_the_rate_asked_for(tmp_path: Path) -> None:
    with faults.slow_disk(bytes_per_second=10_000):
        began = time.monotonic()
        write(tmp_path / "a", 3000)
        assert time.monotonic() - began >= 0.3


def test_a_fault_happens_at_the_call_asked_for_and_as_often(tmp_path: Path) -> None:
    happened: list[int] = []
    with faults.storage_fault("create", lambda call: happened.append(count), file="x*", nth=2, times=2):
        for count in range(1, 6):
            write(tmp_path / f"y{count}", 1)
            write(tmp_path / f"x{count}", 1)
    assert happened == [2, 3]
    with faults.recorded_storage_calls() as calls:
        write(tmp_path / "z", 7)
    write(tmp_path / "after", 1)
    assert [(call.operation, os.path.basename(call.path), call.size) for call in calls] == [
        ("create", "z", 0),
        ("write", "z", 7),
        ("sync", "z", 0),
    ]


def test_every_operation_of_storage_can_fail() -> None:
    """A new operation that nobody lists would be a hole in every sweep over operations."""
    asks_only = {"size", "is_directory", "names", "files"}
    methods = {
        name for name in vars(LocalStorage) if not name.startswith("_") and callable(getattr(LocalStorage, name))
    }
    assert methods - asks_only == set(faults.OPERATIONS)


class Tiny(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(self.trainer.global_step)
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(fault: faults.FaultAt, tmp_path: Path) -> Tiny:
    module = Tiny()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=4,
        callbacks=[fault],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    try:
        trainer.fit(module, DataLoader(torch.ones(8, 1), batch_size=1))
    except faults.InjectedFault as error:
        assert str(error) == "injected on rank 0 at step 2"
        module.seen.append(-1)
    return module


def test_a_rank_raises_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit(faults.FaultAt(step=2), tmp_path).seen == [0, 1, -1]
    assert fit(faults.FaultAt(step=2, rank=1), tmp_path).seen == [0, 1, 2, 3], "another rank's fault"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert fit(faults.FaultAt(step=2), tmp_path).seen == [0, 1, 2, 3], "a restarted run gets past it"
    assert fit(faults.FaultAt(step=2, attempt=1), tmp_path).seen == [0, 1, -1]
    with pytest.raises(ValueError, match="action is 'explode'"):
        faults.FaultAt(step=1, action="explode")  # type: ignore[arg-type]


def fit_and_be_killed(rank: int, folder: str) -> None:
    fit(faults.FaultAt(step=1, action="kill"), Path(folder))


def test_a_rank_is_killed_at_its_step(tmp_path: Path) -> None:
    from tests.checkpoint import forked

    (ended,) = forked.run(tmp_path, fit_and_be_killed, str(tmp_path))
    assert ended.code == -signal.SIGKILL


def test_holding_and_stopping_at_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []
    monkeypatch.setattr(faults, "stop", stopped.append)
    fit(faults.FaultAt(step=1, action="stop"), tmp_path)
    assert stopped == [os.getpid()]
    began = time.monotonic()
    fit(faults.FaultAt(step=1, action="hold", seconds=0.3), tmp_path)
    assert time.monotonic() - began >= 0.3
