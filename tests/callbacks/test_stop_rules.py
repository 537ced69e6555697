"""Rules in a run: one decision for all ranks at one step; a rollback leaves out exactly the samples between."""

from __future__ import annotations

import json
import os
import random
import threading
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import chain
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_dist import HybridParallelStrategy, ModelPlan, checkpoint
from lightning_dist.callbacks import FaultTolerantCheckpoint, RunRecord, StopRules
from lightning_dist.record.files import read_events
from lightning_dist.rules.syntax import RuleError
from lightning_dist.telemetry.published import forget_published, publish
from tests.strategies.training import full_state

QUIET = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
SAMPLES, BATCH = 48, 4
PLAN = ModelPlan(network="model", tensor={"0": "colwise", "2": "rowwise"})


class Numbered(Dataset):
    """Samples that know their number; some of them are poisoned."""

    def __init__(self, poisoned=()):
        self.x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for number in poisoned:
            self.x[number] = float("nan")

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return {"x": self.x[i], "number": i}


class Module(L.LightningModule):
    def __init__(self, val_losses=()):
        super().__init__()
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.seen, self.val_losses = [], val_losses

    def training_step(self, batch, batch_idx):
        if batch_idx is not None and not self.model[0].weight.is_meta:
            self.seen.append(batch["number"].tolist())
        loss = self.model(batch["x"]).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.model(batch["x"])
        self.log("val_loss", float(self.val_losses[self.current_epoch]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Publish(L.Callback):
    """A number that one rank sees from a step on."""

    def __init__(self, rank, step, name="trouble"):
        self.rank, self.step, self.name = rank, step, name
        forget_published()

    def on_train_batch_start(self, trainer, *_):
        here = trainer.global_rank == self.rank and trainer.global_step + 1 >= self.step
        publish(self.name, float(here))


def in_order_loader(dataset, kind):
    """Rank r of the data ranks gets the samples r, r + ranks, …: Lightning would shuffle them."""
    if kind == "one" or "WORLD_SIZE" not in os.environ:
        return DataLoader(dataset, BATCH)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = {"pp=2": 1, "tp=2": 1, "pp=2,shard=2": 2}.get(kind, world)
    return DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, ranks, rank % ranks, shuffle=False))


def fit(
    folder, rules, kind="one", poisoned=(), callbacks=(), keep=True, epochs=1, module=None, resume=False, **settings
):
    """Trains on this rank; what it saw, where it ended, and with which weights."""
    L.seed_everything(7, verbose=False)
    module = module or Module()
    strategy = {"one": "auto", "ddp": "ddp"}.get(kind) or HybridParallelStrategy(layout=kind, plan=PLAN, timeout=60)
    keeper = FaultTolerantCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_top_k=0, keep_last=9)
    kept = [keeper] if keep else []
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=[*callbacks, StopRules(rules, **settings), RunRecord(dirpath=folder), *kept],
        enable_checkpointing=keep,
        num_sanity_val_steps=0,
        **QUIET,
    )
    validation = DataLoader(Numbered(), SAMPLES) if module.val_losses else None
    code = 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.fit(
                module, in_order_loader(Numbered(poisoned), kind), validation, ckpt_path="last" if resume else None
            )
        except SystemExit as error:
            code = error.code
    return {
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "seen": module.seen,
        "code": code,
        "warnings": [str(warning.message) for warning in warned],
        "weights": {name: value.clone() for name, value in full_state(module).items()} if not code else {},
    }


def together(pool, folder, *args, world=2, **kwargs):
    return pool.run(fit, world, folder, *args, init_process_group=False, timeout=100, **kwargs)


def expected_weights(batches):
    """A plain loop over these batches of sample numbers."""
    module, samples = Module(), Numbered()
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for numbers in batches:
        optimizer.zero_grad()
        module.model(samples.x[numbers]).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return module.state_dict()


def assert_close(weights, wanted):
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)


def all_weights(results):
    """Of all pipeline stages together."""
    return {name: value for result in results for name, value in result["weights"].items()}


def in_order(results):
    """The samples of each step, of all ranks."""
    return [
        sorted(set(chain.from_iterable(parts))) for parts in zip(*(result["seen"] for result in results), strict=True)
    ]


