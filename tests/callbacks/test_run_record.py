"""The record holds what went in and what happened, on every layout, and no secret."""

from __future__ import annotations

import json
import os

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dist import HybridParallelStrategy
from lightning_dist.callbacks.run_record import RunRecord, record_event
from lightning_dist.record.document import PARTS, QUESTIONS, STAGES
from lightning_dist.record.files import read_record, read_values
from tests.strategies.training import Classifier, data

QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)


class Logging(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class Reporting(L.Callback):
    def __init__(self, fail_at=None):
        self.fail_at = fail_at

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            record_event(
                trainer, "rule", name=f"of rank {trainer.global_rank}", api_key="abc", url="https://u:p@h.x/y?k=1"
            )
        if trainer.global_step == self.fail_at:
            raise RuntimeError("it broke with token=verysecret")


def fit(folder, strategy="auto", fail_at=None, more=(), **settings):
    torch.manual_seed(0)
    module = Logging().double()
    callbacks = [Reporting(fail_at), *more, RunRecord(dirpath=folder, **settings)]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        strategy=strategy,
        max_epochs=2,
        callbacks=callbacks,
        **QUIET,
    )
    trainer.fit(module, DataLoader(data(8), 2), DataLoader(data(4), 2))


def test_the_record_is_complete(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "text.txt").write_text("some data")
    config = {"lr": 0.1, "hub_token": "hf_abcdefghijklmnopqrstuv", "note": "sk-0123456789abcdef0123"}
    fit(tmp_path, data=[tmp_path / "text.txt", tmp_path / "absent"], config=config, objective="to see")
    record = read_record(tmp_path)
    assert record["run"]["state"] == "finished" and record["run"]["attempts"] == 1
    assert set(record["stages"]) == set(STAGES) and all(set(part) == set(PARTS) for part in record["stages"].values())
    assert set(record["questions"]) == set(QUESTIONS) and record["questions"]["objective"] == "to see"
    of_file, absent = record["versions"]["data"]
    assert of_file["bytes"] == 9 and len(of_file["xxh3_128"]) == 32 and "FileNotFoundError" in absent["problem"]
    assert record["versions"]["environment"]["OMP_NUM_THREADS"] == "1"
    assert [event["kind"] for event in record["events"]] == ["rule"]
    assert record["stages"]["synchronise"]["decisions"][0]["step"] == 2
    page = (tmp_path / "run_record.md").read_text()
    assert "## Stage 4: synchronise" in page and "What is the run for?** to see" in page
    everything = "".join(path.read_text() for path in tmp_path.iterdir())
    for secret in ("hunter2", "hf_abc", "sk-0123", 'abc"', "u:p@", "k=1"):
        assert secret not in everything, secret


def test_values_are_kept_for_each_step_and_evaluation(tmp_path):
    fit(tmp_path)
    rows = read_values(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert [row["evaluation"] for row in rows] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert all(("train_loss" in row) != ("val_loss" in row) for row in rows)


def test_a_failure_and_the_next_attempt_are_recorded(tmp_path):
    with pytest.raises(RuntimeError, match="it broke"):
        fit(tmp_path, fail_at=3)
    assert read_record(tmp_path)["run"]["state"] == "failed"
    fit(tmp_path)
    record = read_record(tmp_path)
    assert record["run"] | {"attempts": 2, "state": "finished"} == record["run"]
    failure = next(event for event in record["events"] if event["kind"] == "failure")
    assert failure["evidence"]["type"] == "RuntimeError" and "verysecret" not in json.dumps(record)


def test_thresholds_stay_those_of_the_first_attempt(tmp_path):
    file = tmp_path / "acceptance.yaml"
    for content in ("as it was", "changed before the restart"):
        file.write_text(content)
        fit(tmp_path / "run", acceptance=file)
    (recorded,) = read_record(tmp_path / "run")["versions"]["acceptance"]
    assert recorded["bytes"] == len("as it was")


def fit_together(folder, layout):
    fit(folder, HybridParallelStrategy(layout=layout, timeout=60))


@pytest.mark.parametrize("layout", ["shard=2", "pp=2"])
def test_all_ranks_are_in_it(pool, tmp_path, layout):
    pool.run(fit_together, 2, tmp_path, layout, init_process_group=False, timeout=60)
    record = read_record(tmp_path)
    assert sorted(event["rank"] for event in record["events"]) == [0, 1]
    assert {own["rank"] for own in record["ranks"]} == {0, 1}
    assert len(set(record["versions"]["initial_weights"].values())) == 2
    assert ("shard=2" if layout == "shard=2" else "pipeline=2") in record["stages"]["partition"]["outputs"][
        "layout"
    ].replace("pp=", "pipeline=")


def test_arguments_are_refused():
    with pytest.raises(ValueError, match="data='x' does not fit: give a list of paths"):
        RunRecord(data="x")
    with pytest.raises(ValueError, match="every_n_steps=0 does not fit"):
        RunRecord(every_n_steps=0)
