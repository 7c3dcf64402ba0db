"""The process: a poll loop and two workers around one host, and what it writes for people."""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import zmq
from msgspec import structs

from narrows.broker.config import BrokerConfig
from narrows.broker.merging import warm_up
from narrows.broker.process.host import Host
from narrows.broker.process.manager import ServiceManager
from narrows.broker.process.pipeline import CRASH_PLACES, result_of
from narrows.broker.process.sockets import BrokerSockets
from narrows.broker.store import DiskFull, Store
from narrows.broker.syncer.events import Finish, Note
from narrows.proto.errors import ErrorCode, StateError, printable
from narrows.proto.events import EventFile, write_inputs
from narrows.proto.messages import RefusalStatus, Status
from narrows.proto.units import counted
from narrows.proto.wire import plain
from narrows.proto.workers import Workers

WORKERS: Final = 2
"""Threads for decoding, merging and the disk. They release the interpreter's lock, so two of them
use two cores."""

WAIT_S_MAX: Final = 1.0
"""Longest wait for the sockets: the allow list is looked at each second."""

REPEATS_MAX: Final = 10
"""Lines of one kind in REPEATS_S that reach the log; what peers cause must not fill the disk."""
REPEATS_S: Final = 60.0
KINDS_MAX: Final = 1000
"""Kinds of lines that are told apart, so that texts of peers cannot fill the memory."""

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, a quota or a limit that has no room left."""

LOOK_S: Final = 10.0
"""Seconds between two looks at the open files, which may be thousands."""

UNKNOWN_KEY: Final = "this key is not on the allow list: `narrows keys allow` admits it"

log: Final = logging.getLogger("narrows.broker")


class Service:
    """One life of the broker as a process."""

    def __init__(self, config: BrokerConfig, *, events: Path | None) -> None:
        """Binds, opens the state directory, replays. Raises NarrowsError, each with its remedy."""
        self._stop_reason = ""
        self._looked_at = -math.inf
        self._open_files = self._rss_bytes = 0
        self._state_dir = Path(config.broker.state_dir)
        self._manager = ServiceManager()
        self.is_saved = False
        """`run` has written everything that a start reads, and a start replays nothing."""
        with ExitStack() as undo:
            # Whoever writes an event need not ask whether somebody wants it.
            self._events = EventFile(events or Path(os.devnull))
            undo.callback(self._events.close)
            self.sockets = BrokerSockets(config)
            undo.callback(self.sockets.close)
            process = config.broker
            reach = crash_places()
            try:
                store = Store(
                    self._state_dir,
                    keep_history=process.keep_history,
                    reach=reach,
                )
                undo.callback(store.close)
                self._workers = Workers(WORKERS, "narrows-broker")
                undo.callback(self._workers.close)
                self.host = Host(
                    config,
                    self.sockets,
                    self._workers,
                    store,
                    time.monotonic,
                    nonce=secrets.token_hex(4),
                    now_unix=time.time,
                    reach=reach,
                    on_note=self._note,
                    on_fault=self.sockets.fault,
                    measure=self._measure,
                )
            except OSError as error:
                if not isinstance(error, DiskFull) and error.errno not in FULL:
                    raise
                raise StateError(
                    ErrorCode.DISK_FULL,
                    f"the disk of {process.state_dir} is full",
                    expected="room for the run's states and payloads: `narrows plan` says how much",
                    got=str(error),
                    remedy="Make room or choose another --state-dir, then start the broker again",
                ) from error
            _, uplink_port, downlink_port = self.sockets.ports
            self.host.syncer.listens_on(uplink_port, downlink_port)
            self._workers.run(warm_up, lambda result, now: result_of(result))
            self._undo = undo.pop_all()

    def run(self) -> Finish:
        """Serves until the run has ended or `stop` was called. Raises StateError if the state
        directory fails."""
        with self._undo:
            self._manager.tell(f"READY=1\nSTATUS=serves on {self.sockets.listens_on}")
            try:
                while self.host.finished is None:
                    self._turn()
            except Exception:
                self.write_inputs()
                raise
            # Snapshots may take minutes. From here on the manager expects no sign of life.
            self._manager.tell("STOPPING=1\nSTATUS=writes what the next start reads")
            # A commit that was under way is durable after this, and learners hear of it.
            self._workers.drain()
            self._workers.finish(time.monotonic())
            status = self.host.status(time.monotonic())
            self.is_saved = self.host.pipeline.close()
            self._events.write({"event": "final", "status": plain(status)})
            return self.host.finished

    def stop(self, reason: str) -> None:
        """Ends the loop in order; safe from signal handlers."""
        self._stop_reason = reason
        self._workers.wake()

    def write_inputs(self) -> None:
        """Writes the syncer's last inputs; safe from signal handlers."""
        write_inputs(self.host.syncer.recorder, self._state_dir, "inputs-syncer.jsonl")

    def _measure(self, status: Status, now: float) -> Status:
        """Adds to a Status what the process knows of itself, and the keys that were refused."""
        with suppress(OSError):  # No more files can be opened: the run goes on all the same.
            if now >= self._looked_at + LOOK_S:
                self._looked_at = now
                self._open_files = len(os.listdir("/proc/self/fd"))
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self._rss_bytes = pages * os.sysconf("SC_PAGE_SIZE")
        process = structs.replace(
            status.process,
            rss_bytes=self._rss_bytes,
            cpu_s=time.process_time(),
            open_files=self._open_files,
            workers=WORKERS,
        )
        door = self.sockets.door
        strangers = door.unknown(now) if door is not None else {}
        keys = [
            RefusalStatus(key, ErrorCode.KEY_REFUSED, UNKNOWN_KEY, now - at, 1)
            for key, at in strangers.items()
        ]
        refused = sorted((*status.refused, *keys), key=lambda each: -each.ago_s)
        return structs.replace(status, process=process, refused=tuple(refused))

    def _turn(self) -> None:
        now = time.monotonic()
        self._manager.alive(now)
        due_at = min(self.host.deadline(now), now + WAIT_S_MAX, self._manager.due_at)
        poller = zmq.Poller()  # Made anew each time: a revocation replaces the sockets.
        for source in (*self.sockets.pollable, self._workers.wake_fd):
            poller.register(source, zmq.POLLIN)
        poller.poll(math.ceil(1000 * max(0.0, due_at - now)))
        now = time.monotonic()
        self._workers.finish(now)
        self.sockets.receive(self.host, now)
        if self._stop_reason and self.host.finished is None:
            self.host.stop(self._stop_reason, now)
        now = time.monotonic()
        if now >= due_at:
            self.host.turn(now)

    def _note(self, note: Note) -> None:
        """Writes a line to the log and to the events file; a merge to the events file only."""
        if note.event == "merged":
            self._events.write({"event": "merged", **note.fields})
            return
        text = printable(note.text)
        level = logging.WARNING if note.warning else logging.INFO
        # By site: the holder of a key can make up as many names as he likes.
        site = str(note.fields.get("learner", "")).partition("/")[0]
        log.log(level, "%s", text, extra={"kind": f"{note.event} {site}"})
        name = logging.getLevelName(level).lower()
        record = {"event": "note", "kind": note.event, "level": name, "text": text}
        self._events.write(record, kind=note.event)


