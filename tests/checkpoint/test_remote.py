"""The same promises on storage behind fsspec, which cannot rename and has no directories."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from lightning_dist import checkpoint
from lightning_dist.checkpoint import BackgroundWriter
from lightning_dist.testing import faults
from tests.checkpoint.state import check_is_step, save_step, tensors_at


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """A bucket on a local server that speaks S3; needs the packages s3fs and moto[server]."""
    pytest.importorskip("s3fs", reason="needs the package s3fs")
    server_module = pytest.importorskip("moto.server", reason="needs the package moto[s3,server]")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"endpoint_url": f"http://{host}:{port}", "key": "testing", "secret": "testing"}
    before = fsspec.config.conf.get("s3")
    fsspec.config.conf["s3"] = settings
    try:
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket/run"
    finally:
        server.stop()
        fsspec.config.conf.pop("s3") if before is None else fsspec.config.conf.update(s3=before)


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty folder; what stays in it after the test would be seen by the next."""
    path = "memory://bucket/run" if request.param == "memory" else request.getfixturevalue("s3_server")
    clear(path)
    yield path
    clear(path)


def clear(root: str) -> None:
    file_system, path = fsspec.core.url_to_fs(root)
    file_system.invalidate_cache()
    if file_system.exists(path):
        file_system.rm(path, recursive=True)


def names(root: str) -> list[str]:
    file_system, path = fsspec.core.url_to_fs(root)
    file_system.invalidate_cache()
    return sorted({found.removeprefix(path + "/").split("/")[0] for found in file_system.find(path)})


def flip(path: str) -> None:
    file_system, inside = fsspec.core.url_to_fs(path)
    data = bytearray(file_system.cat_file(inside))
    data[len(data) // 2] ^= 1
    file_system.pipe_file(inside, bytes(data))


def test_saved_verified_replaced_and_read(root: str) -> None:
    save_step(root, 1)
    check_is_step(f"{root}/step_00000001", 1)
    save_step(root, 2, name="last")
    save_step(root, 3, name="last")
    check_is_step(f"{root}/last", 3)
    assert names(root) == ["last", "step_00000001"]
    assert [entry.step for entry in checkpoint.list_checkpoints(root)] == [3, 1]
    target = tensors_at(0)
    checkpoint.load_into(f"{root}/last", target)
    assert target["note"] == {"step": 3}


def test_damage_is_found_and_the_older_one_taken(root: str, tmp_path: Path) -> None:
    save_step(root, 1)
    save_step(root, 2)
    flip(f"{root}/step_00000002/data/__0_0.distcp")
    choice = checkpoint.newest_good(root)
    assert choice is not None and (choice.path, choice.steps_lost) == (f"{root}/step_00000001", 1)
    checkpoint.consolidate(choice.path, tmp_path / "one.ckpt")
    assert (tmp_path / "one.ckpt").exists()
    assert not checkpoint.delete(f"{root}/step_00000001")
    save_step(root, 3)
    assert checkpoint.retain(root, 1) == [f"{root}/step_00000002", f"{root}/step_00000001"]
    assert names(root) == ["step_00000003"]


@pytest.mark.parametrize("name", ["step_00000002", "last"])
def test_an_error_at_every_operation_leaves_a_whole_one(name: str, root: str) -> None:
    save_step(root, 1)
    save_step(root, 1, name="last")
    with faults.recorded_storage_calls() as calls:
        save_step(root, 2, name=name)
    for nth in range(1, len(calls) + 1, 1 if root.startswith("memory") else 7):  # a request to the server takes long
        clear(root)
        save_step(root, 1)
        save_step(root, 1, name="last")
        failed = False
        with faults.storage_fault("any", faults.fail(errno.EIO), nth=nth):
            try:
                save_step(root, 2, name=name)
            except checkpoint.CheckpointError:
                failed = True
        choice = checkpoint.newest_good(root)
        assert choice is not None
        check_is_step(choice.path, choice.step or 0)
        assert failed or choice.step == 2
        for entry in checkpoint.list_checkpoints(root):
            assert entry.problem is not None or checkpoint.verify(entry.path).intact


def test_written_in_the_background(root: str) -> None:
    writer = BackgroundWriter()
    for step in (1, 2, 3):
        assert writer.save(
            f"{root}/step_{step}", tensors_at(step), {"global_step": step}, rank_state={"rank": 0, "step": step}
        )
        writer.retain(root, 2)
    writer.delete(f"{root}/step_2")
    writer.close()
    assert names(root) == ["step_3"]
    check_is_step(f"{root}/step_3", 3)


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    save_step(f"file://{tmp_path}", 1)
    check_is_step(str(tmp_path / "step_00000001"), 1)
    check_is_step(f"file://{tmp_path}/step_00000001", 1)
