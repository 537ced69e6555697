"""One single file out of a checkpoint, for everything that does not know the directory format."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from lightning_dist.checkpoint.format import CheckpointError
from lightning_dist.checkpoint.optimizer_state import OPTIMIZER_PREFIX, numbered_optimizer_state
from lightning_dist.checkpoint.read import read_manifest, read_tensors, read_trainer_state
from lightning_dist.checkpoint.storage import PathLike


def full_checkpoint(directory: PathLike) -> dict[str, Any]:
    """What Lightning would have saved on one device: trainer state, full `state_dict`, full `optimizer_states`.

    Needs no process group and no GPU; holds one full copy of everything in memory.
    """
    tensors = read_tensors(directory)
    checkpoint = dict(read_trainer_state(directory))
    checkpoint["state_dict"] = _in_model_order(directory, tensors.pop("state_dict", {}))
    optimizers = sorted(
        (key for key in tensors if key.startswith(OPTIMIZER_PREFIX)), key=lambda key: int(key[len(OPTIMIZER_PREFIX) :])
    )
    if optimizers:
        names = list(checkpoint["state_dict"])
        checkpoint["optimizer_states"] = [numbered_optimizer_state(tensors.pop(key), names) for key in optimizers]
    return checkpoint | tensors


def weights_and_trainer_state(directory: PathLike) -> dict[str, Any]:
    """As `full_checkpoint`, without optimizers: what a module is made from again."""
    weights = read_tensors(directory, ["state_dict"])["state_dict"]
    return {**read_trainer_state(directory), "state_dict": _in_model_order(directory, weights)}


def consolidate(directory: PathLike, file: PathLike) -> None:
    """Writes one single `.ckpt` that `torch.load`, `Trainer` on one device and `load_from_checkpoint` read.

    Needs no process group and no GPU; holds one full copy of everything in memory.

    Args:
        directory: A checkpoint directory, local or any fsspec path.
        file: The local file to write; it appears as a whole or not at all, and replaces what is there.

    Raises:
        CheckpointError: No complete checkpoint there, or damage; nothing was written.
    """
    _check_file(file)
    checkpoint = full_checkpoint(directory)
    _write_whole(file, lambda stream: torch.save(checkpoint, stream))


def export_safetensors(directory: PathLike, file: PathLike) -> None:
    """Writes the model's weights, and nothing else, as one safetensors file; arguments and errors as `consolidate`.

    Raises:
        CheckpointError: Also if the package safetensors is not installed.
    """
    _check_file(file)
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise CheckpointError("exporting to safetensors needs the package: pip install safetensors") from error
    found = read_tensors(directory, ["state_dict"])["state_dict"]
    weights = {
        name: value for name, value in _in_model_order(directory, found).items() if isinstance(value, torch.Tensor)
    }
    _write_whole(file, lambda stream: stream.write(save(weights, metadata={"format": "pt"})))


def _in_model_order(directory: PathLike, state_dict: dict[str, Any]) -> dict[str, Any]:
    order = {name: position for position, name in enumerate(read_manifest(directory).parameter_order)}
    return dict(sorted(state_dict.items(), key=lambda item: order.get(f"state_dict.{item[0]}", len(order))))


def _check_file(file: PathLike) -> None:
    if os.path.isdir(file):
        raise CheckpointError(f"file: {os.fspath(file)} is a directory; give the name of the file to write")
    if not os.path.isdir(os.path.dirname(os.path.abspath(file))):
        raise CheckpointError(f"file: there is no directory {os.path.dirname(os.path.abspath(file))}")


def _write_whole(file: PathLike, write: Callable[[BinaryIO], Any]) -> None:
    partial = f"{os.fspath(file)}.partial-{os.getpid()}"
    try:
        with open(partial, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, file)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
