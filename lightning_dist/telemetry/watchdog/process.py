"""The side process: watches its rank's page, tells the hub (rank 0's watchdog), and does what the hub decides.

Started by ``start.py`` with its settings as JSON on stdin; says ``{"port": …}`` on stdout where it is the hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lightning_dist.telemetry.watchdog.heartbeat import (
    ABORT,
    CLOSED,
    CRASHED,
    ENABLED,
    EXITING,
    Beat,
    HeartbeatPage,
)
from lightning_dist.telemetry.watchdog.limits import limit_of, limits_from
from lightning_dist.telemetry.watchdog.report import Finding, RankState, find_culprits, write_report

POLL = 0.25
"""Seconds between two looks at the page."""
AWAY = 2.0
"""A watchdog that did not run itself for so long (a laptop asleep, a container paused) blames nobody for that time."""
SILENCE = 30.0
"""Seconds without word from a watchdog after which its machine is taken as lost."""
STACKS = 6.0
"""Seconds that ranks have to send their stacks."""
GRACE = 3.0
"""Seconds that a rank has to end by itself after another has crashed."""
LOST = "its watchdog has gone, and with it its machine or its whole job step"
MOST_TRACEBACKS = 8
"""Up to this many ranks each shows a crashed rank's whole traceback; beyond, only the first of each node does."""


class Line:
    """A connection that carries one JSON object a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.rank = connection, -1
        self._buffer = b""
        connection.setblocking(True)
        connection.settimeout(5.0)

    def send(self, message: dict[str, Any]) -> bool:
        """Whether it could be sent."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come; None if the other end has gone."""
        try:
            data = self.socket.recv(1 << 20)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]


