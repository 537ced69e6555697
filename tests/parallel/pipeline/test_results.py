"""What is logged and returned for microbatches becomes what one process logs and returns for the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dist.parallel.pipeline.foreign import ForeignActivation, PipelineError
from lightning_dist.parallel.pipeline.results import LogRecorder, ResultSharer, merge_outputs, weighted_mean
from lightning_dist.testing import WorkerError, WorkerPool


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_outputs_are_joined_averaged_or_added_up() -> None:
    outputs = [
        {
            "loss": number(1),
            "logits": torch.ones(2, 3),
            "right": torch.tensor(1),
            "text": ["a", "b"],
            "task": "qa",
            "n": 0.5,
        },
        {
            "loss": number(4),
            "logits": torch.zeros(1, 3),
            "right": torch.tensor(0),
            "text": ["c"],
            "task": "qa",
            "n": 2.0,
        },
    ]
    merged = merge_outputs(outputs, [2, 1], [2, 1])
    assert merged["loss"] == 2.0 and merged["right"] == 1 and merged["n"] == 1.0
    assert merged["logits"].tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert merged["text"] == ["a", "b", "c"] and merged["task"] == "qa"
    assert merge_outputs([None, None], [1, 1], [1, 1]) is None
    assert merge_outputs([(number(1), [3]), (number(3), [3])], [1, 1], [1, 1]) == (2.0, [3, 3])
    assert merge_outputs([torch.ones(2), torch.ones(3)], [1, 1], [1, 1])[1].shape == (3,)


def test_a_value_of_weight_zero_does_not_count_even_if_undefined() -> None:
    assert weighted_mean([number(math.nan), number(3)], [0.0, 2.0]) == 3
    assert weighted_mean([number(math.nan), number(3)], [number(0), number(2)]) == 3


def recorder(listening: bool = True) -> LogRecorder:
    module = nn.Module()
    module.accuracy = nn.Identity()  # stands for a torchmetrics object
    return LogRecorder(module, [2, 1], [2 / 3, 1 / 3], listening)


def log_twice(log: LogRecorder, name: str, first: Any, second: Any, **arguments: Any) -> None:
    for microbatch, value in enumerate((first, second)):
        log.microbatch = microbatch
        log(name, value, **arguments)


def test_logged_values_are_those_of_the_batch() -> None:
    log = recorder()
    log_twice(log, "loss", number(1), number(4), prog_bar=True)
    log_twice(log, "plain", 1.0, 4)
    log_twice(log, "count", number(3), number(4), reduce_fx="sum")
    log_twice(log, "most", number(3), number(4), reduce_fx=torch.max)
    log_twice(log, "own", number(1), number(4), batch_size=5)
    log_twice(log, "metric", log._module.accuracy, log._module.accuracy, on_epoch=True)
    values = log.values()
    assert values["loss"].value == 2 and values["loss"].arguments == {"prog_bar": True, "batch_size": 3}
    assert values["plain"].value == 2 and values["count"].value == 7 and values["most"].value == 4
    assert values["own"].value == 2.5 and values["own"].arguments["batch_size"] == 10
    assert (values["metric"].value, values["metric"].metric) == (None, "accuracy")
    assert list(values) == ["loss", "plain", "count", "most", "own", "metric"]


def test_other_ranks_log_nothing_and_unknown_metrics_are_named() -> None:
    silent = recorder(listening=False)
    log_twice(silent, "loss", number(1), number(2))
    assert silent.values() == {}
    log = recorder()
    log_twice(log, "metric", nn.Identity(), nn.Identity())
    with pytest.raises(PipelineError, match=r"'metric' is no attribute of Module"):
        log.values()


def test_a_value_of_another_stage_is_refused() -> None:
    foreign = ForeignActivation.stand_for("model.embed", (2,), torch.float32, torch.device("cpu"))
    with pytest.raises(PipelineError, match=r"logged as 'norm' is computed from the output of model\.embed"):
        recorder()("norm", foreign.norm())


def share_from_last(what: str) -> Any:
    values: dict[str, Any] = {
        "nested": {"a": [torch.arange(3), number(2.5)], "b": ("text", None, torch.ones(2, 2)), "c": torch.ones(0)},
        "unsendable": {"f": lambda: None},
    }
    group = dist.group.WORLD
    source = dist.get_world_size() - 1
    mine = values[what] if dist.get_rank() == source else None
    return ResultSharer(source, group, group, torch.device("cpu")).share(mine)


def test_every_rank_gets_what_one_has(pool: WorkerPool) -> None:
    for value in pool.run(share_from_last, 3, "nested", timeout=60):
        assert value["a"][0].tolist() == [0, 1, 2] and value["a"][1] == 2.5 and value["a"][1].dtype == torch.float64
        assert value["b"][:2] == ("text", None) and value["b"][2].shape == (2, 2) and value["c"].shape == (0,)


def share_in_turn() -> list[Any]:
    group = dist.group.WORLD
    sharer = ResultSharer(0, group, group, torch.device("cpu"))
    turns: list[Any] = [{"a": number(1.0)}, {"a": number(2.0)}, {"a": number(3.0), "b": 1}, {"a": number(4.0), "b": 2}]
    return [sharer.share(turn if dist.get_rank() == 0 else None) for turn in turns]


def test_every_turn_has_its_own_values(pool: WorkerPool) -> None:
    """Tensors change from turn to turn; structure and plain values are sent again only where they do."""
    for turns in pool.run(share_in_turn, 2, timeout=60):
        assert [turn["a"].item() for turn in turns] == [1, 2, 3, 4]
        assert [turn.get("b") for turn in turns] == [None, None, 1, 2]


def test_what_can_not_be_sent_is_an_error_on_every_rank(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="can't be sent to the other ranks") as caught:
        pool.run(share_from_last, 2, "unsendable", timeout=60)
    assert all("can't be sent to the other ranks" in str(failure) for failure in caught.value.failures)
    assert len(caught.value.failures) == 2
