"""SyncStallDetector on real ranks: where the time goes, what it costs, and what it says when a rank fails."""

import re
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lightning_dist import HybridParallelStrategy, _compat
from lightning_dist.callbacks import SyncStallDetector
from lightning_dist.callbacks.stall import unwatched
from lightning_dist.telemetry.clock import Phase
from lightning_dist.telemetry.ledger import read_life
from lightning_dist.telemetry.published import published
from lightning_dist.telemetry.watchdog.heartbeat import ENABLED, HeartbeatPage
from lightning_dist.testing.stall_job import NOTHING, run_job
from tests.strategies.test_pipeline_training import Plain
from tests.strategies.training import data

EVERY = 5


class Counts(L.Callback):
    """How many collectives the default group was given before each batch."""

    def __init__(self):
        self.counts = []

    def on_train_batch_start(self, *_):
        self.counts.append(_compat.collectives_issued(torch.distributed.group.WORLD))


def fit(layout, folder, callbacks, batches=16, accelerator="cpu", **more):
    torch.manual_seed(0)
    strategy = "ddp" if layout == "ddp" else HybridParallelStrategy(layout=layout)
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=2,
        strategy=strategy,
        callbacks=callbacks,
        max_epochs=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=TensorBoardLogger(folder, name="", version="") if folder else False,
        **{"enable_checkpointing": False, **more},
    )
    module = Plain().double()
    rows = data(8 * batches)
    trainer.fit(module, DataLoader(rows, 4), DataLoader(rows, 4))
    return trainer


def follow(layout, folder):
    detector = SyncStallDetector(every_n_steps=EVERY, write_seconds=0.0, peak_flops=1e12)
    trainer = fit(layout, folder, [detector], limit_val_batches=2)
    values = published()
    assert "save_checkpoint" not in vars(trainer)
    return values, trainer.global_step


@pytest.mark.parametrize("layout", ["ddp", "shard=2", "pp=2"])
def test_where_the_time_goes_is_written_and_read_back(pool, tmp_path, layout):
    results = pool.run(follow, 2, layout, str(tmp_path), init_process_group=False, timeout=90)
    values, steps = results[0]
    assert sum(values[phase.word] for phase in Phase) == pytest.approx(values["step_time"], rel=1e-3)
    for name in ("forward", "backward", "optimizer", "exposed_comm", "tokens_per_second", "goodput", "mfu", "memory"):
        assert values[name] > 0, name
    assert (values["bubble"] > 0) == (layout == "pp=2")
    dimension = {"ddp": "data", "shard=2": "shard", "pp=2": "pipeline"}[layout]
    assert values[f"communication/{dimension}"] > 0
    assert values["stalls"] == 0
    # the same on both ranks, but for what only rank 0 keeps
    assert results[1][0]["step_time"] == values["step_time"]
    # samples are counted on data axes only: both ranks of a pipeline see the same ones
    per_step = values["samples_per_second"] * values["step_time"]
    assert per_step == pytest.approx(4 if layout == "pp=2" else 8, rel=0.35)
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    seen = [event.step for event in events.Scalars("telemetry/goodput")]
    assert seen == sorted(seen)
    assert len(seen) >= steps // EVERY - 1
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    assert "telemetry/mesh" in events.Tags()["images"]
    life = read_life(tmp_path / "goodput.jsonl")
    assert 0 < life.productive < life.wall
    assert not list(tmp_path.glob("stall_*")) + list(tmp_path.glob("crash_*"))


def count(folder, watched):
    counts = Counts()
    detector = [SyncStallDetector(every_n_steps=EVERY)] if watched else []
    fit("ddp", folder, [*detector, counts], limit_val_batches=0)
    return [after - before for before, after in zip(counts.counts, counts.counts[1:], strict=False)]


def test_ordinary_steps_have_no_collective_more(pool, tmp_path):
    """C37: the group that trains is given the same collectives, on every step, with and without the detector."""
    watched = pool.run(count, 2, str(tmp_path), True, init_process_group=False)[0]
    alone = pool.run(count, 2, None, False, init_process_group=False)[0]
    assert watched == alone
    assert len(watched) > 20


def test_nothing_is_left_behind():
    before = (torch.distributed.Work.wait, torch.distributed.ProcessGroup.allreduce)
    watch_class = _compat.watch_collectives
    put_back = watch_class(object())
    assert torch.distributed.Work.wait is not before[0]
    put_back()
    assert (torch.distributed.Work.wait, torch.distributed.ProcessGroup.allreduce) == before


def test_a_run_that_stands_still_on_purpose_is_not_watched(tmp_path):
    detector = SyncStallDetector()
    page = HeartbeatPage(tmp_path / "page", create=True)
    page.set_flags(ENABLED)
    detector._watchdog = SimpleNamespace(page=page)
    trainer = SimpleNamespace(callbacks=[L.Callback(), SyncStallDetector(), detector])
    with pytest.raises(KeyError), unwatched(trainer):
        assert page.read().flags == 0
        raise KeyError
    assert page.read().flags == ENABLED


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"hang_timeout": 0}, "hang_timeout=0 does not fit"),
        ({"on_hang": "panic"}, "on_hang='panic' does not fit"),
        ({"straggler_threshold": 1.0}, "straggler_threshold=1.0 does not fit"),
        ({"write_seconds": -1.0}, "write_seconds=-1.0 does not fit"),
        ({"every_n_steps": 0}, "every_n_steps=0 does not fit"),
        ({"links": "/nowhere.json"}, "links='/nowhere.json' does not fit"),
    ],
)
def test_refuses_what_does_not_fit(wrong, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        SyncStallDetector(**wrong)


@pytest.mark.slow
def test_a_stopped_rank_is_reported_with_all_stacks_and_the_job_is_ended(tmp_path):
    outcome = run_job(tmp_path, "stopped process", at=100, hang_timeout=2.0)
    assert outcome.causes == [("stopped process", "rank 1")], outcome.output
    assert outcome.reported_at - outcome.fault_at < 2.0 + 15.0
    assert outcome.ended_at - outcome.fault_at < 2.0 + 20.0
    (report,) = outcome.reports
    assert "stall: missing rank 1: stopped process (SIGSTOP)" in report
    assert "gradient reduction of the data group" in report
    waiting, stopped = report.split("--- Python stacks of rank ")[1:]
    assert "in backward" in waiting  # rank 0's blocked line
    assert "py-spy is not here" in stopped or "training_step" in stopped


@pytest.mark.slow
def test_a_held_interpreter_lock_is_seen_and_its_line_shown_under_shards(tmp_path):
    outcome = run_job(tmp_path, "held interpreter lock", strategy="shard=2", hang_timeout=4.0)
    assert outcome.causes == [("held interpreter lock", "rank 1")], outcome.output
    assert "shard=1" in outcome.reports[0]
    assert "hold_interpreter" in outcome.reports[0].split("--- Python stacks of rank 1")[1]


@pytest.mark.slow
def test_a_rank_that_returns_nothing_is_shown_to_its_peers(tmp_path):
    """C17: Lightning's DDP raises on that rank only; its peer would die of a closed connection."""
    outcome = run_job(tmp_path, NOTHING)
    assert outcome.causes == [("raised", "rank 1")], outcome.output
    assert outcome.ended_at - outcome.fault_at < 5.0 + 5.0  # the launcher's own end included
    shown = re.search(r"lightning_dist: rank 0: rank 1 stopped the run: raised: .*None", outcome.output)
    assert shown, outcome.output
    (notice,) = Path(tmp_path).glob("crash_rank1.txt")
    assert "Traceback" in notice.read_text()
