"""One single file out of a checkpoint, for everything that does not know the directory format."""

from __future__ import annotations

import os
from typing import Any

import torch

from lightning_dist.checkpoint.format import CheckpointError
from lightning_dist.checkpoint.optimizer_state import OPTIMIZER_PREFIX, numbered_optimizer_state
from lightning_dist.checkpoint.read import read_manifest, read_tensors, read_trainer_state
from lightning_dist.checkpoint.storage import PathLike


def full_checkpoint(directory: PathLike) -> dict[str, Any]:
    """What Lightning would have saved on one device: trainer state, full `state_dict`, full `optimizer_states`.

    Needs no process group and no GPU; holds one full copy of everything in memory.
    """
    manifest = read_manifest(directory)
    tensors = read_tensors(directory)
    checkpoint = dict(read_trainer_state(directory))
    order = {name: position for position, name in enumerate(manifest.parameter_order)}
    state_dict = tensors.pop("state_dict", {})
    checkpoint["state_dict"] = dict(
        sorted(state_dict.items(), key=lambda item: order.get(f"state_dict.{item[0]}", len(order)))
    )
    optimizers = sorted(
        (key for key in tensors if key.startswith(OPTIMIZER_PREFIX)), key=lambda key: int(key[len(OPTIMIZER_PREFIX) :])
    )
    if optimizers:
        names = list(checkpoint["state_dict"])
        checkpoint["optimizer_states"] = [numbered_optimizer_state(tensors.pop(key), names) for key in optimizers]
    return checkpoint | tensors


def consolidate(directory: PathLike, file: PathLike) -> None:
    """Writes one single `.ckpt` that `torch.load`, `Trainer` on one device and `load_from_checkpoint` read.

    Args:
        directory: A checkpoint directory.
        file: The file to write; it appears as a whole or not at all, and replaces what is there.

    Raises:
        CheckpointError: No complete checkpoint there, or damage.
    """
    target = os.fspath(file)
    if os.path.isdir(target):
        raise CheckpointError(f"file: {target} is a directory; give the name of the file to write")
    checkpoint = full_checkpoint(directory)
    partial = f"{target}.partial-{os.getpid()}"
    try:
        with open(partial, "wb") as stream:
            torch.save(checkpoint, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, target)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
