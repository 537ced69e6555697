"""The worker pool: results by rank, failures named, hangs bounded, nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from lightning_dist.testing import WorkerError, WorkerPool


def rank_and_sum(offset, scale=1):
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item() * scale


def fail_on(rank, message):
    if dist.get_rank() == rank:
        raise KeyError(message)
    return "fine"


def fail_while_others_wait(failing):
    if dist.get_rank() == failing:
        raise ValueError("before the barrier")
    dist.barrier()


def sleep_forever_on(rank):
    if dist.get_rank() == rank:
        a_telling_name()
    return os.getpid()


def a_telling_name():
    time.sleep(1000)


def kill_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def dirty_the_process():
    os.environ["LEFT_BEHIND"] = "1"
    os.environ["RANK"] = "99"
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(123)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.chdir("/")


def describe_the_process():
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    return {
        "pid": os.getpid(),
        "left_behind": os.environ.get("LEFT_BEHIND"),
        "given": os.environ.get("GIVEN"),
        "home": os.environ.get("HOME"),
        "rank": os.environ["RANK"],
        "rank_zero_rank": rank_zero_only.rank,
        "dtype": torch.get_default_dtype(),
        "draw": torch.rand(1).item(),
        "terminate": signal.getsignal(signal.SIGTERM),
        "folder": os.getcwd(),
        "threads": torch.get_num_threads(),
    }


def groups_of_different_make(order):
    """Two meshes that compare equal; the later run must not see the earlier one's process groups."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for _ in range(order):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = DTensor.from_local(torch.ones(2) * (dist.get_rank() % 2 + 1), mesh, [Replicate(), Shard(0)])
    return (whole + whole).redistribute(placements=[Replicate(), Replicate()]).to_local().tolist()


def fit_with_lightning():
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    before = dist.is_initialized()
    trainer.fit(BoringModel())
    return before, TorchElasticEnvironment.detect(), trainer.world_size, trainer.global_rank, trainer.global_step


def hang_after_lightning(rank):
    """Lightning's Trainer ends by putting back the handlers of every signal it can find."""
    fit_with_lightning()
    return sleep_forever_on(rank)


def return_something_unpicklable():
    return lambda: None


def test_results_come_in_rank_order_and_collectives_work(pool):
    assert pool.run(rank_and_sum, 3, 10, scale=2) == [(0, 3, 66.0), (1, 3, 66.0), (2, 3, 66.0)]
    assert pool.run(rank_and_sum, 1, 5) == [(0, 1, 5.0)]


def test_workers_are_kept_between_runs(pool):
    first = pool.run(describe_the_process, 2)
    second = pool.run(describe_the_process, 2)
    assert [rank["pid"] for rank in first] == [rank["pid"] for rank in second]
    assert len({rank["pid"] for rank in first} | {os.getpid()}) == 3


def test_a_run_finds_a_clean_process(pool):
    clean = pool.run(describe_the_process, 2)
    pool.run(dirty_the_process, 2)
    again = pool.run(describe_the_process, 2)
    assert again == clean
    assert [rank["rank"] for rank in again] == ["0", "1"]
    assert [rank["rank_zero_rank"] for rank in again] == [0, 1]
    assert again[0]["threads"] == 1 and again[0]["left_behind"] is None


def test_env_sets_and_unsets_for_one_run(pool, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with_env = pool.run(describe_the_process, 1, env={"GIVEN": "yes", "HOME": None})[0]
    assert (with_env["given"], with_env["home"], with_env["folder"]) == ("yes", None, str(tmp_path))
    assert pool.run(describe_the_process, 1)[0]["given"] is None


def test_meshes_of_an_earlier_run_are_forgotten(pool):
    for order in (0, 3, 1):
        assert pool.run(groups_of_different_make, 4, order) == [[2.0, 2.0, 4.0, 4.0]] * 4


def test_an_exception_names_the_rank_and_shows_its_traceback(pool):
    with pytest.raises(WorkerError, match=r"Rank 1 of 2 failed: rank 1: KeyError: 'no such thing'") as caught:
        pool.run(fail_on, 2, 1, "no such thing")
    assert "in fail_on" in str(caught.value)
    assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(1, "KeyError")]


def test_a_failed_rank_does_not_leave_its_peers_waiting(pool):
    start = time.monotonic()
    with pytest.raises(WorkerError, match="ValueError: before the barrier"):
        pool.run(fail_while_others_wait, 2, 1, timeout=60)
    assert time.monotonic() - start < 20
    assert pool.run(rank_and_sum, 2, 0)[0] == (0, 2, 1.0)


def test_a_result_that_cannot_travel_is_an_error(pool):
    with pytest.raises(WorkerError, match="result of type function cannot be pickled"):
        pool.run(return_something_unpicklable, 1)


def test_functions_that_workers_cannot_find_are_refused(pool):
    with pytest.raises(ValueError, match="top level of an importable module"):
        pool.run(lambda: None, 1)
    with pytest.raises(ValueError, match=r"world_size=9 does not fit this pool: give 1 to 8"):
        pool.run(rank_and_sum, 9, 0)


def test_lightning_takes_the_ranks_as_torchrun_would_start_them(pool):
    assert pool.run(fit_with_lightning, 2, init_process_group=False) == [
        (False, True, 2, 0, 1),
        (False, True, 2, 1, 1),
    ]
    assert pool.run(fit_with_lightning, 2) == [(True, True, 2, 0, 1), (True, True, 2, 1, 1)]


@pytest.mark.slow
def test_hangs_and_deaths_end_with_names_and_stacks_and_the_pool_restarts():
    with WorkerPool(grace=1.0) as pool:
        workers = pool.run(hang_after_lightning, 2, -1, init_process_group=False)
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"Rank 1 of 2 did not finish within 5 s") as caught:
            pool.run(hang_after_lightning, 2, 1, init_process_group=False, timeout=5)
        assert time.monotonic() - start < 20
        assert "in a_telling_name" in str(caught.value) and "in fit_with_lightning" not in str(caught.value)
        assert not any(is_running(process_id) for process_id in workers)
        assert pool.run(rank_and_sum, 2, 0)[1] == (1, 2, 1.0)

        start = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1: Died: its process was killed by signal 9") as died:
            pool.run(kill_on, 2, 1)
        assert time.monotonic() - start < 20
        assert [(failure.rank, failure.kind) for failure in died.value.failures] == [(1, "Died"), (0, "Stuck")]
        assert "in kill_on" in str(died.value)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["raise SystemExit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_workers_end_with_the_process_that_owns_them(end, tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal
        from lightning_dist.testing import WorkerPool

        if __name__ == "__main__":
            pool = WorkerPool()
            pool.run(os.getpid, 1)
            print(pool.process_ids[0], flush=True)
            {end}
        """)
    )
    owner = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=90, check=False)
    worker = int(owner.stdout)
    deadline = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(worker)


def is_running(process_id):
    try:
        with open(f"/proc/{process_id}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
