"""Reads a state directory: rounds, and each fragment's state by replay; audits and rolls back.

A fragment's state is its newest whole snapshot and the rounds after it, merged again as they were
merged first. Three digests of each version must agree with its row, so a start cannot go on from
anything but the bits that learners have seen.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import xxhash

from narrows.broker.merging import merge
from narrows.broker.records import (
    Contribution,
    Digests,
    FragmentState,
    Policy,
    Round,
    RunRow,
    Version,
)
from narrows.broker.store import files
from narrows.broker.store.files import damaged
from narrows.proto.errors import ConfigError, NarrowsError, StateError
from narrows.proto.layout import Fragment, build_table, fingerprint
from narrows.proto.messages import Layout, Phase

DATABASE: Final = "run.db"

PRIMARY_CODE: Final = 0xFF
"""Bits of an error code of SQLite that name its kind; the others say more."""

Seen = TypeVar("Seen")


class RoundRow(NamedTuple):
    """A durable round. Version 0 is a round without contributions, whose reason is "seed"."""

    seq: int
    """Counts the rounds of all fragments, in the order in which they became durable."""
    at_unix: float
    round_: Round
    """Its contributions have no chunks: `History.load` reads them."""
    digests: Digests
    places: tuple[files.Place | None, ...]
    """Where the chunks lie. None: they were not kept, or are not needed any more."""


class Audit(NamedTuple):
    """The findings of an audit."""

    rounds: int
    """Rows with the facts that were written."""
    replayed: int
    """Versions merged again to the same three digests."""
    problems: tuple[str, ...]


class History:
    """The facts of a state directory, over a connection that cannot write; its broker may run.

    Raises StateError where something is not as it was written.
    """

    def __init__(self, folder: Path, file: Path | None = None, *, durable: bool = True) -> None:
        """`file` is another database than the directory's own, with some of its rows."""
        self.folder, self.file = folder, file or folder / DATABASE
        if not self.file.exists():
            raise ConfigError(
                f"{folder} holds no run",
                expected=f"the state directory of a broker, with its {DATABASE}",
                got=f"a folder without {DATABASE}" if folder.is_dir() else "no such folder",
            )
        self._packs = files.Packs(folder / "packs", durable=durable)
        uri = f"{self.file.absolute().as_uri()}?mode=ro"
        with database_errors(self.file):
            self._reader = sqlite3.connect(uri, uri=True, check_same_thread=False)

    def close(self) -> None:
        self._reader.close()

    def query(self, sql: str, *arguments: object) -> list[Any]:
        """All rows of an answer, so that no cursor stays open between two of them."""
        with database_errors(self.file):
            return self._reader.execute(sql, arguments).fetchall()

    @property
    def run(self) -> RunRow:
        """The row of the run."""
        try:
            ((_, run_id, phase, clock, fragments, text, known),) = self.query("SELECT * FROM run")
            layout = None if text is None else msgspec.json.decode(text, type=Layout)
            if layout is not None and fingerprint(layout) != known:
                raise ValueError(f"a layout that is not {known}")
            return RunRow(run_id, Phase(phase), clock, fragments, layout)
        except (ValueError, msgspec.MsgspecError) as error:
            raise damaged(self.file, expected="the row of a run", got=str(error)) from error

    @property
    def table(self) -> tuple[Fragment, ...]:
        """The fragments; empty before version 0."""
        run = self.run
        return build_table(run.layout.entries, run.fragments) if run.layout else ()

    def rounds(self, condition: str = "TRUE", *arguments: int) -> Iterator[RoundRow]:
        """The rounds that fulfil a condition in SQL, in the order in which they became durable."""
        for seq in self.query(f"SELECT seq FROM rounds WHERE {condition} ORDER BY seq", *arguments):
            ((*columns, known),) = self.query("SELECT * FROM rounds WHERE seq = ?", *seq)
            of_round = "SELECT * FROM contributions WHERE seq = ? ORDER BY learner, incarnation"
            parts = self.query(of_round, *seq)
            number, fragment, version, at_unix, _, policy, period_s, reason, *digests = columns
            if (got := row_digest(columns, parts)) != known:
                what = f"round {number}, version {version} of fragment {fragment}"
                raise damaged(self.file, expected=f"{what} with digest {known}", got=got)
            pushes = tuple(Contribution(*(*part[2:10], ())) for part in parts)
            rules = msgspec.json.decode(policy, type=Policy)
            yield RoundRow(
                seq=number,
                at_unix=at_unix,
                round_=Round(fragment, version, pushes, rules, period_s, reason),
                digests=Digests(*(int(each, 16) for each in digests)),
                places=tuple(
                    None if part[13] is None else files.Place(*part[12:]) for part in parts
                ),
            )

    def snapshots(self, fragment: int) -> list[RoundRow]:
        """The rounds of a fragment whose states are kept whole, oldest first; at least one."""
        kept = "version IN (SELECT version FROM snapshots WHERE fragment = rounds.fragment)"
        if rows := list(self.rounds(f"fragment = ? AND {kept}", fragment)):
            return rows
        raise damaged(self.file, expected=f"a snapshot of fragment {fragment}", got="none")

    def whole(self, row: RoundRow) -> FragmentState:
        """The state that a snapshot holds."""
        return files.read_state(self.folder, row.round_.fragment, row.round_.version, row.digests)

    def newest_whole(self, fragment: int) -> tuple[FragmentState, list[StateError]]:
        """The newest snapshot that is as it was written, and what is wrong with newer ones."""
        errors: list[StateError] = []
        for row in reversed(self.snapshots(fragment)):
            try:
                return self.whole(row), errors
            except StateError as error:
                errors.append(error)
        raise errors[0]

    def after(self, state: FragmentState) -> Iterator[RoundRow]:
        """The rounds of a fragment after a state, up to the first one whose payloads were not
        kept."""
        rows = self.rounds("fragment = ? AND version > ?", state.fragment, state.version)
        return takewhile(lambda row: None not in row.places, rows)

    def load(self, row: RoundRow) -> Round:
        """A round with its chunks."""
        pushes = list(row.round_.contributions)
        for index, (push, place) in enumerate(zip(pushes, row.places, strict=True)):
            assert place is not None, "a round whose payloads were not kept"
            whose = f"the payload of {push.learner} in round {row.seq}"
            pushes[index] = replace(push, chunks=self._packs.read(place, whose))
        return replace(row.round_, contributions=tuple(pushes))

    def replay(self, fragment: Fragment, state: FragmentState) -> Iterator[Version]:
        """Merges the rounds after a state again, as far as their payloads are kept; every version
        must have the three digests in its row."""
        for row in self.after(state):
            what = f"version {state.version + 1} of fragment {fragment.index}"
            if row.round_.version != state.version + 1:
                raise damaged(self.file, expected=what, got=f"version {row.round_.version}")
            round_, what = self.load(row), f"{what} with digests {row.digests}"
            try:
                version = merge(fragment, state, round_)
            except (FloatingPointError, NarrowsError) as error:
                raise damaged(self.file, expected=what, got=str(error)) from error
            state = version.state
            if state.digests != row.digests:
                raise damaged(self.file, expected=what, got=str(state.digests))
            yield version

    def state(self, fragment: Fragment) -> FragmentState:
        """A fragment at the newest version that a start could go on from."""
        state, _ = self.newest_whole(fragment.index)
        for version in self.replay(fragment, state):
            state = version.state
        return state

    def states(self) -> Iterator[FragmentState]:
        """Each fragment at the newest version that a start could go on from."""
        return (self._steadily(fragment, self.state) for fragment in self.table)

    def audit(self) -> Audit:
        """Looks at every byte that a start, a replay or a rollback would rely on; tells the first
        damage of each round and fragment."""
        counted, replayed = 0, 0
        problems: list[str] = []
        ((verdict,),) = self.query("PRAGMA integrity_check(1)")
        if verdict != "ok":
            problems.append(f"{self.file}: {verdict}")
        total = "SELECT clock, (SELECT coalesce(sum(tokens), 0) FROM contributions) FROM run"
        ((clock, tokens),) = self.query(total)
        if tokens != clock:
            problems.append(f"{self.file}: clock {clock}, but {tokens} tokens merged")
        for seq in self.query("SELECT seq FROM rounds"):
            try:
                counted += len(list(self.rounds("seq = ?", *seq)))
            except StateError as error:
                problems.append(str(error))

        def merged_again(fragment: Fragment) -> int:
            """Versions after the oldest snapshot, once all snapshots are whole."""
            for row in reversed(self.snapshots(fragment.index)):
                state = self.whole(row)
            return sum(1 for _ in self.replay(fragment, state))

        for fragment in self.table:
            try:
                replayed += self._steadily(fragment, merged_again)
            except StateError as error:
                problems.append(str(error))
        return Audit(counted, replayed, tuple(dict.fromkeys(problems)))

    def _steadily(self, fragment: Fragment, look: Callable[[Fragment], Seen]) -> Seen:
        """Looks at a fragment, and again if a broker that runs has removed meanwhile what was
        looked at: old snapshots, and the payloads before them."""
        kept = "SELECT version FROM snapshots WHERE fragment = ?"
        while True:
            before = self.query(kept, fragment.index)
            try:
                return look(fragment)
            except StateError:
                if before == self.query(kept, fragment.index):
                    raise

    def rollback(self, until: int, target: Path) -> None:
        """Makes a new state directory as of round `until` (its seq): a broker goes on from there.

        The rows up to there go with it, the payloads do not. The directory of this history stays
        as it is. Raises ConfigError if `target` exists or the states of that round cannot be made
        any more, OSError if the disk is full.
        """
        if target.exists():
            raise ConfigError(f"{target} exists", expected="a new directory", got="an old one")
        ((newest,),) = self.query("SELECT coalesce(max(seq), 0) FROM rounds")
        if not 0 < until <= newest:
            raise ConfigError(
                f"there is no round {until}",
                expected=f"1 to {newest}",
                got=str(until),
                remedy="`narrows journal show` lists the rounds",
            )
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            folder = Path(scratch) / target.name
            file = folder / DATABASE
            for each in (folder, folder / "packs", folder / "fragments"):
                each.mkdir(mode=0o700)
            with database_errors(file), closing(sqlite3.connect(file, isolation_level=None)) as db:
                self._reader.backup(db)
                db.execute("PRAGMA foreign_keys = ON")
                db.execute("DELETE FROM rounds WHERE seq > ?", (until,))
                with closing(History(self.folder, file)) as cut:
                    heads = files.write_states(folder, cut._heads(until))
                db.execute("DELETE FROM snapshots")
                db.executemany("INSERT INTO snapshots VALUES (?, ?)", heads)
                db.execute("UPDATE contributions SET pack = NULL, offset = NULL, sizes = NULL")
                db.execute("UPDATE run SET phase = ?", (Phase.RUNNING,))
                count_again(db)
            files.sync_folder(folder)
            folder.rename(target)
        files.sync_folder(target.absolute().parent)

    def _heads(self, until: int) -> Iterator[FragmentState]:
        """Each fragment at its newest version, which round `until` left."""
        for fragment in self.table:
            snapshots = "SELECT count(*) FROM snapshots WHERE fragment = ?1"
            known = f"SELECT coalesce(max(version), 0), ({snapshots}) FROM rounds"
            ((newest, kept),) = self.query(f"{known} WHERE fragment = ?1", fragment.index)
            state = self.state(fragment) if kept else None
            if state is None or state.version < newest:
                raise ConfigError(
                    f"fragment {fragment.index} cannot go back to round {until}",
                    expected=f"a snapshot, and the payloads up to version {newest}",
                    got=f"payloads up to version {state.version}" if state else "no snapshot",
                    remedy="Choose a later round. With broker.keep_history all of them are kept",
                )
            yield state


