"""``StopRules``: rules in words that watch a run, with one decision for all ranks at one step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.callbacks.flags import flags_of
from lightning_dist.callbacks.notices import Notifier
from lightning_dist.callbacks.rollback import find_good, keeper_of, restore
from lightning_dist.callbacks.run_record import record_event
from lightning_dist.callbacks.run_values import RunValues, values_of
from lightning_dist.callbacks.stall import unwatched
from lightning_dist.parallel.flag_exchange import AgreedExit, Flag, FlagExchange
from lightning_dist.parallel.gradients import local_tensor, norms
from lightning_dist.rules.evaluate import Firing, RuleBook
from lightning_dist.rules.syntax import ACTIONS, Rule, near, parse_rule

FALLBACK = 76
"""Exit code of a run that asks to be started again with the layout that ``next_layout.json`` names."""
NEXT_LAYOUT, ANSWER = "next_layout.json", "hold_answer"
FIRST_RULE_BIT, MOST_RULES = 8, 32
POLL = 0.2
"""Seconds between looks at the answer of a person."""


class StopRules(Callback):
    """Watches a run by rules such as ``"train_loss is not finite -> rollback"`` (docs/stop_rules.md has the language).

    Every rank judges what it knows at each optimizer step; a rule that fires on any rank is decided by all ranks
    together one step later (at once with one process, and after an evaluation). ``skip`` is decided before the step.

    Collectives: none of its own on ordinary steps (rules ride on the run's flag exchange); with a ``skip`` rule one
    all-reduce of a number over the world before each step; where a rule fires, an all-gather of small objects.

    Args:
        rules: The rules, at most 32.
        price_per_device_hour: What the name ``cost`` is counted by.
        escalate: A web address that takes JSON, or a command (see :class:`~lightning_dist.callbacks.notices.Notifier`).
        owner: Who answers; named in every notice.
        fallbacks: Layouts to go on with, in order, for the action ``fallback``.
        max_rollbacks: After so many in a run, the next stronger action is taken instead.
        hold_minutes: How long ``hold`` waits for an answer; without one the run stops.

    Raises:
        RuleError: If a rule can't be understood, with the column.
        ValueError: If an argument does not fit, or, when a fit is set up, an action needs what is not there.
    """

    def __init__(
        self,
        rules: Sequence[str],
        price_per_device_hour: float | None = None,
        escalate: str | None = None,
        owner: str | None = None,
        *,
        fallbacks: Sequence[str] = (),
        max_rollbacks: int = 3,
        hold_minutes: float = 60.0,
    ) -> None:
        if isinstance(rules, str) or not 1 <= len(rules) <= MOST_RULES:
            raise ValueError(f"rules={rules!r} does not fit: give a list of 1 to {MOST_RULES} rules.")
        if isinstance(fallbacks, str):
            raise ValueError(f"fallbacks={fallbacks!r} does not fit: give a list of layouts.")
        for name, value in (("max_rollbacks", max_rollbacks), ("hold_minutes", hold_minutes)):
            if value <= 0:
                raise ValueError(f"{name}={value!r} does not fit: give a number above 0.")
        parsed = [parse_rule(rule) for rule in rules]
        actions = {rule.action for rule in parsed}
        if "escalate" in actions and escalate is None:
            raise ValueError("escalate=None does not fit: a rule escalates; give a web address or a command.")
        if "fallback" in actions and not fallbacks:
            raise ValueError("fallbacks=() does not fit: a rule falls back; give the layouts to go on with.")
        if price_per_device_hour is None and any("cost" in rule.names for rule in parsed):
            raise ValueError("price_per_device_hour=None does not fit: a rule asks for the cost.")
        self._book = RuleBook([rule for rule in parsed if rule.action != "skip"], price_per_device_hour)
        self._vetoes = [rule for rule in parsed if rule.action == "skip"]
        self._notifier = Notifier(escalate)
        self._owner, self._fallbacks = owner, list(fallbacks)
        self._max_rollbacks, self._hold_minutes = max_rollbacks, hold_minutes
        self._rollbacks, self._skipped = 0, 0
        self._suspect: list[list[int]] = []
        self._decided: dict[int, int] = {}
        self._fired: dict[int, Firing] = {}
        self._bad_loss: Tensor | None = None
        self._later: tuple[str, int, dict[str, Any]] | None = None
        self._row: Any = None
        self._told_of_missing = False
        self._loaded_values: dict[str, Any] | None = None
        self._flags: FlagExchange | None = None
        self._values: RunValues | None = None
        self._group: dist.ProcessGroup | None = None
        self._folder = Path(".")

    # --- set-up and state --------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Looks whether the actions can be taken.

        Collectives: makes a CPU group; a broadcast by the strategy.
        """
        if stage != "fit":
            return
        actions = {state.rule.action for state in self._book.states} & {"checkpoint", "rollback", "hold"}
        if actions and keeper_of(trainer) is None:
            raise ValueError(
                f"The action {sorted(actions)[0]!r} needs a FaultTolerantCheckpoint among the Trainer's callbacks."
            )
        self._flags, self._values = flags_of(trainer), values_of(trainer)
        if self._group is None and trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo")
        self._folder = Path(trainer.strategy.broadcast(str(trainer.log_dir or trainer.default_root_dir)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "book": self._book.state_dict(),
            "rollbacks": self._rollbacks,
            "skipped": self._skipped,
            "suspect": [list(steps) for steps in self._suspect],
            "values": self._values.state_dict() if self._values is not None else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._book.load_state_dict(state_dict["book"])
        self._rollbacks, self._skipped = state_dict["rollbacks"], state_dict["skipped"]
        self._suspect = [list(steps) for steps in state_dict["suspect"]]
        self._loaded_values = state_dict["values"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loaded_values is not None:
            values_of(trainer).load_state_dict(self._loaded_values)

    # --- before a step -----------------------------------------------------------------------------------------------

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._vetoes:
            bad = ~torch.isfinite(loss.detach()).all()
            self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Takes the gradients away on all ranks where a number is not finite on one, before anybody clips or steps."""
        if not self._vetoes:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = {name for rule in self._vetoes for name in rule.names}
        bad = torch.zeros(2, device=pl_module.device)
        if "gradient" in names:
            parts = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
            if sizes := norms(parts, math.inf):
                bad[0] = (~torch.isfinite(torch.stack(sizes))).any()
        if "loss" in names and self._bad_loss is not None:
            bad[1] = self._bad_loss
        self._bad_loss = None
        own = bad.clone()
        if trainer.world_size > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if not bool(bad.any()):
            return
        for parameter in parameters:
            parameter.grad = None
        self._skipped += 1
        evidence: dict[str, Any] = {"ranks": [rank for rank, here in enumerate(self._gather(bool(own.any()))) if here]}
        evidence |= {"gradient_not_finite": bool(bad[0]), "loss_not_finite": bool(bad[1]), "skipped": self._skipped}
        rule = self._vetoes[0]
        self._tell(trainer, rule, "skip", trainer.global_step + 1, evidence)

    # --- at a boundary -----------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        row = values_of(trainer).at_step(trainer)
        if row is None or row is self._row:
            return
        self._row = row
        assert self._flags is not None
        for firing in self._book.judge(row.values):
            self._fired[firing.index] = firing
            self._flags.raise_flag(Flag(1 << (FIRST_RULE_BIT + firing.index)))
        told = int(self._flags.at_boundary(trainer.global_step)) >> FIRST_RULE_BIT
        if told:
            self._decide(trainer, {index for index in range(MOST_RULES) if told >> index & 1})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        row = values_of(trainer).at_evaluation(trainer)
        for firing in self._book.judge(row.values, evaluation=True):
            self._fired[firing.index] = firing
        waiting = {index for index, firing in self._fired.items() if firing.step == trainer.global_step}
        everyone = self._gather(waiting)
        if indices := set().union(*everyone):
            self._decide(trainer, indices)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says after the first epoch which rules wait for a value that nobody logs."""
        if self._told_of_missing:
            return
        self._told_of_missing = True
        for index, names in self._book.missing().items():
            hints = "".join(f" {name!r} has had no value{near(name, self._book.known)}" for name in sorted(names))
            rank_zero_warn(
                f"The rule {self._book.states[index].rule.text!r} has not been judged in this epoch:{hints}."
            )

    def _decide(self, trainer: Trainer, indices: set[int]) -> None:
        """All ranks are here for the same rules at the same step."""
        step = trainer.global_step
        # A rank that saw the same thing one step later has raised its flag before it knew of the decision.
        if self._group is not None:
            indices = {index for index in indices if step - self._decided.get(index, -9) > 1}
        found: list[dict[int, Firing]] = self._gather({index: self._fired.get(index) for index in indices})
        for index in indices:
            if self._fired.pop(index, None) is None:
                self._book.states[index].note_fired(self._book.known)
            self._decided[index] = step
        chosen = sorted(indices, key=lambda index: ACTIONS.index(self._book.states[index].rule.action))
        for index in chosen:
            firings = {rank: own[index] for rank, own in enumerate(found) if own.get(index) is not None}
            if not firings:
                continue
            rule = self._book.states[index].rule
            first = min(firing.first_step for firing in firings.values())
            evidence = {"since_step": first, "ranks": sorted(firings), **firings[min(firings)].evidence}
            self._act(trainer, rule, rule.action, evidence)

    def _act(self, trainer: Trainer, rule: Rule, action: str, evidence: dict[str, Any]) -> None:
        step = trainer.global_step
        assert self._flags is not None
        if action == "rollback":
            action, evidence = self._roll_back(trainer, evidence)
        if action == "fallback":
            layout = self._next_layout(trainer)
            action = "fallback" if layout is not None else "stop"
            evidence = {**evidence, "next_layout": layout}
        self._tell(trainer, rule, action, step, evidence)
        if action == "stop":
            trainer.should_stop = True
        elif action == "checkpoint":
            self._flags.raise_flag(Flag.SAVE)
        elif action in ("hold", "fallback"):
            self._flags.raise_flag(Flag.SAVE)
            # The flag is read two boundaries later, and the checkpoint is taken there.
            self._later = (action, step + 2, {**evidence, "rule": rule.text})

    def _roll_back(self, trainer: Trainer, evidence: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Restores; or the next stronger action, and why."""
        stronger = "fallback" if self._fallbacks else "stop"
        if self._rollbacks >= self._max_rollbacks:
            return stronger, {**evidence, "why": f"{self._rollbacks} rollbacks were not enough"}
        keeper = keeper_of(trainer)
        assert keeper is not None and self._flags is not None
        good = find_good(keeper, evidence["since_step"], self._suspect, self._group)
        if good is None:
            return stronger, {**evidence, "why": "no good checkpoint is older than the cause"}
        path, step = good
        restore(trainer, path)
        self._rollbacks += 1
        self._suspect.append([step, trainer.global_step])
        self._book.forget_running()
        # Saved soon, so that a run that goes on later has neither these weights nor these samples again.
        self._flags.raise_flag(Flag.SAVE)
        return "rollback", {**evidence, "restored_step": step, "skipped_steps": [step + 1, trainer.global_step]}

    def _next_layout(self, trainer: Trainer) -> str | None:
        now = str(getattr(trainer.strategy, "layout", ""))
        place = self._fallbacks.index(now) + 1 if now in self._fallbacks else 0
        return self._fallbacks[place] if place < len(self._fallbacks) else None

    # --- what waits for a checkpoint ---------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._later is not None and trainer.global_step >= self._later[1]:
            self._do_later(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._later is not None:
            self._do_later(trainer)

    def _do_later(self, trainer: Trainer) -> None:
        assert self._later is not None
        (action, _, evidence), self._later = self._later, None
        if action == "fallback":
            if trainer.is_global_zero:
                content = {"layout": evidence["next_layout"], "step": trainer.global_step, "rule": evidence["rule"]}
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / NEXT_LAYOUT).write_text(json.dumps(content) + "\n", encoding="utf-8")
            raise AgreedExit(FALLBACK)
        with unwatched(trainer):
            answer = self._wait_for_answer(trainer)
        record_event(trainer, "hold answered", answer=answer, rule=evidence["rule"])
        if answer != "yes":
            trainer.should_stop = True

    def _wait_for_answer(self, trainer: Trainer) -> str:
        """``yes``, ``no``, or ``none`` where nobody has answered by the deadline; the same on all ranks.

        Collectives: a broadcast of a small object, again and again, so that no rank waits longer than a group allows.
        """
        path, end = self._folder / ANSWER, time.monotonic() + 60 * self._hold_minutes
        rank_zero_warn(f"The run waits for an answer: write yes or no into {path}.")
        while True:
            box: list[Any] = [None]
            if trainer.is_global_zero:
                said = path.read_text(encoding="utf-8").strip().lower() if path.is_file() else ""
                if said in ("yes", "no"):
                    path.unlink()
                    box = [said]
                elif time.monotonic() > end:
                    box = ["none"]
            if self._group is not None:
                dist.broadcast_object_list(box, 0, group=self._group)
            if box[0] is not None:
                return str(box[0])
            time.sleep(POLL)

    # --- telling -----------------------------------------------------------------------------------------------------

    def _tell(self, trainer: Trainer, rule: Rule, action: str, step: int, evidence: dict[str, Any]) -> None:
        if not trainer.is_global_zero:
            return
        notice = {"rule": rule.text, "action": action, "step": step, "owner": self._owner or "nobody named"}
        facts = ", ".join(f"{name} {value}" for name, value in evidence.items())
        rank_zero_warn(f"Step {step}: {action}, by the rule {rule.text!r} ({facts}; owner: {notice['owner']}).")
        record_event(trainer, "skip" if action == "skip" else "rule", **notice, evidence=evidence)
        writer: Any = getattr(trainer.logger, "experiment", None)
        if callable(getattr(writer, "add_text", None)):
            writer.add_text("decisions", f"{action}: {rule.text} ({facts})", step)
        if action not in ("warn", "checkpoint", "skip"):
            self._notifier.send({**notice, "evidence": evidence})

    def _gather(self, own: Any) -> list[Any]:
        if self._group is None:
            return [own]
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, own, group=self._group)
        return everyone

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._notifier.close()
