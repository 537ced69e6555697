"""``lightning-dist verify --layout pp=… --schedule …``: the check on one's own module, as the command line runs it."""

import pytest
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from lightning_dist import testing
from lightning_dist.cli import app
from tests.strategies.test_pipeline_axis import Tied
from tests.strategies.training import data


def with_batches():
    return Tied(), DataLoader(data(64), 16)


@pytest.mark.parametrize(
    ("layout", "schedule", "ranks"), [("pp=2", "ZBVZeroBubble", 2), ("pp=2,shard=2", "Interleaved1F1B", 4)]
)
def test_a_pipeline_is_verified_from_the_command_line(pool, monkeypatch, layout, schedule, ranks):
    own = testing.compare_with_one_process
    monkeypatch.setattr(testing, "compare_with_one_process", lambda *a, **k: own(*a, **k, pool=pool))
    arguments = [
        "--layout",
        layout,
        "--schedule",
        schedule,
        "--microbatches",
        "4",
        "--accumulate",
        "2",
        "--clip",
        "0.1",
    ]
    result = CliRunner().invoke(app, ["verify", f"{__name__}:with_batches", *arguments, "--steps", "2"])
    assert result.exit_code == 0, result.output
    assert f"SAME: layout {layout} ({ranks} ranks)" in result.stdout
