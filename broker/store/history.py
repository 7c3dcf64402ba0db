"""Reads a state directory: rounds, and each fragment's state by replay; audits and rolls back.

A fragment's state is its newest whole snapshot and the rounds after it, merged again as they were
merged first. Three digests of each version must agree with its row, so a start cannot go on from
anything but the bits that learners have seen.
"""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import xxhash

from narrows.broker.merging import merge
from narrows.broker.records import Contribution, Digests, FragmentState, Policy, Round, Version
from narrows.broker.store.packs import DiskFull, Packs, Place, damaged, sync_folder
from narrows.broker.store.tensors import read_state, write_state
from narrows.proto.errors import ConfigError, NarrowsError, StateError
from narrows.proto.layout import Fragment, build_table, fingerprint
from narrows.proto.messages import Layout, Phase

DATABASE: Final = "run.db"
NEWEST: Final = 2**62
"""As the last round of a query: all of them."""


@dataclass(frozen=True)
class Run:
    """Facts of a whole run."""

    run_id: str
    phase: Phase
    clock: int
    """Tokens of all merged pushes, summed over fragments."""
    fragments: int
    """P; 0 before version 0."""
    layout: Layout | None
    """None before version 0."""


@dataclass(frozen=True)
class RoundRow:
    """A durable round. Version 0 is a round without contributions, whose reason is "seed"."""

    seq: int
    """Counts the rounds of all fragments, in the order in which they became durable."""
    at_unix: float
    clock: int
    """Tokens of all merged pushes after this round."""
    round_: Round
    """Its contributions have no chunks: `History.load` reads them."""
    digests: Digests
    payload_digests: tuple[int, ...]
    places: tuple[Place | None, ...]
    """Where the chunks lie. None: they were not kept, or are not needed any more."""


@dataclass(frozen=True)
class Recovered(Run):
    """All that a life of the broker begins with."""

    life: int
    period_s: float
    """Period of the newest round; 0: none."""
    merged: Mapping[tuple[str, int], int]
    """(incarnation, fragment) -> newest merged push id; what was merged last stands last."""
    merged_tokens: Mapping[str, int]
    """Incarnation -> tokens of its merged pushes, summed over fragments."""
    states: tuple[FragmentState, ...]
    """Newest whole snapshot per fragment, empty before version 0: `Store.replay` goes on."""
    notes: tuple[str, ...]
    """Lines that an operator should read, one line each: damage that was got over, rounds lost."""