def row_digest(columns: Sequence[Any], parts: Iterable[Sequence[Any]]) -> str:
    """xxh3_64 over the facts of a round and its contributions, as they stand in the columns; not
    over the places of payloads, which change when packs are removed."""
    facts = (columns, [part[:13] for part in parts])
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(facts))


@contextmanager
def database_errors(file: Path) -> Iterator[None]:
    """Errors of SQLite as DiskFull, DatabaseBusy or StateError."""
    try:
        yield
    except sqlite3.Error as error:
        # A write that failed (a quota, a limit on files) leaves the log as it was, like a full
        # disk. A failed fsync is another matter: nobody knows what is durable then.
        refused = (
            sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE
        )  # fmt: skip
        code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
        if code in refused:
            raise files.DiskFull(file, error) from error
        if code & PRIMARY_CODE == sqlite3.SQLITE_BUSY:
            raise files.DatabaseBusy(file, error) from error
        raise damaged(file, expected="a database that works", got=str(error)) from error


def count_again(db: sqlite3.Connection) -> None:
    """Takes the clock and the merged push ids from the rounds that are left."""
    db.execute("UPDATE run SET clock = (SELECT coalesce(sum(tokens), 0) FROM contributions)")
    db.execute("DELETE FROM merged")
    db.execute(
        "INSERT INTO merged (incarnation, fragment, push_id, seq, tokens)"
        " SELECT incarnation, fragment, max(push_id), max(seq), sum(tokens)"
        " FROM contributions GROUP BY incarnation, fragment"
    )
