"""The checkpoint directory: written by all ranks and committed at once, verified, read back into any layout.

Everything here works with torch alone; the functions that a run calls together say which collectives they issue.
"""

from lightning_dist.checkpoint.background import BackgroundWriter
from lightning_dist.checkpoint.export import consolidate, export_safetensors
from lightning_dist.checkpoint.format import CheckpointError, DamagedCheckpointError
from lightning_dist.checkpoint.history import (
    Choice,
    Entry,
    agree_on_newest,
    delete,
    list_checkpoints,
    newest_good,
    retain,
    sweep,
    verify_together,
)
from lightning_dist.checkpoint.huggingface import LoadedWeights, export_huggingface, load_huggingface
from lightning_dist.checkpoint.inspect import contents, diff, overview, verify_all
from lightning_dist.checkpoint.optimizer_state import (
    optimizer_state_by_name,
    optimizer_state_to_fill,
    restore_optimizer,
)
from lightning_dist.checkpoint.random_state import capture_random_state, restore_random_state
from lightning_dist.checkpoint.read import (
    LoadReport,
    is_checkpoint,
    load_into,
    read_manifest,
    read_rank_state,
    read_tensors,
    read_trainer_state,
    top_level_names,
)
from lightning_dist.checkpoint.verify import Report, verify
from lightning_dist.checkpoint.write import save

__all__ = [
    "BackgroundWriter",
    "CheckpointError",
    "Choice",
    "DamagedCheckpointError",
    "Entry",
    "LoadReport",
    "LoadedWeights",
    "Report",
    "agree_on_newest",
    "capture_random_state",
    "consolidate",
    "contents",
    "delete",
    "diff",
    "export_huggingface",
    "export_safetensors",
    "is_checkpoint",
    "list_checkpoints",
    "load_huggingface",
    "load_into",
    "newest_good",
    "optimizer_state_by_name",
    "optimizer_state_to_fill",
    "overview",
    "read_manifest",
    "read_rank_state",
    "read_tensors",
    "read_trainer_state",
    "restore_optimizer",
    "restore_random_state",
    "retain",
    "save",
    "sweep",
    "top_level_names",
    "verify",
    "verify_all",
    "verify_together",
]