@dataclass(frozen=True)
class Audit:
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

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / DATABASE
        if not self.file.exists():
            raise ConfigError(
                f"{folder} holds no run",
                expected=f"the state directory of a broker, with its {DATABASE}",
                got=f"a folder without {DATABASE}" if folder.is_dir() else "no such folder",
            )
        self._packs = Packs(folder / "packs")
        uri = f"{self.file.absolute().as_uri()}?mode=ro"
        with database_errors(self.file):
            self._db = sqlite3.connect(uri, uri=True, check_same_thread=False)

    def close(self) -> None:
        self._db.close()

    def query(self, sql: str, *arguments: object) -> list[Any]:
        """All rows of an answer, so that no cursor stays open between two of them."""
        with database_errors(self.file):
            return self._db.execute(sql, arguments).fetchall()

    @property
    def run(self) -> Run:
        """The row of the run."""
        ((_, run_id, phase, clock, fragments, text, known),) = self.query("SELECT * FROM run")
        layout = None
        if text is not None:
            try:
                layout = msgspec.json.decode(text, type=Layout)
            except msgspec.MsgspecError as error:
                raise damaged(self.file, expected="a layout", got=str(error)) from error
            if (got := fingerprint(layout)) != known:
                raise damaged(self.file, expected=f"layout {known}", got=got)
        return Run(run_id, Phase(phase), clock, fragments, layout)

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
            number, fragment, version, at_unix, clock, policy, period_s, reason, *digests = columns
            if (got := f"{row_digest(columns, parts):016x}") != known:
                what = f"round {number}, version {version} of fragment {fragment}"
                raise damaged(self.file, expected=f"{what} with digest {known}", got=got)
            contributions = tuple(Contribution(*(*part[2:10], ())) for part in parts)
            rules = msgspec.json.decode(policy, type=Policy)
            yield RoundRow(
                seq=number,
                at_unix=at_unix,
                clock=clock,
                round_=Round(fragment, version, contributions, rules, period_s, reason),
                digests=Digests(*(int(each, 16) for each in digests)),
                payload_digests=tuple(int(part[12], 16) for part in parts),
                places=tuple(
                    None if pack is None else Place(pack, offset, tuple(json.loads(sizes)))
                    for *_, pack, offset, sizes in parts
                ),
            )

    def snapshots(self, fragment: int, until: int = NEWEST) -> list[RoundRow]:
        """The rounds up to row `until` whose states are kept whole, oldest first."""
        kept = "version IN (SELECT version FROM snapshots WHERE fragment = rounds.fragment)"
        return list(self.rounds(f"fragment = ? AND seq <= ? AND {kept}", fragment, until))

    def first_whole(
        self, fragment: int, rows: Iterable[RoundRow]
    ) -> tuple[FragmentState, list[StateError]]:
        """The first of these snapshots that is as it was written, and what is wrong with those
        before."""
        errors: list[StateError] = []
        for row in rows:
            try:
                return read_state(self.folder, fragment, row.round_.version, row.digests), errors
            except StateError as error:
                errors.append(error)
        nothing = damaged(self.file, expected=f"a snapshot of fragment {fragment}", got="none")
        raise errors[0] if errors else nothing

    def after(self, state: FragmentState, until: int = NEWEST) -> Iterator[RoundRow]:
        """The rounds of a fragment after a state, up to row `until` or the first one whose payloads
        were not kept."""
        condition = "fragment = ? AND version > ? AND seq <= ?"
        rows = self.rounds(condition, state.fragment, state.version, until)
        return takewhile(lambda row: None not in row.places, rows)

    def load(self, row: RoundRow) -> Round:
        """A round with its chunks."""
        contributions: list[Contribution] = []
        parts = zip(row.round_.contributions, row.payload_digests, row.places, strict=True)
        for each, known, place in parts:
            assert place is not None, "a round whose payloads were not kept"
            chunks = self._packs.read(place)
            if (got := payload_digest(chunks)) != known:
                whose = f"the payload of {each.learner} in round {row.seq}, at {place.offset}"
                expected = f"{whose}, with digest {known:016x}"
                raise damaged(self._packs.path(place.pack), expected=expected, got=f"{got:016x}")
            contributions.append(replace(each, chunks=chunks))
        return replace(row.round_, contributions=tuple(contributions))

    def replay(
        self, fragment: Fragment, state: FragmentState, until: int = NEWEST
    ) -> Iterator[Version]:
        """Merges the rounds after a state again, up to row `until`, as far as their payloads are
        kept; every version must have the three digests in its row."""
        for row in self.after(state, until):
            what = f"version {state.version + 1} of fragment {fragment.index}"
            if row.round_.version != state.version + 1:
                raise damaged(self.file, expected=what, got=f"version {row.round_.version}")
            round_ = self.load(row)
            try:
                version = merge(fragment, state, round_)
            except (FloatingPointError, NarrowsError) as error:
                again = f"{what} to merge again"
                raise damaged(self.file, expected=again, got=str(error)) from error
            state = version.state
            if state.digests != row.digests:
                expected = f"{what} with digests {row.digests}"
                raise damaged(self.file, expected=expected, got=str(state.digests))
            yield version

    def states(self, until: int = NEWEST) -> Iterator[FragmentState]:
        """Each fragment as it was after round `until` (its seq); else at the newest version that a
        start could go on from. Raises ConfigError if that is not kept."""
        for fragment in self.table:
            newest_first = self.snapshots(fragment.index, until)[::-1]
            reached = -1
            if newest_first or until == NEWEST:
                state, _ = self.first_whole(fragment.index, newest_first)
                for version in self.replay(fragment, state, until):
                    state = version.state
                reached = state.version
            newest = "SELECT coalesce(max(version), 0) FROM rounds WHERE fragment = ? AND seq <= ?"
            ((wanted,),) = self.query(newest, fragment.index, until)
            if reached < wanted and until != NEWEST:
                raise ConfigError(
                    f"fragment {fragment.index} cannot go back to round {until}",
                    expected=f"a snapshot before version {wanted} and the payloads up to it",
                    got="none that old" if reached < 0 else f"payloads up to version {reached}",
                    remedy="Choose a later round. With broker.keep_history all of them are kept",
                )
            yield state

    def merged_otherwise(
        self, policy: Policy | None = None, without: Collection[str] = ()
    ) -> Iterator[FragmentState]:
        """Each fragment as it would be, had its rounds been merged by `policy`, or without the
        pushes of some learners, from the oldest snapshot on. A round that has none left changes
        nothing. Learners would have pushed other gradients then; this takes those they pushed."""
        for fragment in self.table:
            state, _ = self.first_whole(fragment.index, self.snapshots(fragment.index))
            for row in self.after(state):
                round_ = self.load(row)
                left = tuple(each for each in round_.contributions if each.learner not in without)
                if left:
                    rules = policy or round_.policy
                    round_ = replace(round_, contributions=left, policy=rules)
                    state = merge(fragment, state, round_).state
                else:
                    state = replace(state, version=round_.version)
            yield state

    def audit(self) -> Audit:
        """Looks at every byte that a start, a replay or a rollback would rely on."""
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
        for fragment in self.table:
            try:
                rows = self.snapshots(fragment.index)
                for row in rows:
                    _, errors = self.first_whole(fragment.index, [row, *rows])
                    problems += map(str, errors)
                state, _ = self.first_whole(fragment.index, rows)
                replayed += sum(1 for _ in self.replay(fragment, state))
            except StateError as error:
                problems.append(str(error))
        return Audit(counted, replayed, tuple(dict.fromkeys(problems)))

    def rollback(self, until: int, target: Path) -> None:
        """Makes a new state directory as of round `until` (its seq): a broker goes on from there.

        The rows up to there go with it, the payloads do not. The directory of this history stays
        as it is. Raises ConfigError if `target` exists, OSError if the disk is full.
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
            for each in (folder / "packs", folder / "fragments"):
                each.mkdir(mode=0o700, parents=True)
            heads: list[tuple[int, int]] = []
            for state in self.states(until):
                write_state(folder, state)
                heads.append((state.fragment, state.version))
            with (
                database_errors(folder / DATABASE),
                closing(sqlite3.connect(folder / DATABASE)) as db,
                db,
            ):
                self._db.backup(db)
                db.execute("DELETE FROM contributions WHERE seq > ?", (until,))
                db.execute("DELETE FROM snapshots")
                db.execute("DELETE FROM rounds WHERE seq > ?", (until,))
                db.execute("UPDATE contributions SET pack = NULL, offset = NULL, sizes = NULL")
                db.executemany("INSERT INTO snapshots VALUES (?, ?)", heads)
                db.execute("UPDATE run SET phase = ?", (Phase.RUNNING,))
                count_again(db)
            for each in (folder / "fragments", folder):
                sync_folder(each)
            folder.rename(target)
        sync_folder(target.absolute().parent)


def payload_digest(chunks: Iterable[bytes]) -> int:
    """xxh3_64 over the size of each chunk, in 8 bytes, and its bytes."""
    hasher = xxhash.xxh3_64()
    for chunk in chunks:
        hasher.update(len(chunk).to_bytes(8, "little"))
        hasher.update(chunk)
    return hasher.intdigest()


def row_digest(columns: Sequence[Any], parts: Iterable[Sequence[Any]]) -> int:
    """xxh3_64 over the facts of a round and its contributions, as they stand in the columns; not
    over the places of payloads, which change when packs are removed."""
    facts = (columns, [part[:13] for part in parts])
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(facts))


@contextmanager
def database_errors(file: Path) -> Iterator[None]:
    """Errors of SQLite as DiskFull or StateError."""
    try:
        yield
    except sqlite3.Error as error:
        # A write that failed (a quota, a limit on files) leaves the log as it was, like a full
        # disk. A failed fsync is another matter: nobody knows what is durable then.
        refused = (
            sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE
        )  # fmt: skip
        if getattr(error, "sqlite_errorcode", None) in refused:
            raise DiskFull(errno.ENOSPC, f"{file}: {error}") from error
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
