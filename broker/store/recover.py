"""Reading a state directory: the run, its rounds, and the state of each fragment by replay.

A fragment's state is its newest whole snapshot and the rounds after it, merged again as they were
merged first. Three digests of each version must agree with its row, so a start cannot go on from
anything but the bits that learners have seen.
"""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from narrows.broker.merging import merge
from narrows.broker.rounds import Contribution, Digests, FragmentState, Policy, Round, Version
from narrows.broker.store.packs import DiskFull, Packs, Place, damaged
from narrows.broker.store.tensors import read_state
from narrows.proto.errors import NarrowsError, StateError
from narrows.proto.layout import Fragment, fingerprint
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
    """Its contributions have no chunks: `load` reads them."""
    digests: Digests
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    payload_digests: tuple[int, ...]
    places: tuple[Place | None, ...]
    """Where the chunks lie. None: they were not kept, or are not needed any more."""

    def load(self, packs: Packs) -> Round:
        """The round with its chunks. Raises StateError if a payload is missing or damaged."""
        contributions: list[Contribution] = []
        for each, expected, place in zip(
            self.round_.contributions, self.payload_digests, self.places, strict=True
        ):
            whose = f"the payload of {each.learner} in round {self.seq}"
            if place is None:
                raise damaged(packs.folder, expected=whose, got="none: it was not kept")
            chunks = packs.read(place)
            if (got := payload_digest(chunks)) != expected:
                whose = f"{whose}, at {place.offset}, with digest {expected:016x}"
                raise damaged(packs.path(place.pack), expected=whose, got=f"{got:016x}")
            contributions.append(replace(each, chunks=chunks))
        return replace(self.round_, contributions=tuple(contributions))


@dataclass(frozen=True)
class FragmentRecord:
    """The state that a fragment goes on from. They are independent: a pool may replay several."""

    state: FragmentState
    """Its newest whole snapshot."""
    rounds: tuple[RoundRow, ...]
    """After the snapshot, in order; payloads are read as they are replayed."""
    packs: Packs
    file: Path
    """The database, for errors."""

    def replay(self, fragment: Fragment) -> Iterator[Version]:
        """The versions after the snapshot. Raises StateError if one is not as it was."""
        return replay(fragment, self.state, self.rounds, self.packs, self.file)


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
    records: tuple[FragmentRecord, ...]
    """Per fragment; empty before version 0."""
    notes: tuple[str, ...]
    """Lines that an operator should read, one line each: damage that was got over, rounds lost."""


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


def read_only(file: Path) -> sqlite3.Connection:
    """A connection that can only read, so that the broker stays the only one that writes."""
    uri = f"{file.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, check_same_thread=False)


@contextmanager
def database_errors(file: Path) -> Iterator[None]:
    """Errors of SQLite as DiskFull or StateError."""
    try:
        yield
    except sqlite3.Error as error:
        # A write that failed (a quota, a limit on files) leaves the log as it was, like a full
        # disk. A failed fsync is another matter: nobody knows what is durable then.
        refused = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
        if getattr(error, "sqlite_errorcode", None) in refused:
            raise DiskFull(errno.ENOSPC, f"{file}: {error}") from error
        raise damaged(file, expected="a database that works", got=str(error)) from error


def read_run(db: sqlite3.Connection, file: Path) -> Run:
    """The row of the run. Raises StateError for a layout that is not as it was written."""
    query = "SELECT run_id, phase, clock, fragments, layout, fingerprint FROM run"
    ((run_id, phase, clock, fragments, text, expected),) = db.execute(query).fetchall()
    if text is None:
        return Run(run_id, Phase(phase), clock, fragments, None)
    try:
        layout = msgspec.json.decode(text, type=Layout)
    except msgspec.MsgspecError as error:
        raise damaged(file, expected="a layout", got=str(error)) from error
    if (got := fingerprint(layout)) != expected:
        raise damaged(file, expected=f"layout {expected}", got=got)
    return Run(run_id, Phase(phase), clock, fragments, layout)


