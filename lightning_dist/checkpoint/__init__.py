"""The checkpoint directory: written by all ranks and committed at once, verified, read back into any layout.

Everything here works with torch alone; the functions that a run calls together say which collectives they issue.
"""

from lightning_dist.checkpoint.export import consolidate
from lightning_dist.checkpoint.format import CheckpointError, DamagedCheckpointError
from lightning_dist.checkpoint.optimizer_state import (
    optimizer_state_by_name,
    optimizer_state_to_fill,
    restore_optimizer,
)
from lightning_dist.checkpoint.read import (
    LoadReport,
    is_checkpoint,
    load_into,
    read_manifest,
    read_rank_state,
    read_tensors,
    read_trainer_state,
)
from lightning_dist.checkpoint.verify import Report, verify
from lightning_dist.checkpoint.write import save

__all__ = [
    "CheckpointError",
    "DamagedCheckpointError",
    "LoadReport",
    "Report",
    "consolidate",
    "is_checkpoint",
    "load_into",
    "optimizer_state_by_name",
    "optimizer_state_to_fill",
    "read_manifest",
    "read_rank_state",
    "read_tensors",
    "read_trainer_state",
    "restore_optimizer",
    "save",
    "verify",
]
