"""Makes rounds durable, payloads before facts, and recovers them when the broker starts again.

    run.db       facts, in SQLite: the run, its lives, rounds, contributions, snapshots
    packs/       payload bytes of contributions, as they travelled
    fragments/   whole states of fragments, FRAGMENT-VERSION.safetensors, two kept of each
    newer-*/     packs and states that an older copy of run.db does not know
    lock         held by the broker that runs

A publication is not stored: it follows from the state before and the row of its round.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock
from typing import Final

import msgspec

from narrows.broker.records import FragmentState, Policy, Recovered, Round, Version
from narrows.broker.store import files
from narrows.broker.store.history import (
    CONTRIBUTION_FACTS,
    DATABASE,
    INSERT_SNAPSHOT,
    LOSS,
    PUSH_COLUMNS,
    ROUND_FACTS,
    History,
    database_errors,
    row_digest,
)
from narrows.proto.errors import ErrorCode, StateError
from narrows.proto.layout import fingerprint
from narrows.proto.messages import TOKENS_MAX, DiskStatus, Layout, Phase
from narrows.proto.units import counted
from narrows.proto.wire import name_of

LOCK: Final = "lock"
LIFE_AT: Final = 21
"""Place in that file of the newest life's number; before it stands the process that has it."""
"""The file that the broker of a state directory holds."""

SQLITE_MAGIC: Final = b"SQLite format 3\0"
"""The beginning of every database that has content."""

SCHEMA_VERSION: Final = 2
SCHEMA_1_TO_2: Final = "ALTER TABLE contributions ADD COLUMN loss REAL; PRAGMA user_version = 2;"

# Digests are 16 hex digits, because SQLite's integers are signed. Rows are the history of the run
# and stay when their packs go; pack is NULL then.
SCHEMA: Final = f"""
CREATE TABLE run (one INTEGER PRIMARY KEY CHECK (one = 1), run_id TEXT NOT NULL,
  phase TEXT NOT NULL, clock INTEGER NOT NULL, fragments INTEGER NOT NULL, layout TEXT,
  fingerprint TEXT);
CREATE TABLE lives (life INTEGER PRIMARY KEY, at REAL NOT NULL);
CREATE TABLE rounds (seq INTEGER PRIMARY KEY, fragment INTEGER NOT NULL,
  version INTEGER NOT NULL, at REAL NOT NULL, clock INTEGER NOT NULL, policy TEXT NOT NULL,
  period_s REAL NOT NULL, reason TEXT NOT NULL, global TEXT NOT NULL, momentum TEXT NOT NULL,
  published TEXT NOT NULL, digest TEXT NOT NULL, UNIQUE (fragment, version));
CREATE TABLE contributions (seq INTEGER NOT NULL REFERENCES rounds ON DELETE CASCADE,
  fragment INTEGER NOT NULL, learner TEXT NOT NULL, incarnation TEXT NOT NULL,
  push_id INTEGER NOT NULL, base INTEGER NOT NULL, tokens INTEGER NOT NULL,
  steps INTEGER NOT NULL, codec TEXT NOT NULL, chunk_elements INTEGER NOT NULL,
  weight REAL NOT NULL, norm REAL NOT NULL, digest TEXT NOT NULL, loss REAL,
  pack INTEGER, offset INTEGER, sizes TEXT,
  PRIMARY KEY (seq, learner, incarnation), UNIQUE (learner, incarnation, fragment, push_id))
  WITHOUT ROWID;
CREATE INDEX payloads ON contributions (pack) WHERE pack IS NOT NULL;
CREATE TABLE merged (incarnation TEXT, fragment INTEGER, push_id INTEGER NOT NULL,
  seq INTEGER NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (incarnation, fragment))
  WITHOUT ROWID;
CREATE TABLE snapshots (fragment INTEGER, version INTEGER, PRIMARY KEY (fragment, version),
  FOREIGN KEY (fragment, version) REFERENCES rounds (fragment, version) ON DELETE CASCADE)
  WITHOUT ROWID;
INSERT INTO run VALUES (1, lower(hex(randomblob(8))), '{Phase.SEEDING}', 0, 0, NULL, NULL);
PRAGMA user_version = {SCHEMA_VERSION};
"""