@pytest.mark.parametrize(("kind", "world"), [("one", 1), ("shard=2", 2), ("pp=2", 2), ("ddp", 2)])
def test_rollback_skips_exactly_the_samples_between(pool, tmp_path, kind, world):
    """A poisoned sample in step 4 (or 5): back to the newest checkpoint older than its cause, then on with new data."""
    step = 5 if world == 1 or kind == "pp=2" else 4
    per_step = BATCH * (world if kind in ("shard=2", "ddp") else 1)
    poisoned = [per_step * (step - 1)]
    rules = ["train_loss is not finite -> rollback"]
    results = together(pool, tmp_path, rules, kind, poisoned, world=world)
    events = [event["evidence"] for event in read_events(tmp_path) if event["kind"] == "rule"]
    assert [event["action"] for event in events] == ["rollback"]
    good = 2
    decided = step if world == 1 else step + 1
    assert events[0]["evidence"]["restored_step"] == good
    assert events[0]["evidence"]["skipped_steps"] == [good + 1, decided]
    total = SAMPLES // per_step
    assert all(result["step"] == total for result in results)
    # Together the ranks' samples of each step are neighbours.
    everything = [list(range(i * per_step, (i + 1) * per_step)) for i in range(total)]
    if kind != "pp=2":
        assert in_order(results) == everything  # nothing is read again, nothing left out
    trained = everything[:good] + everything[decided:]
    assert_close(all_weights(results), expected_weights(trained))
    saved = checkpoint.newest_good(tmp_path / "checkpoints")
    assert saved.step is not None and saved.step > decided


