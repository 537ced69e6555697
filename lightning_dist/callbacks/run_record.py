"""``RunRecord``: a run says what went into it, what happened, and what is not known."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor

from lightning_dist.callbacks.run_values import values_of
from lightning_dist.parallel.flag_exchange import AgreedExit
from lightning_dist.record import document, versions
from lightning_dist.record.files import RECORD, RecordFiles, read_events, read_record, write_record
from lightning_dist.record.redaction import redact
from lightning_dist.telemetry.published import published

NOT_STATED = "not stated"
MEASURED = {
    "compute": ("forward", "backward", "step_time", "mfu", "tokens_per_second", "samples_per_second", "memory"),
    "communicate": ("exposed_comm", "data_wait", "stalls"),
    "synchronise": ("optimizer", "bubble", "goodput"),
    "recover": ("checkpoint", "unprotected_minutes", "restarts"),
}
"""Which telemetry values are a stage's resources."""


def record_event(trainer: Trainer, kind: str, **evidence: Any) -> None:
    """Reports a decision or failure to the run's record; does nothing without a :class:`RunRecord`.

    Any callback may call it, on any rank and at any step; no collectives. Not for signal handlers: it writes a file.

    Args:
        trainer: The run's trainer.
        kind: What happened, its first word one that tells the stage: ``layout``, ``stall``, ``straggler``, ``rule``,
            ``skip``, ``hold``; anything else (``restore``, ``signal``, ``failure``) belongs to recovery.
        evidence: What it rests on: numbers, texts, lists; secrets are taken out.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RunRecord):
            callback.add_event(trainer, kind, evidence)


class RunRecord(Callback):
    """Writes ``run_record.json`` and ``run_record.md`` into the run's folder, with all values and events beside them.

    The record has one section for each stage of a distributed step (docs/ARCHITECTURE.md) with inputs, outputs,
    resources, decisions and what is uncertain; the answers to seven questions; versions and hashes of code, packages,
    data, tokenizer, initial weights, configuration and hardware. Secrets are taken out, and of the environment only a
    short list of variables is read. ``lightning-dist report`` shows it, ``lightning-dist compare`` judges it.

    Values are read without waiting for a device; those of one are a step late. Collectives: a CPU group, and one
    all-gather of small objects when a fit starts.

    Args:
        data: Files and folders that are read; each is hashed when the run starts.
        config: The run's configuration: a mapping, or the path of a file.
        acceptance: What the run will be judged by: the path of an acceptance file. It is hashed
            now, so later changes show.
        tokenizer: Files of the tokenizer.
        objective: What the run is for, in a sentence.
        baseline: What it is compared with, in a sentence or a path.
        dirpath: Where to write; None is the logger's folder, or the trainer's root folder.
        every_n_steps: How often values are written.
    """

    def __init__(
        self,
        data: Sequence[str | PathLike[str]] = (),
        config: Mapping[str, Any] | str | PathLike[str] | None = None,
        acceptance: str | PathLike[str] | None = None,
        *,
        tokenizer: Sequence[str | PathLike[str]] = (),
        objective: str | None = None,
        baseline: str | None = None,
        dirpath: str | PathLike[str] | None = None,
        every_n_steps: int = 1,
    ) -> None:
        for name, value in (("data", data), ("tokenizer", tokenizer)):
            if isinstance(value, str):
                raise ValueError(f"{name}={value!r} does not fit: give a list of paths.")
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps!r} does not fit: give a whole number of at least 1.")
        self._data, self._tokenizer, self._config, self._acceptance = data, tokenizer, config, acceptance
        self._objective, self._baseline = objective, baseline
        self._dirpath, self._every_n_steps = dirpath, every_n_steps
        self._files: RecordFiles | None = None
        self._record: dict[str, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._row: Any = None
        self._newest: dict[str, float] = {}

    @property
    def folder(self) -> str | None:
        """Where the record is written, once a fit has begun."""
        return str(self._files.folder) if self._files is not None else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Settles the folder, the same on all ranks.

        Collectives: makes a CPU group; a broadcast by the strategy.
        """
        if stage != "fit":
            return
        if self._group is None and trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo")
        own = self._dirpath or trainer.log_dir or trainer.default_root_dir
        self._files = RecordFiles(trainer.strategy.broadcast(str(own)), trainer.global_rank)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._files is not None
        own = {
            "rank": trainer.global_rank,
            "parameters": sum(_local(p).numel() for p in pl_module.parameters()),
            "bytes": sum(_local(p).numel() * p.element_size() for p in pl_module.parameters()),
            "initial_weights": versions.weights_hash(pl_module),
        }
        everyone: list[Any] = [own]
        if self._group is not None:
            everyone = [None] * trainer.world_size
            dist.all_gather_object(everyone, own, group=self._group)
        if not trainer.is_global_zero:
            return
        earlier: dict[str, Any] = {}
        if (self._files.folder / RECORD).is_file():
            earlier = read_record(self._files.folder)
        self._record = self._describe(trainer, pl_module, everyone, earlier)
        self._write(trainer)

    def add_event(self, trainer: Trainer, kind: str, evidence: Mapping[str, Any]) -> None:
        """See :func:`record_event`."""
        if self._files is not None:
            event = {"time": time.time(), "step": trainer.global_step, "rank": trainer.global_rank, "kind": kind}
            self._files.add_event({**event, "evidence": redact(dict(evidence))})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        row = values_of(trainer).at_step(trainer)
        if row is None or row is self._row:
            return
        self._row = row
        self._newest |= row.values
        if trainer.global_step % self._every_n_steps == 0:
            self._keep(trainer, row.values, False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        row = values_of(trainer).at_evaluation(trainer)
        self._newest |= row.values
        self._keep(trainer, row.values, True)
        if trainer.is_global_zero:
            self._write(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close(trainer, "finished")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._files is None:
            return
        if isinstance(exception, AgreedExit):
            self.add_event(trainer, "left by agreement", {"exit_code": exception.code})
            self._close(trainer, f"left by agreement with exit code {exception.code}")
        else:
            self.add_event(trainer, "failure", {"type": type(exception).__name__, "message": str(exception)})
            self._close(trainer, "failed")

    def _keep(self, trainer: Trainer, values: Mapping[str, float], evaluation: bool) -> None:
        if trainer.is_global_zero and self._files is not None:
            self._files.add_values({**values, "evaluation": float(evaluation)})

    def _close(self, trainer: Trainer, state: str) -> None:
        if trainer.is_global_zero and self._record and self._files is not None:
            self._record["run"] |= {"state": state, "ended": _now()}
            self._write(trainer)
            self._files.close()

    # --- content -----------------------------------------------------------------------------------------------------

    def _describe(
        self, trainer: Trainer, module: LightningModule, ranks: list[dict[str, Any]], earlier: Mapping[str, Any]
    ) -> dict[str, Any]:
        config: Any = self._config
        if isinstance(config, str | PathLike):
            config = versions.file_versions([config])
        run = {
            "state": "running",
            "began": earlier.get("run", {}).get("began") or _now(),
            "attempts": earlier.get("run", {}).get("attempts", 0) + 1,
            "from_step": trainer.global_step,
            "folder": self.folder,
        }
        return {
            "format": 1,
            "run": run,
            "versions": {
                "code": versions.code_version(),
                "packages": versions.package_versions(),
                "data": versions.file_versions(self._data),
                "tokenizer": versions.file_versions(self._tokenizer),
                "initial_weights": {f"rank {own['rank']}": own["initial_weights"] for own in ranks},
                # Those of the first attempt: thresholds are written before a run, not before its last restart.
                "acceptance": earlier.get("versions", {}).get("acceptance")
                or versions.file_versions([self._acceptance] if self._acceptance else []),
                "configuration": redact(config),
                "hyperparameters": redact(dict(module.hparams)),
                "hardware": versions.hardware(),
                "environment": versions.environment(),
            },
            "ranks": ranks,
            "stages": _stages(trainer, module, ranks),
            "events": [],
        }

    def _write(self, trainer: Trainer) -> None:
        assert self._files is not None
        self._files.flush()
        events = read_events(self._files.folder)
        record = document.with_events(self._with_results(trainer), events)
        record["questions"] = self._answers(trainer, record)
        write_record(self._files.folder, record, document.as_page(record))

    def _with_results(self, trainer: Trainer) -> dict[str, Any]:
        """What has been measured so far, put into the stages."""
        stages = {name: dict(part) for name, part in self._record["stages"].items()}
        measured = published()
        for stage, names in MEASURED.items():
            known = {name: redact(measured[name]) for name in names if name in measured}
            stages[stage]["resources"] = {**stages[stage]["resources"], **known}
            missing = [name for name in names if name not in measured]
            if missing:
                sentence = f"not measured: {', '.join(missing)} (SyncStallDetector measures them)"
                stages[stage]["uncertainty"] = [*stages[stage]["uncertainty"], sentence]
        newest = {name: redact(value) for name, value in self._newest.items() if name not in measured}
        stages["compute"]["outputs"] = {**stages["compute"]["outputs"], **newest}
        stages["synchronise"]["outputs"] = {"optimizer_steps": trainer.global_step}
        return {**self._record, "stages": stages}

    def _answers(self, trainer: Trainer, record: Mapping[str, Any]) -> dict[str, Any]:
        stages, events = record["stages"], record["events"]
        failures = [event for event in events if event["kind"] in ("failure", "restore", "stall", "hang")]
        seconds = values_of(trainer).seconds
        return {
            "objective": redact(self._objective or NOT_STATED),
            "mechanism": {**stages["partition"]["outputs"], **stages["compute"]["inputs"]},
            "baseline": redact(self._baseline or NOT_STATED),
            "evidence": {**stages["compute"]["outputs"], "decisions": len(events)},
            "operations": {
                "devices": trainer.world_size,
                "hours": seconds / 3600,
                "device_hours": seconds / 3600 * trainer.world_size,
                "attempts": record["run"]["attempts"],
            },
            "risk": [sentence for stage in stages.values() for sentence in stage["uncertainty"]],
            "recovery": {**stages["recover"]["inputs"], "failures_and_restarts": len(failures)},
        }


def _stages(trainer: Trainer, module: LightningModule, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    stages = document.empty_stages()
    strategy: Any = trainer.strategy
    layout = getattr(strategy, "layout", None)
    parameters = {"rank": [own["parameters"] for own in ranks], "bytes": [own["bytes"] for own in ranks]}
    stages["partition"] |= {
        "inputs": {"world_size": trainer.world_size, "nodes": trainer.num_nodes, "module": type(module).__name__},
        "outputs": {
            "strategy": type(strategy).__name__,
            "layout": str(layout) if layout is not None else "whole copies",
        },
        "resources": {"parameters_of_ranks": parameters["rank"], "parameter_bytes_of_ranks": parameters["bytes"]},
        "uncertainty": ["rejected layouts: `lightning-dist plan` names them; they are not part of the run"],
    }
    stages["compute"]["inputs"] = {
        "precision": str(trainer.precision),
        "accelerator": type(trainer.accelerator).__name__,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
    }
    stages["communicate"] |= {
        "inputs": {"backend": dist.get_backend() if dist.is_initialized() else "none (one process)"},
        "outputs": {"ranks": trainer.world_size},
    }
    stages["synchronise"]["inputs"] = {
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
        "learning_rates": [
            redact(group["lr"]) for o in trainer.optimizers for group in o.param_groups if "lr" in group
        ],
        "gradient_clip_val": trainer.gradient_clip_val,
    }
    keepers = [type(callback).__name__ for callback in trainer.checkpoint_callbacks]
    stages["recover"]["inputs"] = {"checkpoints": keepers or "none", "resumed_from": redact(trainer.ckpt_path)}
    if not keepers:
        stages["recover"]["uncertainty"] = ["nothing is saved: a failure costs the whole run"]
    return redact(stages)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
