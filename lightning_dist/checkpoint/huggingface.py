"""Hugging Face folders: safetensors read straight into each rank's shards, and written back from them.

No rank reads or holds more than its part when loading, nor more than one file's worth when exporting.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_AWAITED = "_lightning_dist_weights"
"""The attribute of a network on the meta device that names the folder it is to be filled from."""
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MERGED = ("MergeModulelist", "Concatenate")
"""What of the library's conversions is done piece by piece here: lists of experts stacked, then joined."""


@dataclass(frozen=True)
class LoadedWeights:
    """What one rank has read.

    Args:
        bytes_read: Of tensors, by this rank; 0 where they are read once the network has memory.
        bytes_in_files: Of all tensors in the folder.
        unexpected: Names in the folder that the network has no use for.
    """

    bytes_read: int
    bytes_in_files: int
    unexpected: tuple[str, ...]


def load_huggingface(network: nn.Module, folder: str | Path) -> LoadedWeights:
    """Fills the network's parameters and buffers with the weights of a Hugging Face folder, each rank its own parts.

    Works on plain tensors and on DTensors of any layout (tensor parallel, FSDP2, both), and on a pipeline's stage. A
    network on the meta device is checked at once, and filled when ``HybridParallelStrategy`` has given each rank its
    part of it, so that no rank ever reads or holds the whole::

        def configure_model(self):
            if self.model is None:
                with torch.device("meta"):
                    self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
                load_huggingface(self.model, folder)

    Names are mapped as ``from_pretrained`` maps them: with or without the base model's prefix, older names, experts
    stored one by one. Only the pages of a file that hold a rank's parts are touched. No collectives.

    Args:
        network: A model of transformers (a module of any other kind needs the folder's own names).
        folder: A local folder with ``model.safetensors``, or its index and files.

    Raises:
        FileNotFoundError: If there is no such folder or no safetensors in it.
        ValueError: Before anything is changed, on every rank alike: names or shapes that do not fit, listing them, or
            a conversion that cannot be done on parts.
    """
    folder = Path(folder)
    tensors = _with_ties(network)
    with ExitStack() as stack:
        stored = _open(folder, stack)
        sources, unexpected = _map_names(network, tensors, stored)
        _check(network, tensors, sources, folder)
        total = sum(piece.bytes for piece in stored.values())
        read = 0
        if any(tensor.is_meta for tensor in tensors.values()):
            vars(network)[_AWAITED] = str(folder.absolute())
            return LoadedWeights(0, total, tuple(unexpected))
        done: set[int] = set()
        for name, tensor in tensors.items():
            if name in sources and id(tensor) not in done:
                done.add(id(tensor))
                with torch.no_grad():
                    read += _fill(tensor, sources[name], name)
    return LoadedWeights(read, total, tuple(unexpected))


def awaits_weights(module: nn.Module) -> bool:
    """Whether a network in ``module`` is to be filled from a folder once it has memory."""
    return any(_AWAITED in vars(network) for network in module.modules())


def load_awaited_weights(module: nn.Module) -> None:
    """Fills the networks in ``module`` for which :func:`load_huggingface` was called on the meta device.

    No collectives; every rank reads its own parts.
    """
    for network in module.modules():
        folder = vars(network).pop(_AWAITED, None)
        if folder is not None:
            load_huggingface(network, folder)


def export_huggingface(network: nn.Module, folder: str | Path, *, max_file_size: int = 2 * 2**30) -> None:
    """Writes a folder that ``from_pretrained`` opens, with the names and the form in which the library stores them.

    Every rank must call it. Rank 0 writes, and holds at most one file's worth of whole tensors beside its own parts;
    the index, or the only file, appears last. Weights keep their dtype.

    Collectives: an all-gather of each parameter that is cut, over its own mesh; a barrier at the end.

    Args:
        network: A model of transformers of which every rank holds a part of every parameter.
        folder: A local folder, made if missing; files of these names in it are replaced.
        max_file_size: Bytes of tensors in one file.
    """
    folder = Path(folder)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    writer = _Writer(folder, max_file_size) if writes else None
    seen: set[int] = set()
    tied = set(getattr(network, "all_tied_weights_keys", None) or {})
    tensors: dict[str, Tensor] = network.state_dict(keep_vars=True)
    # The names under which the library looks for tied weights come first, so that the others are passed over.
    for name in sorted(tensors, key=lambda name: name in tied):
        tensor = tensors[name]
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        whole = tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
        if writer is not None:
            for stored_name, stored in _as_stored(network, name, whole).items():
                writer.add(stored_name, stored)
    if writer is not None:
        writer.finish()
        _write_config(network, folder)
    if dist.is_initialized():
        dist.barrier()


