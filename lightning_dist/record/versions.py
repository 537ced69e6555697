"""Versions and hashes of everything that goes into a run: code, packages, files, weights, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.record.redaction import ENVIRONMENT, redact

PACKAGES = ("lightning-dist", "torch", "lightning", "torchmetrics", "transformers", "fairscale", "numpy", "tokenizers")
_BLOCK = 1 << 22


def code_version(folder: str | os.PathLike[str] = ".") -> dict[str, Any]:
    """Commit of the git checkout around a folder, and a hash of what differs from it."""

    def git(*arguments: str) -> bytes | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "why": "the working folder is no git checkout, or it has no commit"}
    difference, listed = git("diff", "HEAD"), git("status", "--porcelain")
    changed = difference is None or bool(difference)
    return {
        "commit": commit.decode().strip(),
        "changed": changed,
        "difference": xxhash.xxh3_128_hexdigest(difference) if difference else None,
        "untracked_files": sum(line.startswith(b"??") for line in (listed or b"").splitlines()),
    }


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Installed versions; None where a package is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def file_versions(paths: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """Size and xxh3-128 of each file; of folders, of all files below them together, by relative name.

    A path that can't be read is listed with the reason: the record says so instead of the run failing.
    """
    found: list[dict[str, Any]] = []
    for given in paths:
        path = Path(given)
        digest, size, count = xxhash.xxh3_128(), 0, 0
        try:
            files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
            for file in files:
                if path.is_dir():
                    digest.update(file.relative_to(path).as_posix().encode() + b"\0")
                with file.open("rb") as stream:
                    while block := stream.read(_BLOCK):
                        digest.update(block)
                        size += len(block)
                count += 1
        except OSError as error:
            found.append({"path": str(redact(str(given))), "problem": f"{type(error).__name__}: {error.strerror}"})
            continue
        found.append({"path": str(path), "bytes": size, "files": count, "xxh3_128": digest.hexdigest()})
    return found


def weights_hash(module: nn.Module) -> str:
    """xxh3-128 of this rank's part of all parameters and buffers, by name. Reads them from the device: once a run."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted([*module.named_parameters(), *module.named_buffers()]):
        part: Tensor = tensor.detach()
        if isinstance(part, DTensor):
            part = part.to_local()
        digest.update(f"{name} {part.dtype} {tuple(part.shape)}\0".encode())
        if part.numel() and part.device.type != "meta":
            digest.update(part.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hardware() -> dict[str, Any]:
    """Processor, memory and devices of this machine."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "devices": devices,
        "cuda": torch.version.cuda,
    }


def environment() -> dict[str, str]:
    """The variables of :data:`~lightning_dist.record.redaction.ENVIRONMENT` that are set; no other is ever read."""
    return {name: str(redact(os.environ[name])) for name in ENVIRONMENT if name in os.environ}
