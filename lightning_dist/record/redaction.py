"""Nothing that looks like a secret enters a record, a notice or a log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

WITHHELD = "(withheld)"
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_WORLD_SIZE",
    "NCCL_ALGO",
    "NCCL_IB_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "WORLD_SIZE",
)
"""The only environment variables whose values are recorded."""
_SECRET_NAME = re.compile(
    r"(?i)(^|[_\-.])(api[_-]?key|access[_-]?key|auth(orization)?|bearer|credentials?|pass(word|wd|phrase)?|"
    r"private[_-]?key|secrets?|(?:hf|api|access|auth|wandb|bot)[_-]?tokens?|token|webhook|cookie)($|[_\-.])"
)
_SECRET_VALUE = re.compile(
    r"\b(?:gh[pousr]_\w{16,}|hf_\w{16,}|sk-[\w-]{16,}|xox[abp]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
_URL = re.compile(r"\b\w+://[^\s\"'<>]+")
_ASSIGNMENT = re.compile(r"(?i)\b([\w-]*(?:password|passwd|secret|token|api[_-]?key))(\s*[=:]\s*)(?!\()\S+")


def redact(value: Any, name: str = "") -> Any:
    """A copy of a value that JSON can hold, without what looks like a secret by its name or its form.

    Args:
        value: Numbers, texts, mappings and sequences; anything else becomes its text.
        name: The name it goes by.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if _SECRET_NAME.search(name) and not isinstance(value, float):
        return WITHHELD
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(item) for item in value]
    text = _URL.sub(lambda found: _without_secrets(found[0]), str(value))
    return _ASSIGNMENT.sub(rf"\1\2{WITHHELD}", _SECRET_VALUE.sub(WITHHELD, text))


def _without_secrets(url: str) -> str:
    """Scheme, host and path; of web addresses only the host, since the path of a webhook is its secret."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    if parts.scheme in ("http", "https"):
        return f"{parts.scheme}://{host}" + ("/…" if len(parts.path) > 1 or parts.query else "")
    return f"{parts.scheme}://{host}{parts.path}"
