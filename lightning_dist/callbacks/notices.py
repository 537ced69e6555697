"""Tells a person that a rule has fired, by a web hook or a command, without holding up training."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from lightning_dist.record.redaction import redact

log = logging.getLogger("lightning_dist.rules")
TRIES, PAUSE, PATIENCE = 3, 1.0, 10.0
"""How often a notice is tried, seconds before the second try (doubled for each further one), seconds for one try."""


class Notifier:
    """Sends notices from threads of its own.

    Args:
        target: An address that takes a JSON document by POST, or a command, which gets ``LIGHTNING_DIST_NOTICE`` (the
            same JSON) and ``LIGHTNING_DIST_RULE``, ``_STEP``, ``_ACTION``, ``_OWNER`` in its environment. The target
            itself never appears in a log. None sends nothing.
    """

    def __init__(self, target: str | None) -> None:
        self._target = target
        self._threads: list[threading.Thread] = []

    def send(self, notice: Mapping[str, Any]) -> None:
        """Returns at once."""
        if self._target is not None:
            thread = threading.Thread(target=self._deliver, args=(redact(dict(notice)),), daemon=True)
            self._threads = [*(thread for thread in self._threads if thread.is_alive()), thread]
            thread.start()

    def close(self, patience: float = PATIENCE) -> None:
        """Gives notices that are under way a last chance."""
        end = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _deliver(self, notice: dict[str, Any]) -> None:
        for attempt in range(TRIES):
            try:
                self._post(notice) if str(self._target).startswith(("http://", "https://")) else self._run(notice)
                return
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                reason = type(error).__name__
            if attempt < TRIES - 1:
                time.sleep(PAUSE * 2**attempt)
        log.warning(
            "nobody could be told that rule %r fired: %d tries, the last one a %s", notice["rule"], TRIES, reason
        )

    def _post(self, notice: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(str(self._target), json.dumps(notice).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE):
            pass

    def _run(self, notice: dict[str, Any]) -> None:
        told = {f"LIGHTNING_DIST_{name.upper()}": str(notice[name]) for name in ("rule", "step", "action", "owner")}
        environment = {**os.environ, **told, "LIGHTNING_DIST_NOTICE": json.dumps(notice)}
        subprocess.run(
            str(self._target), shell=True, env=environment, capture_output=True, timeout=PATIENCE, check=True
        )