SNAPSHOTS_KEPT: Final = 2
"""Per fragment: a start takes the older one if the newest is damaged."""

COMMITS_MAX: Final = 256
"""Commits of which a Status tells the times."""

INCARNATIONS_KEPT: Final = 1024
"""A start knows the newest merged push of so many incarnations, the newest ones."""


class Store(History):
    """A history that goes on. One process at a time has a state directory open; any thread may
    call it. Reads have a connection of their own: the loop must not wait for a commit.

    An error of the database other than a full disk is a StateError, after which the process must
    end: what a commit did is known only after the next start, which makes durable what it finds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durable: bool = True,
        keep_history: bool = False,
        reach: Callable[[str], None] = lambda place: None,
    ) -> None:
        """`durable=False` leaves fsync out, for simulations. `keep_history` never removes a
        payload nor the snapshot of version 0. `reach` is called at places where a crash is worth a
        test. Raises StateError or DiskFull."""
        self._keep_history = keep_history
        self._reach = reach
        self._lock = Lock()
        """A thread that writes holds it."""
        self._snapshot_lock = Lock()
        """A snapshot holds it: the sweep of one must not meet the file of another before its
        row."""
        self._commits_s = deque[float](maxlen=COMMITS_MAX)
        """Seconds that the newest commits took."""
        self._journal_bytes = 0
        with ExitStack() as undo:
            self._lock_fd = _take_folder(folder, undo)
            self._free_bytes = _free_bytes(folder)
            with database_errors(folder / DATABASE):
                self._db = _open(folder, durable)
            undo.callback(self._db.close)
            super().__init__(folder, durable=durable)
            undo.callback(super().close)
            undo.callback(self._packs.close)
            self._undo = undo.pop_all()

    def recover(self, now_unix: float) -> Recovered:
        """Begins a life of the broker, which is durable when this returns.

        Damaged snapshots are forgotten where an older one is whole, and files that no row knows are
        removed; beside an older copy of the database they are set aside. Raises StateError for
        damage that cannot be got over, and DiskFull.
        """
        notes: list[str] = []
        rows = self.query(
            "SELECT fragment, max(version) AS head FROM rounds GROUP BY fragment ORDER BY fragment"
        )
        heads = {row["fragment"]: row["head"] for row in rows}
        with self._lock:
            with database_errors(self.file), self._db as db:
                (begun,) = db.execute(
                    "INSERT INTO lives (at) VALUES (:at) RETURNING life", {"at": now_unix}
                ).fetchall()
            is_older = self._begin_life(begun["life"]) or self._has_newer_state(heads)
            run = self.run
            states = tuple(self._begin_at(fragment, notes) for fragment in range(run.fragments))
            aside = Path(mkdtemp(prefix="newer-", dir=self.folder)) if is_older else None
            self._sweep(aside)
        if aside is not None:
            notes.append(
                f"{self.file} is older than {len(os.listdir(aside))} of its files, now in {aside}."
                " Was an older copy of it put back? Then stop the broker, and put the newer one"
                " back, and these files into packs/ and fragments/. Is this a backup that was taken"
                " while the broker ran? Then remove them"
            )
        newest = self.query("SELECT period_s FROM rounds ORDER BY seq DESC LIMIT 1")
        merged = self.query("SELECT incarnation, fragment, push_id FROM merged ORDER BY seq")
        tokens = self.query(
            "SELECT incarnation, sum(tokens) AS tokens FROM merged GROUP BY incarnation"
        )
        return Recovered(
            **vars(run),
            life=begun["life"],
            heads=tuple(heads.values()),
            period_s=newest[0]["period_s"] if newest else 0.0,
            merged={(row["incarnation"], row["fragment"]): row["push_id"] for row in merged},
            merged_tokens={row["incarnation"]: row["tokens"] for row in tokens},
            states=states,
            notes=tuple(notes),
        )

    def seed(self, layout: Layout, states: Sequence[FragmentState]) -> None:
        """Makes version 0 of every fragment durable: all or nothing. Raises DiskFull."""
        snapshots = files.write_states(self.folder, states, durable=self._packs.durable)
        assert snapshots == [(fragment, 0) for fragment in range(len(states))], snapshots
        with self._lock, database_errors(self.file), self._db as db:
            db.execute(
                "UPDATE run SET phase = :phase, fragments = :fragments, layout = :layout,"
                " fingerprint = :fingerprint",
                {
                    "phase": Phase.RUNNING,
                    "fragments": len(states),
                    "layout": msgspec.json.encode(layout).decode(),
                    "fingerprint": fingerprint(layout),
                },
            )
            for state in states:
                round_ = Round(state.fragment, 0, (), Policy(), reason="seed")
                self._insert(Version(round_, state, ()), [])
            db.executemany(INSERT_SNAPSHOT, snapshots)

    def commit(self, version: Version) -> None:
        """Makes a round durable: payloads first, then its row, in one transaction.

        Raises NotWritten: the round does not exist, and the same call may be made again later.
        Raises StateError if the directory is gone.
        """
        with self._lock:
            began_at = time.perf_counter()
            self.check_folder()
            pushes = [push.chunks for push in version.round_.contributions]
            places = self._packs.append(pushes)
            self._reach("appended")
            try:
                with database_errors(self.file), self._db:
                    self._insert(version, places)
            except OSError:
                self._packs.take_back()
                raise
            self._commits_s.append(time.perf_counter() - began_at)
            self._journal_bytes += sum(len(chunk) for chunks in pushes for chunk in chunks)
            self._free_bytes = _free_bytes(self.folder)
        self._reach("durable")

    def snapshot(self, state: FragmentState) -> None:
        """Keeps the whole state of a durable version, so that a start replays less; then removes
        what no start needs any more. Raises NotWritten, and StateError if the directory is
        gone."""
        self.check_folder()
        with self._snapshot_lock:
            snapshots = files.write_states(self.folder, [state], durable=self._packs.durable)
            with self._lock:
                with database_errors(self.file), self._db as db:
                    db.executemany(INSERT_SNAPSHOT, snapshots)
                    self._forget(state.fragment)
                self._sweep()

    def end(self) -> None:
        """Makes durable that the run has ended. Raises DiskFull."""
        with self._lock, database_errors(self.file), self._db as db:
            db.execute("UPDATE run SET phase = :phase", {"phase": Phase.ENDED})

    def figures(self) -> DiskStatus:
        """The disk as the last write has found it; never waits for one."""
        commits_ms = sorted(1000 * seconds for seconds in list(self._commits_s)) or [0.0]
        return DiskStatus(
            free_bytes=self._free_bytes,
            journal_bytes=self._journal_bytes,
            commit_p50_ms=commits_ms[len(commits_ms) // 2],
            commit_p99_ms=commits_ms[len(commits_ms) * 99 // 100],
        )

    def published_digest(self, fragment: int, version: int) -> int | None:
        """Digest of the published copy at a durable version; None: this history has no such
        version. Never waits for a commit; call it on one thread."""
        rows = self.query(
            "SELECT published FROM rounds WHERE fragment = :fragment AND version = :version",
            fragment=fragment,
            version=version,
        )
        return int(rows[0]["published"], 16) if rows else None

    def newest_push(self, incarnation: str, fragment: int) -> int:
        """Newest id of an incarnation's pushes in the rows; 0: there is none. Never waits for a
        commit; call it on one thread."""
        (row,) = self.query(
            "SELECT coalesce(max(push_id), 0) AS newest FROM contributions"
            " WHERE learner = :learner AND incarnation = :incarnation AND fragment = :fragment",
            learner=name_of(incarnation),
            incarnation=incarnation,
            fragment=fragment,
        )
        return int(row["newest"])

    def check_folder(self) -> None:
        """Raises StateError if the state directory was removed or replaced while it is in use: the
        open files take every write, and are gone with the process."""
        try:
            found = (self.folder / LOCK).stat()
            if os.path.samestat(found, os.fstat(self._lock_fd)):
                return
            got = "the lock of another directory"
        except (FileNotFoundError, NotADirectoryError) as error:
            got = str(error)
        raise StateError(
            ErrorCode.STATE_DAMAGED,
            f"{self.folder} was removed or replaced while the broker runs",
            expected=f"the {LOCK} file that this broker holds",
            got=got,
            remedy="Put the directory or a backup back, then start the broker again",
        )

    def close(self) -> None:
        """Gives the directory back; nothing is lost without it."""
        with self._lock:
            self._undo.close()

    def _begin_at(self, fragment: int, notes: list[str]) -> FragmentState:
        """The state that a start goes on from; forgets damaged snapshots, and notes them.

        Raises StateError if no snapshot is whole.
        """
        state, errors = self.newest_whole(fragment)
        notes += [f"{error}. Now the older snapshot is used" for error in errors]
        with database_errors(self.file), self._db as db:
            # A damaged one must not count as one of the two that are kept.
            db.execute(
                "DELETE FROM snapshots WHERE fragment = :fragment AND version > :version",
                {"fragment": fragment, "version": state.version},
            )
        return state

    def _insert(self, version: Version, places: Sequence[files.Place]) -> None:
        """Writes the rows of a round, its merged push ids and the clock."""
        round_ = version.round_
        digests = version.state.digests
        counters = "SELECT clock, (SELECT coalesce(max(seq), 0) FROM rounds) AS newest FROM run"
        (before,) = self._db.execute(counters).fetchall()
        seq = before["newest"] + 1
        clock = before["clock"] + sum(push.tokens for push in round_.contributions)
        clock = min(clock, TOKENS_MAX)
        row = {
            "seq": seq,
            "fragment": round_.fragment,
            "version": round_.version,
            "at": time.time(),
            "clock": clock,
            "policy": msgspec.json.encode(round_.policy).decode(),
            "period_s": float(round_.period_s),
            "reason": round_.reason,
            "global": f"{digests.global_:016x}",
            "momentum": f"{digests.momentum:016x}",
            "published": f"{digests.published:016x}",
        }
        parts = [
            {
                "seq": seq,
                "fragment": round_.fragment,
                **{name: getattr(push, name) for name in PUSH_COLUMNS},
                "weight": weight,
                "norm": norm,
                LOSS: push.loss,
                **place._asdict(),
            }
            for push, weight, norm, place in zip(
                round_.contributions, version.weights, version.norms, places, strict=True
            )
        ]
        row["digest"] = row_digest(row, parts)
        self._db.execute(_insert_into("rounds", (*ROUND_FACTS, "digest")), row)
        columns = (*CONTRIBUTION_FACTS, LOSS, "pack", "offset", "sizes")
        self._db.executemany(_insert_into("contributions", columns), parts)
        self._db.execute(
            "INSERT INTO merged SELECT incarnation, fragment, push_id, seq, tokens"
            " FROM contributions WHERE seq = :seq ON CONFLICT DO UPDATE SET"
            " push_id = excluded.push_id, seq = excluded.seq, tokens = tokens + excluded.tokens",
            {"seq": seq},
        )
        self._db.execute("UPDATE run SET clock = :clock", {"clock": clock})

    def _forget(self, fragment: int) -> None:
        """Drops from the rows what no start needs: older snapshots of a fragment, places in packs
        before the oldest one that is needed, incarnations that nobody remembers."""
        self._db.execute(
            "DELETE FROM snapshots WHERE fragment = :fragment"
            " AND NOT (version = 0 AND :keep_history)"
            " AND version NOT IN (SELECT version FROM snapshots WHERE fragment = :fragment"
            " ORDER BY version DESC LIMIT :kept)",
            {
                "fragment": fragment,
                "keep_history": self._keep_history,
                "kept": SNAPSHOTS_KEPT,
            },
        )
        if not self._keep_history:
            self._db.execute(
                "UPDATE contributions SET pack = NULL, offset = NULL, sizes = NULL WHERE pack <"
                " (SELECT coalesce(min(pack), 1 << 62) FROM contributions"
                " JOIN rounds USING (seq) WHERE pack IS NOT NULL AND version >"
                " (SELECT min(version) FROM snapshots WHERE fragment = rounds.fragment))"
            )
        self._db.execute(
            "DELETE FROM merged WHERE incarnation NOT IN (SELECT incarnation FROM merged"
            " GROUP BY incarnation ORDER BY max(seq) DESC LIMIT :kept)",
            {"kept": INCARNATIONS_KEPT},
        )

    def _begin_life(self, life: int) -> bool:
        """Writes the life's number beside the database, durable. True: a life with this number or a
        later one has begun before, so an older `run.db` was put back."""
        before = os.pread(self._lock_fd, 20, LIFE_AT).strip()
        os.pwrite(self._lock_fd, f"{life:<20}".encode(), LIFE_AT)
        if self._packs.durable:
            os.fsync(self._lock_fd)
        return before.isdigit() and int(before) >= life

    def _has_newer_state(self, heads: Mapping[int, int]) -> bool:
        """Whether a whole state is here of a version without a row. No crash leaves one: the row is
        durable before the state is written. But an older `run.db` may have been put back."""
        for path in self.folder.glob("fragments/*.safetensors"):
            place = re.fullmatch(r"(\d+)-(\d+)", path.stem)
            if place and int(place[2]) > heads.get(int(place[1]), math.inf):
                return True
        return False

    def _sweep(self, aside: Path | None = None) -> None:
        """Removes the files that no row knows: what a crash left, and what `_forget` dropped.
        Given a folder, it moves them there.

        Raises StateError where that would be every file of a run.
        """
        with database_errors(self.file):
            states = self._db.execute("SELECT fragment, version FROM snapshots").fetchall()
            packs = self._db.execute(
                "SELECT DISTINCT pack FROM contributions WHERE pack IS NOT NULL"
            ).fetchall()
        known = {self._packs.path(self._packs.number)}
        known.update(self._packs.path(row["pack"]) for row in packs)
        known.update(
            files.state_path(self.folder, row["fragment"], row["version"]) for row in states
        )
        # A file of another name belongs to somebody else: a folder of a file system, a copy, a
        # note.
        ours = ("packs/*.pack", "fragments/*.safetensors*")
        found = [path for pattern in ours for path in self.folder.glob(pattern)]
        if not states:
            # Version 0 is not durable. A seeding that was cut off leaves states of version 0, which
            # the next one overwrites. Anything else belongs to a run whose database is lost.
            strange = [path.name for path in found if "-0.safetensors" not in path.name]
            if strange:
                raise files.damaged(
                    self.file,
                    expected="rows for the files beside it",
                    got=f"a run without version 0 beside {counted(len(strange), 'file')},"
                    f" such as {strange[0]}",
                )
            return
        kept_bytes = self.file.stat().st_size
        for path in found:
            if path in known:
                kept_bytes += path.stat().st_size
            elif aside is not None:
                shutil.move(path, aside)  # From another file system, where packs/ may lie on one.
            else:
                path.unlink(missing_ok=True)
        self._journal_bytes = kept_bytes


def _free_bytes(folder: Path) -> int | None:
    """Bytes that this user may still write there. None: not known, and no reason to take a commit
    for one that was not written."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _insert_into(table: str, columns: Sequence[str]) -> str:
    """The SQL that writes a row, whose values are given by the names of its columns."""
    values = ", ".join(f":{column}" for column in columns)
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({values})"