def read_rounds(
    db: sqlite3.Connection, file: Path, condition: str, arguments: Sequence[int]
) -> Iterator[RoundRow]:
    """The rounds that fulfil a condition in SQL, in the order in which they became durable.

    Raises StateError for a row that is not as it was written.
    """
    with database_errors(file):
        query = f"SELECT seq FROM rounds WHERE {condition} ORDER BY seq"
        for seq in db.execute(query, arguments).fetchall():
            (*columns, known), *_ = db.execute("SELECT * FROM rounds WHERE seq = ?", seq).fetchall()
            of_round = "SELECT * FROM contributions WHERE seq = ? ORDER BY learner, incarnation"
            parts = db.execute(of_round, seq).fetchall()
            what = f"round {columns[0]}, version {columns[2]} of fragment {columns[1]}"
            if (got := f"{row_digest(columns, parts):016x}") != known:
                raise damaged(file, expected=f"{what} with digest {known}", got=got)
            yield _row(columns, parts)


def _row(columns: Sequence[Any], parts: Sequence[Sequence[Any]]) -> RoundRow:
    """A round from its columns, whose digest was right; `store.SCHEMA` names them."""
    seq, fragment, version, at_unix, clock, policy, period_s, reason, *digests = columns
    contributions = tuple(Contribution(*(*part[2:10], ())) for part in parts)
    rules = msgspec.json.decode(policy, type=Policy)
    return RoundRow(
        seq=seq,
        at_unix=at_unix,
        clock=clock,
        round_=Round(fragment, version, contributions, rules, period_s, reason),
        digests=Digests(*(int(each, 16) for each in digests)),
        weights=tuple(part[10] for part in parts),
        norms=tuple(part[11] for part in parts),
        payload_digests=tuple(int(part[12], 16) for part in parts),
        places=tuple(
            None if pack is None else Place(pack, offset, tuple(json.loads(sizes)))
            for *_, pack, offset, sizes in parts
        ),
    )


def snapshot_path(folder: Path, fragment: int, version: int) -> Path:
    return folder / "fragments" / f"{fragment}-{version}.safetensors"


def snapshot_rows(
    db: sqlite3.Connection, file: Path, fragment: int, until: int = NEWEST
) -> list[RoundRow]:
    """The rounds up to row `until` whose states are kept whole, oldest first."""
    kept = "version IN (SELECT version FROM snapshots WHERE fragment = rounds.fragment)"
    return list(read_rounds(db, file, f"fragment = ? AND seq <= ? AND {kept}", (fragment, until)))


def first_whole(
    folder: Path, fragment: int, rows: Iterable[RoundRow]
) -> tuple[FragmentState, list[StateError]]:
    """The first of these snapshots that is as it was written, and what is wrong with those before.

    Raises StateError if there is none.
    """
    errors: list[StateError] = []
    for row in rows:
        version = row.round_.version
        path = snapshot_path(folder, fragment, version)
        try:
            return read_state(path, fragment, version, row.digests), errors
        except StateError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    raise damaged(folder / DATABASE, expected=f"a snapshot of fragment {fragment}", got="none")


def kept_rows(rows: Iterable[RoundRow]) -> Iterator[RoundRow]:
    """The rounds before the first one whose payloads were not kept."""
    return takewhile(lambda row: None not in row.places, rows)


def replay(
    fragment: Fragment, before: FragmentState, rows: Iterable[RoundRow], packs: Packs, file: Path
) -> Iterator[Version]:
    """Merges rounds again, one after another. Raises StateError unless every version has the three
    digests in its row."""
    for row in rows:
        what = f"version {before.version + 1} of fragment {fragment.index}"
        if row.round_.version != before.version + 1:
            raise damaged(file, expected=what, got=f"version {row.round_.version}")
        round_ = row.load(packs)
        try:
            version = merge(fragment, before, round_)
        except (FloatingPointError, NarrowsError) as error:
            raise damaged(file, expected=f"{what} to merge again", got=str(error)) from error
        if version.state.digests != row.digests:
            expected, got = (
                " ".join(f"{each:016x}" for each in digests)
                for digests in (row.digests, version.state.digests)
            )
            raise damaged(file, expected=f"{what} with digests {expected}", got=got)
        yield version
        before = version.state


def count_again(db: sqlite3.Connection) -> None:
    """Takes the clock and the merged push ids from the rounds that are left."""
    db.execute("UPDATE run SET clock = (SELECT coalesce(sum(tokens), 0) FROM contributions)")
    db.execute("DELETE FROM merged")
    db.execute(
        "INSERT INTO merged (incarnation, fragment, push_id, seq, tokens)"
        " SELECT incarnation, fragment, max(push_id), max(seq), sum(tokens)"
        " FROM contributions GROUP BY incarnation, fragment"
    )
