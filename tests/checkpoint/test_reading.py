"""Names, shapes and single values: what fits is loaded, what does not is named, on every rank alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, zeros

from lightning_dist import checkpoint
from lightning_dist.checkpoint import planner
from lightning_dist.checkpoint.storage import LocalStorage
from lightning_dist.testing import WorkerPool
from tests.checkpoint.state import memory, reset_peak_memory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tensors = {
        "state_dict": {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7), "empty": torch.zeros(0, 4)},
        "extra": {"list": [torch.ones(2), 5, {"deep": torch.tensor([1, 2])}], "text": "hello", "nothing": None},
    }
    checkpoint.save(tmp_path / "one", tensors, {"global_step": 3, "path": Path("x")})
    return tmp_path / "one"


def test_nested_values_come_back_as_they_were(directory: Path) -> None:
    found = checkpoint.read_tensors(directory)
    assert torch.equal(found["state_dict"]["a"], torch.arange(6.0).view(2, 3)) and found["state_dict"]["b"] == 7
    assert found["state_dict"]["empty"].shape == (0, 4)
    extra = found["extra"]
    assert extra["text"] == "hello" and extra["nothing"] is None and extra["list"][1] == 5
    assert torch.equal(extra["list"][0], torch.ones(2)) and torch.equal(extra["list"][2]["deep"], torch.tensor([1, 2]))
    assert checkpoint.top_level_names(directory) == {"state_dict", "extra"}


def test_parts_are_read_by_name(directory: Path) -> None:
    assert list(checkpoint.read_tensors(directory, ["state_dict.a"])["state_dict"]) == ["a"]
    assert set(checkpoint.read_tensors(directory, ["extra"])) == {"extra"}
    with pytest.raises(checkpoint.CheckpointError, match=r"holds nothing called 'state_dict\.c'"):
        checkpoint.read_tensors(directory, ["state_dict.c"])


def test_top_level_keys_that_are_not_asked_for_are_not_missed(directory: Path) -> None:
    target = {"state_dict": {"a": torch.zeros(2, 3), "b": torch.tensor(0), "empty": torch.zeros(0, 4)}}
    kept = target["state_dict"]["a"]
    assert checkpoint.load_into(directory, target) == checkpoint.LoadReport((), ())
    assert torch.equal(kept, torch.arange(6.0).view(2, 3)), "filled in place"


def test_names_that_do_not_match_are_named_before_anything_is_changed(directory: Path) -> None:
    target = {"state_dict": {"a": torch.zeros(2, 3), "c": torch.zeros(1), "empty": torch.zeros(0, 4)}}
    with pytest.raises(checkpoint.CheckpointError, match=r"does not have state_dict\.c; it has state_dict\.b"):
        checkpoint.load_into(directory, target)
    assert not target["state_dict"]["a"].any()
    report = checkpoint.load_into(directory, target, strict=False)
    assert report == checkpoint.LoadReport(("state_dict.c",), ("state_dict.b",))
    assert target["state_dict"]["a"].any() and not target["state_dict"]["c"].any()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3, 2), "Size mismatch.*state_dict.a"),
        (5, "state_dict.a is a tensor in the checkpoint and a plain value"),
    ],
)
def test_a_value_of_another_shape_or_kind_is_refused(value: Any, message: str, directory: Path) -> None:
    target = {"state_dict": {"a": value, "b": torch.tensor(0)}}
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load_into(directory, target, strict=False)
    assert target["state_dict"]["b"] == 0


def test_trainer_state_is_read_safely_where_it_can_be(directory: Path, tmp_path: Path) -> None:
    assert checkpoint.read_trainer_state(directory) == {"global_step": 3, "path": Path("x")}
    with pytest.raises(Exception, match="Weights only load failed"):
        checkpoint.read_trainer_state(directory, weights_only=True)
    checkpoint.save(tmp_path / "plain", {}, {"global_step": 4, "loops": {"x": [1]}, "t": torch.ones(2)})
    assert checkpoint.read_trainer_state(tmp_path / "plain", weights_only=True)["loops"] == {"x": [1]}


def test_the_manifest_tells_what_the_checkpoint_is(tmp_path: Path) -> None:
    info = {"layout": "shard=2", "data": {"sha": "abc"}}
    checkpoint.save(tmp_path / "one", {}, {"global_step": 12}, info=info)
    manifest = checkpoint.read_manifest(tmp_path / "one")
    assert (manifest.step, manifest.world_size, manifest.sequence) == (12, 1, 1)
    assert manifest.info["layout"] == "shard=2" and manifest.info["data"] == {"sha": "abc"}
    assert manifest.versions["torch"] == torch.__version__ and "lightning-dist" in manifest.versions


def ask_for_own_names(directory: str) -> list[str]:
    """As stages of a pipeline do: each rank has names that the other has not."""
    mine = f"stage{dist.get_rank()}"
    checkpoint.save(
        directory, {"state_dict": {mine: torch.full((2,), dist.get_rank() + 1.0), "both": torch.ones(1)}}, {}
    )
    target = {"state_dict": {mine: torch.zeros(2), "both": torch.zeros(1)}}
    checkpoint.load_into(directory, target)
    assert torch.equal(target["state_dict"][mine], torch.full((2,), dist.get_rank() + 1.0))
    messages = []
    for wrong in (
        {"both": torch.zeros(1)},
        {mine: torch.zeros(2), "other": torch.zeros(1)},
        {mine: torch.zeros(3 - dist.get_rank())},
    ):
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.load_into(directory, {"state_dict": wrong})
        messages.append(str(caught.value).split("failed: ")[1])
    return messages


def test_stages_that_ask_for_their_own_names_miss_nothing_and_agree_on_what_is_wrong(
    tmp_path: Path, pool: WorkerPool
) -> None:
    first, second = pool.run(ask_for_own_names, 2, str(tmp_path / "one"))
    assert first == second
    assert "it has state_dict.stage0, state_dict.stage1, which" in first[0]
    assert "it does not have state_dict.other; it has state_dict.both, which" in first[1]
    assert "rank 0: ValueError: Size mismatch" in first[2] and "rank 1" not in first[2]


def reshard_in_pieces(root: str) -> dict[str, Any]:
    """Cut along another dimension than saved, uneven, one- and three-dimensional, every shard in many pieces."""
    original, planner.PIECE_BYTES = planner.PIECE_BYTES, 100
    try:
        return _reshard(root)
    finally:
        planner.PIECE_BYTES = original


def _reshard(root: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (4,))
    shapes = {"wide": (3, 50), "long": (50, 3), "flat": (211,), "cube": (5, 6, 7), "tiny": (2,), "scalar": ()}
    whole = {name: torch.randn(shape, generator=torch.Generator().manual_seed(3)) for name, shape in shapes.items()}

    def sharded(values: dict[str, torch.Tensor], dim: int) -> dict[str, Any]:
        return {
            name: distribute_tensor(value, mesh, [Shard(min(dim, value.ndim - 1))]) if value.ndim else value.clone()
            for name, value in values.items()
        }

    checkpoint.save(f"{root}/plain", {"state_dict": whole}, {})
    checkpoint.save(f"{root}/cut", {"state_dict": sharded(whole, 0)}, {})
    for source in ("plain", "cut"):
        for dim in (0, 1, 2):
            target = sharded({name: torch.zeros_like(value) for name, value in whole.items()}, dim)
            checkpoint.load_into(f"{root}/{source}", {"state_dict": target})
            for name, value in target.items():
                found = value.full_tensor() if isinstance(value, DTensor) else value
                assert torch.equal(found, whole[name]), (source, dim, name)
    return whole


def test_shards_are_written_in_pieces_and_read_across_any_cut(tmp_path: Path, pool: WorkerPool) -> None:
    whole = pool.run(reshard_in_pieces, 4, str(tmp_path))[0]
    for source in ("plain", "cut"):
        index = checkpoint.read.tensor_index(tmp_path / source)
        assert len(index.state_dict_metadata["state_dict.cube"].chunks) >= 7
        found = checkpoint.read_tensors(tmp_path / source)["state_dict"]
        assert all(torch.equal(found[name], value) for name, value in whole.items())


MEGABYTES = 48


def save_and_load_sharded(root: str) -> tuple[int, int, int]:
    """Bytes that this rank writes and reads, and by how much its memory peaks while it does."""
    counts = {"write": 0, "read": 0}
    write, read = LocalStorage.write, LocalStorage.read_into

    def counted_write(self: LocalStorage, stream: Any, data: memoryview) -> None:
        counts["write"] += data.nbytes
        write(self, stream, data)

    def counted_read(self: LocalStorage, stream: Any, start: int, target: memoryview) -> int:
        counts["read"] += target.nbytes
        return read(self, stream, start, target)

    mesh = init_device_mesh("cpu", (4,))
    rows = MEGABYTES * 1024 // 4
    state = {f"w{i}": zeros(rows // 8, 256, device_mesh=mesh, placements=[Shard(0)]) for i in range(8)}
    for value in state.values():
        value.to_local().fill_(1.0)  # memory is taken when it is first touched
    small = {"state_dict": {"w": zeros(8, 4, device_mesh=mesh, placements=[Shard(0)])}}
    checkpoint.save(f"{root}/small", small, {})
    checkpoint.load_into(f"{root}/small", small)
    LocalStorage.write, LocalStorage.read_into = counted_write, counted_read  # type: ignore[method-assign]
    try:
        reset_peak_memory()
        before = memory("VmRSS")
        checkpoint.save(f"{root}/one", {"state_dict": state}, {})
        checkpoint.load_into(f"{root}/one", {"state_dict": state})
        peak = memory("VmHWM") - before
    finally:
        LocalStorage.write, LocalStorage.read_into = write, read  # type: ignore[method-assign]
    return counts["write"], counts["read"], peak


def test_each_rank_writes_and_reads_its_share_only(tmp_path: Path, pool: WorkerPool) -> None:
    share = MEGABYTES * 1024 * 1024 / 4
    for written, read, peak in pool.run(save_and_load_sharded, 4, str(tmp_path)):
        assert written < 1.05 * share
        assert read < 1.05 * share + 4 * 1024 * 1024
        assert peak < share + 16 * 1024 * 1024, "no rank holds the whole, and none holds its share twice"