def _take_folder(folder: Path, undo: ExitStack) -> int:
    """Makes the missing folders of a state directory, and locks it until `undo` is closed; returns
    the lock's descriptor. Raises StateError if the directory cannot be used, or another process
    has it open."""
    try:
        for each in (folder, folder / "packs", folder / "fragments"):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        undo.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, f"{os.getpid():<{LIFE_AT - 1}}\n".encode(), 0)
        return fd
    except BlockingIOError as error:
        raise StateError(
            ErrorCode.STATE_LOCKED,
            f"{folder} is in use",
            expected="one broker per state directory",
            got=f"process {os.read(fd, 20).decode(errors='replace').strip() or 'unknown'}",
            remedy="Stop that broker, or choose another --state-dir",
        ) from error
    except OSError as error:
        raise StateError(
            ErrorCode.STATE_DAMAGED,
            f"{folder} cannot be used",
            expected="a directory that this user can write, on a disk with room",
            got=str(error),
            remedy="Make room, correct its owner or mode, or choose another --state-dir",
        ) from error


def _open(folder: Path, durable: bool) -> sqlite3.Connection:
    """The database, made if the directory is empty. Raises StateError if it is not one of ours."""
    file = folder / DATABASE
    _check_file(file)
    # The folder may be one that others can read. SQLite gives its log the mode of the database.
    os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    for each in (file, folder / f"{DATABASE}-wal", folder / f"{DATABASE}-shm"):
        if each.exists():
            each.chmod(0o600)
    # In `with db`, the first change begins a transaction: all or nothing.
    db = sqlite3.connect(file, isolation_level="IMMEDIATE", check_same_thread=False)
    db.row_factory = sqlite3.Row
    version = db.execute("PRAGMA user_version").fetchone()["user_version"]
    tables = {row["name"] for row in db.execute("SELECT name FROM sqlite_master").fetchall()}
    is_ours = version in (1, SCHEMA_VERSION) and "run" in tables
    if not is_ours and (version or tables):
        raise StateError(
            ErrorCode.STATE_DAMAGED,
            f"{file} is not a state of this release",
            expected=f"user_version {SCHEMA_VERSION}",
            got=str(version),
            remedy="Start the release that wrote it, or choose another --state-dir",
        )
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
    db.execute("PRAGMA foreign_keys = ON")
    if not is_ours:
        db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
    elif version == 1:
        db.executescript(f"BEGIN IMMEDIATE; {SCHEMA_1_TO_2} COMMIT;")
    if durable:  # At each start: the one that made the directory may have been killed.
        files.sync_folder(folder)
        files.sync_folder(folder.parent)
    # After a failed fsync of the log, a commit may be in the page cache only: this copies what
    # the log shows into the database and syncs that.
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return db


def _check_file(file: Path) -> None:
    """Raises StateError if the database of a run that has files is missing, or is none.

    It looks before SQLite does, which would begin an empty one in its place, and would remove the
    log beside a database without content.
    """
    if not any(any((file.parent / name).iterdir()) for name in ("packs", "fragments")):
        return
    if not file.exists():
        raise files.damaged(file, expected="run.db beside packs/ and fragments/", got="no file")
    with file.open("rb") as opened:
        beginning = opened.read(len(SQLITE_MAGIC))
    if beginning != SQLITE_MAGIC:
        raise files.damaged(
            file,
            expected="the rows of packs/ and fragments/",
            got=f"not a database, {file.stat().st_size} bytes",
        )