@pytest.mark.parametrize(
    ("kind", "world", "name"),
    [("one", 1, "loss"), ("shard=2", 2, "loss"), ("shard=2", 2, "gradient"), ("pp=2", 2, "gradient")],
)
def test_a_veto_leaves_out_the_update_on_all_ranks(pool, tmp_path, kind, world, name):
    per_step = BATCH * (world if kind == "shard=2" else 1)
    rules = [f"{name} is not finite -> skip"]
    results = together(pool, tmp_path, rules, kind, [per_step * 2], world=world, keep=False)
    everything = [list(range(i * per_step, (i + 1) * per_step)) for i in range(SAMPLES // per_step)]
    assert all(torch.isfinite(value).all() for result in results for value in result["weights"].values())
    module, samples = Module(), Numbered()
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for step, numbers in enumerate(everything):
        optimizer.zero_grad()
        if step != 2:
            module.model(samples.x[numbers]).square().mean().backward()
        optimizer.step()
        scheduler.step()
    assert_close(all_weights(results), module.state_dict())
    skips = [event for event in read_events(tmp_path) if event["kind"] == "skip"]
    assert [event["evidence"]["step"] for event in skips] == [3]


def random_run(seed):
    chance = random.Random(seed)
    kind, world = chance.choice([("ddp", 2), ("shard=2", 2), ("pp=2", 2), ("tp=2", 2), ("pp=2,shard=2", 4), ("ddp", 3)])
    return kind, world, chance.randrange(world), chance.randint(1, 4)


def stop_somewhere(pool, tmp_path, seed):
    kind, world, rank, step = random_run(seed)
    rules = ["trouble > 0 -> stop"]
    results = together(pool, tmp_path, rules, kind, world=world, keep=False, callbacks=[Publish(rank, step)], epochs=2)
    assert {result["step"] for result in results} == {step + 1}, (kind, world, rank, step)
    (event,) = [event["evidence"] for event in read_events(tmp_path) if event["kind"] == "rule"]
    assert event["evidence"]["ranks"] == [rank] and event["action"] == "stop"


@pytest.mark.parametrize("seed", [0, 1])
def test_all_ranks_stop_at_one_step(pool, tmp_path, seed):
    stop_somewhere(pool, tmp_path, seed)


@pytest.mark.cluster
@pytest.mark.parametrize("seed", range(2, 52))
def test_all_ranks_stop_at_one_step_in_a_series(pool, tmp_path, seed):
    stop_somewhere(pool, tmp_path, seed)


def test_rollbacks_are_bounded_and_the_next_stronger_action_follows(tmp_path):
    rules = ["trouble > 0 -> rollback"]
    result = fit(tmp_path, rules, callbacks=[Publish(0, 5)], max_rollbacks=2, epochs=2)
    actions = [event["evidence"]["action"] for event in read_events(tmp_path) if event["kind"] == "rule"]
    assert actions[-1] == "stop" and actions.count("rollback") <= 2 and result["step"] < 24


def test_fallback_names_the_next_layout(tmp_path):
    rules = ["trouble > 0 -> fallback"]
    result = fit(tmp_path, rules, callbacks=[Publish(0, 3)], fallbacks=["shard=2", "replicate=2"])
    assert result["code"] == 76
    written = json.loads((tmp_path / "next_layout.json").read_text())
    assert written["layout"] == "shard=2" and written["rule"] == rules[0]
    assert checkpoint.newest_good(tmp_path / "checkpoints").step >= 4


@pytest.mark.parametrize(("answer", "steps"), [("yes", 12), ("no", 6), (None, 6)])
def test_hold_waits_for_an_answer(tmp_path, answer, steps):
    if answer:
        (tmp_path / "hold_answer").write_text(answer + "\n")
    result = fit(tmp_path, ["trouble > 0 -> hold"], callbacks=[Publish(0, 3)], hold_minutes=0.005)
    held = [event for event in read_events(tmp_path) if event["kind"] == "hold answered"]
    assert [event["evidence"]["answer"] for event in held] == [answer or "none"]
    assert result["step"] == steps


def test_notices_go_to_an_address_and_to_a_command(tmp_path, monkeypatch):
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if len(got) == 1 else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    monkeypatch.setattr("lightning_dist.callbacks.notices.PAUSE", 0.01)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rules = ["trouble > 0 -> escalate"]
    address = f"http://127.0.0.1:{server.server_port}/hooks/verysecret"
    result = fit(tmp_path, rules, keep=False, callbacks=[Publish(0, 3)], escalate=address, owner="Ada")
    server.shutdown()
    server.server_close()
    assert len(got) == 2 and got[1]["owner"] == "Ada" and got[1]["rule"] == rules[0] and got[1]["step"] == 3
    assert result["step"] == 12 and not any("verysecret" in said for said in result["warnings"])
    assert any("owner: Ada" in said for said in result["warnings"])
    command = f'echo "$LIGHTNING_DIST_STEP $LIGHTNING_DIST_OWNER" > {tmp_path}/told'
    fit(tmp_path, rules, keep=False, callbacks=[Publish(0, 4)], escalate=command, owner="Ada")
    assert Path(tmp_path, "told").read_text() == "4 Ada\n"


def test_a_rule_without_its_metric_says_so_after_the_first_epoch(tmp_path):
    result = fit(tmp_path, ["trian_loss > 3 -> warn"], keep=False)
    (said,) = [said for said in result["warnings"] if "has not been judged" in said]
    assert "'trian_loss' has had no value; did you mean train_loss" in said


FLAT = [3, 2, 1, 1, 1, 1, 1, 1]


class Kill(L.Callback):
    """The run ends by an exception at the beginning of an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            raise SystemExit(1)


@pytest.mark.parametrize("killed", [1, 3, 4, 5])
def test_a_resumed_run_stops_at_the_same_evaluation(tmp_path, killed):
    """It improves three times and is flat then: three evaluations later, after epoch 6, it is over."""
    rules = ["val_loss not improved for 3 evaluations -> stop"]
    fit(tmp_path, rules, callbacks=[Kill(killed)], epochs=8, module=Module(FLAT))
    resumed = fit(tmp_path, rules, epochs=8, module=Module(FLAT), resume=True)
    assert resumed["step"] == 6 * 12


def test_what_can_not_work_is_refused(tmp_path):
    for settings, sentence in [
        ({"rules": "x > 1 -> stop"}, "give a list of 1 to 32 rules"),
        ({"rules": ["x > 1 -> escalate"]}, "escalate=None does not fit"),
        ({"rules": ["x > 1 -> fallback"]}, r"fallbacks=\(\) does not fit"),
        ({"rules": ["cost > 1 -> stop"]}, "price_per_device_hour=None does not fit"),
        ({"rules": ["x > 1 -> stop"], "max_rollbacks": 0}, "max_rollbacks=0 does not fit"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            StopRules(**settings)
    with pytest.raises(RuleError, match="at column 10"):
        StopRules(["x > 1 -> stpo"])
    with pytest.raises(ValueError, match="'rollback' needs a FaultTolerantCheckpoint"):
        fit(tmp_path, ["x > 1 -> rollback"], keep=False)