# Reading


@dataclass(frozen=True)
class _Piece:
    """A tensor in a file, of which any box can be read."""

    handle: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(self.name).get_shape())

    @property
    def bytes(self) -> int:
        kind = self.handle.get_slice(self.name).get_dtype()
        bits = int(re.findall(r"\d+", kind)[0]) if re.search(r"\d", kind) else 8
        size = max(bits // 8, 1)
        for length in self.shape:
            size *= length
        return size

    def read(self, box: tuple[slice, ...], target: Tensor) -> int:
        """Copies a box of the tensor; returns its bytes."""
        part = self.handle.get_slice(self.name)[box] if box else self.handle.get_tensor(self.name)
        target.copy_(part)
        return part.numel() * part.element_size()


@dataclass(frozen=True)
class _Merged:
    """Experts stored one by one: lists of matrices, each list stacked, the stacks joined along the first matrix dim."""

    lists: tuple[tuple[_Piece, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.lists[0][0].shape
        return (len(self.lists[0]), sum(pieces[0].shape[0] for pieces in self.lists), *first[1:])

    def read(self, box: tuple[slice, ...], target: Tensor) -> int:
        experts, rows, *rest = box
        read = 0
        for place, expert in enumerate(range(experts.start, experts.stop)):
            start = 0
            for pieces in self.lists:
                length = pieces[expert].shape[0]
                low, high = max(rows.start, start), min(rows.stop, start + length)
                if low < high:
                    wanted = (slice(low - start, high - start), *rest)
                    read += pieces[expert].read(wanted, target[place, low - rows.start : high - rows.start])
                start += length
        return read


_Source = _Piece | _Merged


def _with_ties(network: nn.Module) -> dict[str, Tensor]:
    """The network's tensors under all their names: a pipeline's stage may hold a tied one under one of them only."""
    tensors: dict[str, Tensor] = network.state_dict(keep_vars=True)
    tied: dict[str, str] = getattr(network, "all_tied_weights_keys", None) or {}
    for pair in tied.items():
        for name, other in (pair, pair[::-1]):
            if name in tensors:
                tensors.setdefault(other, tensors[name])
    return tensors


def _open(folder: Path, stack: ExitStack) -> dict[str, _Piece]:
    from safetensors import safe_open

    if (folder / _INDEX).is_file():
        files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    elif (folder / _SINGLE).is_file():
        files = [_SINGLE]
    else:
        raise FileNotFoundError(
            f"{folder} holds neither {_SINGLE} nor {_INDEX}: give a local folder as save_pretrained writes it."
        )
    stored = {}
    for file in files:
        handle = stack.enter_context(safe_open(folder / file, framework="pt", device="cpu"))
        stored.update({name: _Piece(handle, name) for name in handle.keys()})  # noqa: SIM118 - not a mapping
    return stored


def _map_names(
    network: Any, tensors: Mapping[str, Tensor], stored: Mapping[str, _Piece]
) -> tuple[dict[str, _Source], list[str]]:
    """For each of the network's names, where its values come from; and the names that nothing asks for."""
    if not hasattr(network, "base_model_prefix"):
        known: dict[str, _Source] = {name: stored[name] for name in tensors if name in stored}
        return known, [name for name in stored if name not in known]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(network)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, _Source] = {}
    lists: dict[str, dict[str, list[_Piece]]] = {}
    unexpected = []
    for stored_name in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(stored_name, renamings, converters, network.base_model_prefix, dict(tensors))
        if stored_name in tensors and name not in tensors:  # already in the network's own form
            name, pattern = stored_name, None
        if name not in tensors:
            unexpected.append(stored_name)
        elif pattern is None:
            sources[name] = stored[stored_name]
        else:
            operations = [type(operation).__name__ for operation in by_pattern[pattern].operations]
            if any(operation not in _MERGED for operation in operations) or operations[0] != _MERGED[0]:
                raise ValueError(
                    f"{stored_name} becomes {name} by {', '.join(operations)}, which cannot be done on parts: load the"
                    " folder once with from_pretrained and write it with export_huggingface."
                )
            lists.setdefault(name, {}).setdefault(pattern, []).append(stored[stored_name])
    for name, found in lists.items():
        patterns = next(iter(by_pattern[pattern].source_patterns for pattern in found))
        sources[name] = _Merged(tuple(tuple(found[pattern]) for pattern in patterns))
    return sources, unexpected


def _check(network: nn.Module, tensors: Mapping[str, Tensor], sources: Mapping[str, _Source], folder: Path) -> None:
    found = {id(tensors[name]) for name in sources}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in found]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of {type(network).__name__}: {_some(missing)}.")
    wrong = [
        f"{name} {source.shape} in the file, {tuple(tensors[name].shape)} in the network"
        for name, source in sources.items()
        if source.shape != tuple(tensors[name].shape)
    ]
    if wrong:
        raise ValueError(f"{folder} does not fit {type(network).__name__}: {_some(wrong)}.")


def _fill(tensor: Tensor, source: _Source, name: str) -> int:
    if not isinstance(tensor, DTensor):
        return source.read(tuple(slice(0, length) for length in tensor.shape), tensor.data)
    local = tensor.to_local()
    (chunk,) = tensor.__create_chunk_list__()
    if tuple(chunk.sizes) != tuple(local.shape):
        raise ValueError(f"{name} is cut in a way that is no box of the whole: {tensor.placements}.")
    if not local.numel():
        return 0
    box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return source.read(box, local)


# Writing


class _Writer:
    """Puts tensors in files of limited size; their number is in their names, so they get these at the end."""

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._limit = folder, limit
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._total = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self._limit:
            self._write()
        self._held[name] = tensor.to("cpu", copy=True).contiguous()
        self._held_bytes += size
        self._total += size

    def finish(self) -> None:
        self._write()
        for stale in self._folder.glob("model*.safetensors"):
            stale.unlink()
        (self._folder / _INDEX).unlink(missing_ok=True)
        if len(self._files) == 1:
            self._unfinished(0).rename(self._folder / _SINGLE)
            return
        names = [f"model-{index + 1:05d}-of-{len(self._files):05d}.safetensors" for index in range(len(self._files))]
        for index, name in enumerate(names):
            self._unfinished(index).rename(self._folder / name)
        places = {key: name for name, keys in zip(names, self._files, strict=True) for key in keys}
        contents = {"metadata": {"total_size": self._total}, "weight_map": places}
        (self._folder / _INDEX).write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self._held, self._unfinished(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def _unfinished(self, index: int) -> Path:
        return self._folder / f".unfinished-{index:05d}"


def _as_stored(network: Any, name: str, whole: Tensor) -> dict[str, Tensor]:
    """The tensor under the name, and in the form, in which the library stores it."""
    if not hasattr(network, "base_model_prefix"):
        return {name: whole}
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(network, {name: whole})


def _write_config(network: nn.Module, folder: Path) -> None:
    config = getattr(network, "config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    # Tensor parallelism and FSDP2 swap classes for subclasses of their own.
    config.architectures = [_published_class(network)]
    config.dtype = next(network.parameters()).dtype
    config.save_pretrained(folder)
    if getattr(network, "generation_config", None) is not None:
        network.generation_config.save_pretrained(folder)  # type: ignore[union-attr, operator]


def _published_class(network: nn.Module) -> str:
    """The name of the network's class, or of the one it was before."""
    for kind in type(network).__mro__:
        module = sys.modules.get(kind.__module__)
        if hasattr(kind, "base_model_prefix") and getattr(module, kind.__name__, None) is kind:
            return kind.__name__
    return type(network).__name__


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