class Hub:
    """What rank 0's watchdog does for all: takes in states, decides, and sends word. Never touches a rank."""

    def __init__(self, settings: dict[str, Any], selector: selectors.BaseSelector) -> None:
        self.world, self.token = settings["world_size"], settings["token"]
        self.folder = Path(settings["folder"])
        self.selector = selector
        self.server = socket.create_server((settings["listen"], 0), backlog=4096)
        self.port = self.server.getsockname()[1]
        self.lines: dict[int, Line] = {}
        self.states: dict[int, RankState] = {}
        self.heard: dict[int, float] = {}
        self.abort: dict[int, bool] = {}
        self.crash: str | None = None
        self.finding: Finding | None = None
        self.asked = 0.0
        self.stalled: dict[int, int] = {}
        self.stalled_since = 0.0
        self.reports = 0
        self.stalled_seconds = 0.0
        self.settings_file = self.folder / "stall_settings.json"
        self.settings_seen, self.settings_due = 0, 0.0
        selector.register(self.server, selectors.EVENT_READ, self.accept)

    def accept(self) -> None:
        """A watchdog comes."""
        connection, _ = self.server.accept()
        line = Line(connection)
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.read(line))

    def read(self, line: Line) -> None:
        """A watchdog has said something, or has gone."""
        messages = line.receive()
        if messages is None:
            self.selector.unregister(line.socket)
            line.socket.close()
            self.lose(line.rank)
            return
        for message in messages:
            self.take(line, message)

    def lose(self, rank: int) -> None:
        """Nothing is to be heard of a rank any more."""
        state = self.states.get(rank)
        if state is not None and state.alive and not state.finished:
            state.alive = False
            self.tell_crash(rank, LOST, "")

    def take(self, line: Line, message: dict[str, Any]) -> None:
        """One message."""
        if message["type"] == "hello":
            if message["token"] != self.token:
                return
            line.rank = message["rank"]
            self.lines[line.rank] = line
        elif line.rank < 0:
            return
        elif message["type"] == "state":
            state = RankState.from_message(message)
            stack = self.states[line.rank].stack if line.rank in self.states else ""
            state.stack = stack
            self.states[line.rank] = state
            self.heard[line.rank] = time.monotonic()
            self.abort[line.rank] = message["abort"]
        elif message["type"] == "stack":
            self.states[line.rank].stack = message["text"]
        elif message["type"] == "crash":
            self.tell_crash(line.rank, message["what"], message["text"])

    def tell_crash(self, rank: int, what: str, text: str) -> None:
        """The first crash is told to all; those that follow are its consequence."""
        if self.crash is not None:
            return
        self.crash = f"rank {rank} stopped the run: {what}"
        (self.folder / f"crash_rank{rank}.txt").write_text(f"{self.crash}\n\n{text}\n")
        for line in self.lines.values():
            line.send({"type": "crash", "rank": rank, "what": what, "text": text})

    def decide(self) -> None:
        """Looks whether the run stands still; a few times a second."""
        if self.crash is not None or len(self.states) < self.world:
            return
        self.read_settings()
        now = time.monotonic()
        for rank in [rank for rank, heard in self.heard.items() if now - heard > SILENCE]:
            self.lose(rank)
        states = [self.states[rank] for rank in sorted(self.states)]
        if self.stalled:
            moved = any(state.beat != self.stalled[state.rank] for state in states if state.rank in self.stalled)
            if moved:
                self.stalled_seconds += time.monotonic() - self.stalled_since
                print(
                    f"lightning_dist: the stall is over after {time.monotonic() - self.stalled_since:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
                self.stalled = {}
                self.send_all({"type": "reports", "number": self.reports, "seconds": self.stalled_seconds})
            return
        if self.finding is None:
            finding = find_culprits(states)
            if finding.overdue:
                self.finding, self.asked = finding, time.monotonic()
                for state in self.states.values():
                    state.stack = ""
                self.send_all({"type": "dump"})
            return
        if all(state.stack for state in states) or time.monotonic() - self.asked > STACKS:
            self.report(states, self.finding)
            self.finding = None

    def read_settings(self) -> None:
        """A person may have written new limits into the log folder."""
        if time.monotonic() < self.settings_due:
            return
        self.settings_due = time.monotonic() + 2.0
        try:
            changed = self.settings_file.stat().st_mtime_ns
            if changed == self.settings_seen:
                return
            self.settings_seen = changed
            wanted = json.loads(self.settings_file.read_text())
            message: dict[str, Any] = {"type": "settings", "enabled": bool(wanted.get("enabled", True))}
            if "hang_timeout" in wanted:
                message["limits"] = limits_from(wanted["hang_timeout"])
            if "on_hang" in wanted:
                message["abort"] = wanted["on_hang"] == "abort"
        except FileNotFoundError:
            return
        except (OSError, ValueError, AttributeError) as error:
            print(f"lightning_dist: {self.settings_file} is left aside: {error}", file=sys.stderr, flush=True)
            return
        print(f"lightning_dist: new settings from {self.settings_file}: {wanted}", file=sys.stderr, flush=True)
        self.send_all(message)

    def report(self, states: list[RankState], finding: Finding) -> None:
        """Writes the report, and has it acted on."""
        now = find_culprits(states)
        if not now.overdue:
            return  # it went on while stacks were asked for
        abort = any(self.abort.values())
        action = (
            "all ranks are ended, so that the launcher restarts the job"
            if abort
            else "a warning; the run is left alone"
        )
        text = write_report(states, finding, action)
        self.reports += 1
        step = max(state.step for state in states)
        name = f"stall_{step:08d}_{self.reports}.txt"
        (self.folder / name).write_text(text)
        print(f"{text}\nlightning_dist: this report is in {self.folder / name}", file=sys.stderr, flush=True)
        self.stalled = {state.rank: state.beat for state in states}
        self.stalled_since = time.monotonic() - max(state.inside for state in states)
        self.send_all({"type": "reports", "number": self.reports, "seconds": self.stalled_seconds})
        if abort:
            self.send_all({"type": "abort"})

    def send_all(self, message: dict[str, Any]) -> None:
        """To every watchdog."""
        for line in self.lines.values():
            line.send(message)

    @property
    def over(self) -> bool:
        """Whether nobody needs it any more."""
        return all(state.finished or not state.alive for state in self.states.values())


class Watchdog:
    """One rank's."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.rank, self.pid = settings["rank"], settings["pid"]
        self.page = HeartbeatPage(settings["page"])
        self.selector = selectors.DefaultSelector()
        self.hub: Hub | None = None
        self.line: Line | None = None
        self.connected = self.hub_over = self.crashed = False
        self.end_at: float | None = None
        self.away_until = 0.0
        self.kills = _kills_for_memory()
        self.sent = 0.0
        self.interval = 0.5 + settings["world_size"] / 1000

    def run(self) -> None:
        """Until the rank has ended, or said that its run has."""
        if self.rank == 0:
            self.hub = Hub(self.settings, self.selector)
            print(json.dumps({"port": self.hub.port}), flush=True)
        address = json.loads(sys.stdin.readline())
        self.connect(address["host"], address["port"])
        quiet_since: float | None = None
        last = time.monotonic()
        while True:
            for key, _ in self.selector.select(POLL):
                key.data()
            now = time.monotonic()
            if now - last > AWAY:
                self.away_until = now
            last = now
            done = self.look(now)
            if self.hub is not None:
                self.hub.decide()
            if done:
                quiet_since = quiet_since or now
                # The hub stays for the others, but not for ever.
                if self.hub is None or self.hub.over or now - quiet_since > 60.0:
                    break
        if self.hub is not None:
            self.hub.send_all({"type": "bye"})
        self.page.remove()

    def connect(self, host: str, port: int) -> None:
        """To the hub; it may be a moment late."""
        deadline = time.monotonic() + 30.0
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=5.0)
                break
            except OSError:
                if time.monotonic() > deadline:
                    print(f"lightning_dist: rank {self.rank}'s watchdog can't reach {host}:{port}", file=sys.stderr)
                    return
                time.sleep(0.2)
        self.line = Line(connection)
        self.line.send({"type": "hello", "rank": self.rank, "token": self.settings["token"]})
        self.connected = True
        self.selector.register(connection, selectors.EVENT_READ, self.read)

    def read(self) -> None:
        """What the hub says."""
        assert self.line is not None
        messages = self.line.receive()
        if messages is None:
            self.selector.unregister(self.line.socket)
            self.connected = False
            if not self.hub_over:
                self.show_crash({"rank": 0, "what": LOST, "text": ""})
            return
        for message in messages:
            kind = message["type"]
            if kind == "dump":
                self.line.send({"type": "stack", "text": self.stack()})
            elif kind == "reports":
                self.page.note_reports(message["number"], message["seconds"])
            elif kind == "abort":
                self.end_rank()
            elif kind == "settings":
                self.page.set_limits(message.get("limits", {}))
                self.page.set_flags(ENABLED, message["enabled"])
                if "abort" in message:
                    self.page.set_flags(ABORT, message["abort"])
            elif kind == "bye":
                self.hub_over = True
            elif kind == "crash":
                self.show_crash(message)

    def look(self, now: float) -> bool:
        """Looks at the rank; returns whether there is nothing left to watch."""
        beat = self.page.read()
        gone = os.getppid() != self.pid
        finished = bool(beat.flags & CLOSED)
        if not self.crashed and beat.flags & CRASHED:
            self.crashed = True
            what, _, text = Path(self.settings["crash_file"]).read_text().partition("\n")
            self.send({"type": "crash", "what": what, "text": text})
        if gone and not finished and not self.crashed:
            self.crashed = True
            self.send({"type": "crash", "what": self.how_it_ended(beat), "text": ""})
        if now - self.sent > self.interval or gone or finished:
            self.send({"type": "state", **self.state(beat, now, gone, finished or self.crashed)})
            self.sent = now
        if self.end_at is not None and now > self.end_at and not (finished or gone or self.crashed):
            self.end_rank()
        return gone or finished

    def state(self, beat: Beat, now: float, gone: bool, finished: bool) -> dict[str, Any]:
        """What the hub is told."""
        watched = beat.flags & ENABLED
        waiting = now - max(beat.waiting_since, self.away_until) if beat.waiting_since else 0.0
        return {
            "rank": self.rank,
            "place": f"{self.settings['place']}, pid {self.pid}",
            "phase": beat.phase,
            "kind": beat.kind,
            "step": beat.step,
            "inside": now - max(beat.since, self.away_until),
            "limit": limit_of(beat) if watched else 1e12,
            "waiting": waiting,
            "operation": beat.operation,
            "group": beat.group,
            "counts": beat.counts,
            "process": _process_state(self.pid),
            "thread_age": now - max(beat.thread, self.away_until),
            "alive": not gone,
            "finished": finished,
            "beat": beat.count + beat.collectives,
            "abort": bool(beat.flags & ABORT),
        }

    def send(self, message: dict[str, Any]) -> None:
        """To the hub."""
        if self.line is not None and self.connected:
            self.line.send(message)

    def stack(self) -> str:
        """The Python stacks of the rank's threads: its own fault handler's, or from outside where it is stopped."""
        if _process_state(self.pid) in ("T", "t"):
            return _stack_from_outside(self.pid) or "(the process is stopped and can't answer; py-spy is not here)"
        file = Path(self.settings["stack_file"])
        before = file.stat().st_size
        try:
            os.kill(self.pid, self.settings["stack_signal"])
        except OSError:
            return "(the process has gone)"
        deadline, size = time.monotonic() + 2.0, before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = file.stat().st_size
            if now == size > before:
                break
            size = now
        return _main_thread_first(file.read_text(errors="replace")[before:]) or "(no answer within 2 s)"

    def show_crash(self, message: dict[str, Any]) -> None:
        """Another rank has crashed: says so, and gives the own rank a moment to end by itself."""
        if self.end_at is not None or self.crashed:
            return
        if self.page.read().flags & CLOSED:
            return
        first = self.settings["local_rank"] == 0 or self.settings["world_size"] <= MOST_TRACEBACKS
        text = f"\n{message['text']}" if first and message["text"] else ""
        print(
            f"lightning_dist: rank {self.rank}: rank {message['rank']} stopped the run: {message['what']}{text}",
            file=sys.stderr,
            flush=True,
        )
        self.end_at = time.monotonic() + GRACE

    def end_rank(self) -> None:
        """Ends the rank's process, a stopped one too; that it ends is then no news."""
        self.crashed = True
        if os.getppid() == self.pid:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        self.end_at = None

    def how_it_ended(self, beat: Beat) -> str:
        """A process that ended without having said that it would."""
        where = f"in phase {beat.phase} of step {beat.step}"
        if beat.flags & EXITING:
            return f"exited: its process ended {where}, in the middle of the run"
        if _kills_for_memory() > self.kills:
            return f"out of memory: its process was killed {where} by the kernel's out-of-memory killer"
        return f"ended without a word: its process was killed from outside, or called os._exit, {where}"


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def _kills_for_memory() -> int:
    """How many processes of this control group the kernel has killed for want of memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/sys/fs/cgroup/memory.events").read_text().splitlines():
            name, number = line.split()
            if name == "oom_kill":
                return int(number)
    return 0


def _main_thread_first(stacks: str) -> str:
    """The thread that runs the loop is the one that the fault handler calls current; it writes it last."""
    threads = stacks.strip().split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda text: not text.startswith("Current thread")))


def _stack_from_outside(pid: int) -> str:
    tool = shutil.which("py-spy")
    if tool is None:
        return ""
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=4.0).stdout
    return ""


def main() -> None:
    """Runs a watchdog with the settings on stdin."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank; the watchdog ends when the rank has
    Watchdog(json.loads(sys.stdin.readline())).run()