class LimitRepeats(logging.Filter):
    """Lets a few lines of each kind pass in a minute; then the next one tells how many it hid.

    A kind is the message before its arguments, or the record's `kind` where it has one. Beyond
    KINDS_MAX kinds its first word alone tells them apart.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        # Not the record's time: the clock on the wall may be set back.
        self._clock = clock
        self._since_s = clock()
        self._seen: Counter[str] = Counter()
        self._hidden = 0

    def filter(self, record: logging.LogRecord) -> bool:
        kind = str(getattr(record, "kind", record.msg))
        now = self._clock()
        if now >= self._since_s + REPEATS_S:
            if self._hidden:
                hidden = counted(self._hidden, "line")
                record.msg = f"{record.getMessage()} (left out: {hidden})"
                record.args = ()
            self._since_s = now
            self._hidden = 0
            self._seen.clear()
        if kind not in self._seen and len(self._seen) >= KINDS_MAX:
            # One kind for all peers: a thousand names must not hide that the disk is full.
            kind = kind.partition(" ")[0]
        self._seen[kind] += 1
        passes = record.levelno >= logging.ERROR or self._seen[kind] <= REPEATS_MAX
        self._hidden += not passes
        return passes


def crash_places() -> Callable[[str], None]:
    """The function that the broker calls at each of CRASH_PLACES.

    NARROWS_CRASH_AT=PLACE:VISIT ends the process there as a power cut would. A signal from outside
    would come at another moment each time, and a failure could not be repeated.
    """
    place, _, visit = os.environ.get("NARROWS_CRASH_AT", "").partition(":")
    visits: Counter[str] = Counter()

    def reach(name: str) -> None:
        assert name in CRASH_PLACES, name
        visits[name] += 1
        if name == place and visits[name] == int(visit or 1):
            os.kill(os.getpid(), signal.SIGKILL)

    return reach
