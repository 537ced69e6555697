"""What ``lightning-dist doctor`` has measured, as the judge of links wants it."""

from __future__ import annotations

import json
import os
from pathlib import Path


def read_bandwidths(path: str | os.PathLike[str]) -> dict[str, float]:
    """Bytes per second of each mesh axis.

    Args:
        path: ``links.json``, from a job of the same layout.

    Raises:
        ValueError: If the file is not there, or holds no links.
    """
    try:
        measured = json.loads(Path(path).read_text())
        return {axis["axis"]: float(axis["bandwidth"]) for axis in measured["axes"]}
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"links={os.fspath(path)!r} does not fit: give the links.json that `lightning-dist doctor --layout …` wrote"
            f" ({type(error).__name__}: {error})."
        ) from error
