"""The store: what is durable when, what a full or failing disk does, and SIGKILL anywhere; a start
on a state directory: the same bits again, or an error that names the file; and the safetensors
files of users."""

import errno
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from shutil import copytree
from typing import Any
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
from merging_cases import push_of, state_of
from safetensors.torch import load_file, save_file

from narrows.broker.merging import merge
from narrows.broker.records import FragmentState, Policy, Round, Version
from narrows.broker.store import DiskFull, History, Store, export_model, files, read_initial
from narrows.broker.store import history as history_module
from narrows.broker.store import store as store_module
from narrows.proto.errors import ConfigError, ErrorCode, StateError
from narrows.proto.layout import Fragment, build_table
from narrows.proto.messages import CodecName, Layout, LayoutEntry, Phase

LAYOUT = Layout(
    0,
    (
        LayoutEntry("embedding", (20, 16), "float32", "mean"),
        LayoutEntry("layer/weight", (24, 16), "bfloat16", "rda"),
        LayoutEntry("scale", (16,), "float16", "mean"),
    ),
)
TABLE = build_table(LAYOUT.entries, 2)
CHUNK = 256


def first_states() -> list[FragmentState]:
    """Version 0 of both fragments."""
    random = np.random.default_rng(0)
    return [
        state_of(each, random.standard_normal(each.elements).astype(np.float32)) for each in TABLE
    ]


def next_version(
    state: FragmentState,
    learners: Sequence[str] = ("site-a", "site-b"),
    *,
    codec: CodecName = "int4-zstd",
    push_id: int = 0,
) -> Version:
    """The version after a state, merged from one push of each learner, of 100 tokens in 10 steps.
    The same arguments give the same bytes."""
    fragment = TABLE[state.fragment]
    number = push_id or state.version + 1
    pushes = []
    for learner in sorted(learners):
        random = np.random.default_rng([number, state.version, *learner.encode()])
        gradient = 0.01 * random.standard_normal(fragment.elements).astype(np.float32)
        push = push_of(fragment, learner, gradient, codec=codec, chunk_elements=CHUNK)
        pushes.append(replace(push, push_id=number, base=state.version))
    policy = Policy(codec=codec, chunk_elements=CHUNK)
    round_ = Round(state.fragment, state.version + 1, tuple(pushes), policy, 2.5, "everybody")
    return merge(fragment, state, round_)


class Run:
    """A store and the states that it made durable, by fragment and version."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.store = Store(folder, **options)
        self.states: list[list[FragmentState]] = [[each] for each in first_states()]
        self.store.recover(1.0)
        self.store.seed(LAYOUT, first_states())

    def head(self, fragment: int) -> FragmentState:
        return self.states[fragment][-1]

    def round(self, fragment: int, **options: Any) -> Version:
        """Merges and commits the next round of a fragment."""
        version = next_version(self.head(fragment), **options)
        self.commit(version)
        return version

    def commit(self, version: Version) -> None:
        self.store.commit(version)
        self.states[version.state.fragment].append(version.state)

    def rounds(self, count: int) -> None:
        """That many rounds of each fragment, in turn."""
        for _ in range(count):
            for fragment in range(2):
                self.round(fragment)

    def starts_again(self) -> None:
        """Another start finds the newest versions, bit for bit."""
        self.store.close()
        assert heads(self.folder) == facts([self.head(0), self.head(1)])


def recovered_states(store: Store) -> Iterator[FragmentState]:
    """Begins a life and replays every fragment."""
    for state in store.recover(2.0).states:
        for version in store.replay(TABLE[state.fragment], state):
            state = version.state
        yield state


def heads(folder: Path) -> list[tuple[int, str]]:
    """Version and digests of each fragment after a new start on a state directory."""
    with closing(Store(folder)) as store:
        return facts(list(recovered_states(store)))


def facts(states: Sequence[FragmentState]) -> list[tuple[int, str]]:
    """The same of states in memory."""
    return [(state.version, str(state.digests)) for state in states]


def reader(folder: Path) -> sqlite3.Connection:
    """A connection like that of another process, which sees what is durable."""
    return sqlite3.connect(f"file:{folder}/run.db?mode=ro", uri=True)


def rows(folder: Path) -> int:
    with closing(reader(folder)) as db:
        return int(db.execute("SELECT count(*) FROM rounds WHERE version > 0").fetchone()[0])


def pack_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "packs").iterdir())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "fragments").iterdir())


@contextmanager
def failing(sync: str, code: int, good: int = 0) -> Iterator[None]:
    """A disk on which a call of the os module works so many times and fails from then on."""
    outcomes = chain(repeat(DEFAULT, good), repeat(OSError(code, os.strerror(code))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, sync, Mock(wraps=getattr(os, sync), side_effect=outcomes))
        yield


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.store.close()


def test_payloads_are_durable_before_the_row_and_the_row_before_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `Store.commit`."""
    seen: list[tuple[str, int, int | None]] = []

    run = Run(tmp_path, reach=lambda place: see(place))
    synced = os.fdatasync

    def see(what: str) -> None:
        # The digest comes from another connection: the loop never waits for a commit.
        digest = run.store.published_digest(0, 1)
        seen.append((what, rows(tmp_path), digest))

    def seen_sync(fd: int) -> None:
        see("fdatasync")
        synced(fd)

    folders: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: folders.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(os, "fdatasync", seen_sync)
    version = run.round(0)
    assert folders == [(tmp_path / "packs").stat().st_ino], "the name of a new pack is durable, too"
    expected = version.state.digests.published
    assert seen == [("fdatasync", 0, None), ("appended", 0, None), ("durable", 1, expected)]
    (full,) = run.store._db.execute("PRAGMA synchronous").fetchone()
    assert full == 2, "else a power cut takes rows back that learners have seen"
    size = sum(len(chunk) for each in version.round_.contributions for chunk in each.chunks)
    assert pack_bytes(tmp_path) == size, "a payload is written once, as it travelled"
    run.store.close()


def test_each_start_makes_the_names_durable_that_a_kill_may_have_left_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(tmp_path).close()  # It stands for a life that was killed before it synced.
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    Store(tmp_path).close()
    assert {tmp_path.stat().st_ino, tmp_path.parent.stat().st_ino} <= set(synced)


def test_a_start_copies_what_the_log_shows_into_the_database(run: Run, tmp_path: Path) -> None:
    """After a failed fsync the end of the log may be in the page cache only."""
    run.rounds(1)
    copytree(run.folder, killed := tmp_path / "killed")
    assert (killed / "run.db-wal").stat().st_size
    with closing(Store(killed)):
        assert not (killed / "run.db-wal").stat().st_size


def test_what_a_start_finds(run: Run) -> None:
    """Holds `Store.recover`."""
    run.rounds(2)
    run.store.end()
    run.store.close()
    with closing(Store(run.folder)) as store:
        found = store.recover(9.0)
        with closing(reader(run.folder)) as db:
            assert db.execute("SELECT life, at FROM lives").fetchall() == [(1, 1.0), (2, 9.0)]
        assert (found.life, found.phase, found.layout) == (2, Phase.ENDED, LAYOUT)
        assert (found.fragments, found.clock, found.period_s, found.notes) == (2, 800, 2.5, ())
        merged = [(f"site-{each}.00000001", fragment) for each in "ab" for fragment in (0, 1)]
        assert found.merged == dict.fromkeys(merged, 2)
        for state in found.states:
            again = store.replay(TABLE[state.fragment], state)
            assert [version.round_.reason for version in again] == ["everybody"] * 2
        assert store.published_digest(1, 0) == run.states[1][0].digests.published
        assert store.published_digest(1, 3) is None
        assert [store.newest_push(f"site-a.0000000{life}", 1) for life in (1, 2)] == [2, 0]
        assert found.heads == (2, 2)


def test_a_failed_sync_holds_the_round_back_and_its_pack_is_never_used_again(run: Run) -> None:
    """Holds `Packs.append`."""
    run.round(0)
    before = pack_bytes(run.folder)
    first = run.folder / "packs" / "00000001.pack"
    content = first.read_bytes()
    version = next_version(run.head(0))
    with failing("fdatasync", errno.EIO):
        for _ in range(3):
            with pytest.raises(DiskFull, match=r"packs cannot be written: .*Input/output"):
                run.store.commit(version)
    assert (rows(run.folder), pack_bytes(run.folder)) == (1, before), "nothing has changed"
    run.commit(version)
    assert first.read_bytes() == content
    run.starts_again()


def test_short_writes_are_finished(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds `Packs.append`."""
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:7])))
        run.round(1)
    run.starts_again()


def test_a_database_without_room_is_a_full_disk(run: Run) -> None:
    """Holds `Store.commit`."""
    # There is no other way to fill one file only.
    (pages,) = run.store._db.execute("PRAGMA page_count").fetchone()
    run.store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFull, match=r"run\.db.*full"):
        for _ in range(200):
            run.round(0)
    written = pack_bytes(run.folder)
    with pytest.raises(DiskFull):
        run.round(0)
    assert pack_bytes(run.folder) == written, "what no row knows fills the disk for good"
    run.store._db.execute("PRAGMA max_page_count = 1000000")
    run.round(0)
    run.starts_again()


def test_a_snapshot_on_a_full_disk_changes_nothing(run: Run) -> None:
    """Holds `Store.snapshot`."""
    run.round(0)
    before = names(run.folder)
    with failing("fsync", errno.ENOSPC), pytest.raises(DiskFull):
        run.store.snapshot(run.head(0))
    assert names(run.folder) == before
    ((count,),) = run.store.query("SELECT count(*) FROM snapshots")
    assert count == 2, "no row before its file"
    run.store.snapshot(run.head(0))


def test_seeding_is_all_or_nothing(tmp_path: Path) -> None:
    """Holds `Store.seed`."""
    with closing(Store(tmp_path)) as store:
        store.recover(1.0)
        with failing("fsync", errno.ENOSPC, good=1), pytest.raises(DiskFull):
            store.seed(LAYOUT, first_states())
    with closing(Store(tmp_path)) as store:
        assert (store.recover(2.0).phase, store.published_digest(0, 0)) == (Phase.SEEDING, None)
        store.seed(LAYOUT, first_states())
    assert heads(tmp_path) == facts(first_states())


def test_a_push_is_merged_once_and_a_version_is_made_once(run: Run) -> None:
    """Holds `Store.commit`."""
    first = run.round(0, push_id=7)
    with pytest.raises(StateError, match=r"UNIQUE.*push_id"):
        run.store.commit(next_version(run.head(0), push_id=7))
    with pytest.raises(StateError, match=r"UNIQUE.*rounds\.version"):
        run.store.commit(first)
    run.starts_again()


def test_nothing_that_was_told_is_lost_by_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves what the folder holds then: a copy of it stands for each place of a crash, one
    that the store reports, or a call into the os module."""
    told: dict[int, FragmentState] = {}
    left: list[tuple[Path, dict[int, FragmentState]]] = []

    def reach(place: str) -> None:
        left.append((tmp_path / f"{len(left)}-{place}", dict(told)))
        copytree(tmp_path / "run", left[-1][0])

    def reaching(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def reached(*arguments: Any, **options: Any) -> Any:
            reach(name)
            return call(*arguments, **options)

        return reached

    for name in ("fsync", "fdatasync", "rename", "unlink"):
        monkeypatch.setattr(os, name, reaching(name, getattr(os, name)))
    run = Run(tmp_path / "run", reach=reach)
    for turn in range(8):
        told[turn % 2] = run.round(turn % 2).state
        run.store.snapshot(told[turn % 2])
    run.store.close()
    monkeypatch.undo()
    assert len(left) > 60
    for folder, known in left:
        with closing(Store(folder, durable=False)) as store:
            states = list(recovered_states(store))
            assert states or not known, "version 0 was durable before the first round"
            for state in states:
                newest = known.get(state.fragment, run.states[state.fragment][0])
                assert newest.version <= state.version <= newest.version + 1, "one was not told yet"
                assert state.version > newest.version or state.digests == newest.digests
                # The next round can be made: every push before is known, no file is in the way.
                version = next_version(state)
                store.commit(version)
                store.snapshot(version.state)


def test_what_no_start_needs_is_removed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds `Store.recover`."""
    monkeypatch.setattr(files, "PACK_BYTES", 1)
    packs = run.folder / "packs"
    for _ in range(4):
        run.rounds(2)
        run.store.snapshot(run.head(0))
    assert len(list(packs.iterdir())) == 15, "fragment 1 still needs them"
    for _ in range(2):
        run.rounds(1)
        run.store.snapshot(run.head(1))
    assert names(run.folder) == [f"{each}.safetensors" for each in ("0-6", "0-8", "1-10", "1-9")]
    assert len(list(packs.iterdir())) == 8, (
        "from version 7 of fragment 0 on, for its older snapshot"
    )
    strays = [packs / "00000099.pack"]
    strays += [run.folder / "fragments" / f"0-5.safetensors{end}" for end in ("", ".new")]
    for each in strays:
        each.write_bytes(b"left by a crash")
    own = run.folder / "fragments" / "lost+found", packs / "README"
    own[0].mkdir()
    own[1].touch()
    run.starts_again()
    assert not any(each.exists() for each in strays)
    assert all(each.exists() for each in own), "what the broker has not made stays"
    assert rows(run.folder) == 20, "the history stays"


def test_an_older_database_alone_costs_no_newer_pack(run: Run) -> None:
    """Holds `Store._begin_life`: without a newer state the number of the life tells it."""
    file = run.folder / "run.db"
    run.rounds(1)
    with closing(reader(run.folder)) as db, closing(sqlite3.connect(run.folder / "older")) as copy:
        db.backup(copy)
    run.store.close()
    run.store = Store(run.folder)
    run.store.recover(2.0)
    run.rounds(2)
    run.store.close()
    file.rename(run.folder / "newer")
    (run.folder / "older").rename(file)
    with closing(Store(run.folder)) as store:
        (note,) = store.recover(3.0).notes
        store._packs.append([[b"x"]])
    (aside,) = run.folder.glob("newer-*")
    assert "1 of its files" in note
    (pack,) = aside.iterdir()
    assert not (run.folder / "packs" / pack.name).exists(), "its number is not used again"
    (run.folder / "newer").rename(file)
    pack.rename(run.folder / "packs" / pack.name)
    run.starts_again()


def test_an_older_database_alone_costs_no_newer_file(run: Run) -> None:
    """The states and packs that its rows do not know are set aside, and fit the newer one again."""
    file, older, newer = (run.folder / name for name in ("run.db", "older.db", "newer.db"))
    run.rounds(1)
    with closing(reader(run.folder)) as db, closing(sqlite3.connect(older)) as copy:
        db.backup(copy)
    run.rounds(1)
    run.store.snapshot(run.head(0))
    run.store.close()
    file.rename(newer)
    older.rename(file)
    with closing(Store(run.folder)) as store:
        (note,) = store.recover(2.0).notes
    (aside,) = run.folder.glob("newer-*")
    assert f"1 of its files, now in {aside}" in note and len(names(run.folder)) == 2
    newer.rename(file)
    (aside / "0-2.safetensors").rename(run.folder / "fragments" / "0-2.safetensors")
    run.starts_again()


def test_only_the_newest_incarnations_are_remembered(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `Store.snapshot`."""
    monkeypatch.setattr(store_module, "INCARNATIONS_KEPT", 2)
    for name in ("site-c", "site-b", "site-a"):
        run.round(0, learners=[name])
    run.store.snapshot(run.head(0))
    newest = list(run.store.recover(2.0).merged)
    assert newest == [("site-b.00000001", 0), ("site-a.00000001", 0)]


def test_two_workers_commit_and_snapshot_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PACK_BYTES", 1)

    def work(fragment: int) -> None:
        for _ in range(10):
            run.store.snapshot(run.round(fragment).state)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    run.starts_again()
    with closing(History(run.folder)) as history:
        assert history.audit().problems == ()


def flip(path: Path, offset: int) -> None:
    """Turns one bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def change(folder: Path, sql: str) -> None:
    with closing(sqlite3.connect(folder / "run.db")) as db, db:
        db.execute(sql)


@pytest.fixture
def stopped(tmp_path: Path) -> Run:
    """Four rounds of each fragment, snapshots of fragment 0 at versions 0 and 2."""
    run = Run(tmp_path / "run")
    run.rounds(2)
    run.store.snapshot(run.head(0))
    run.rounds(2)
    run.store.close()
    return run


def refusal(folder: Path) -> StateError:
    """The error of a start, which must change nothing that is left."""
    before = set(folder.rglob("*"))
    with pytest.raises(StateError) as caught, closing(Store(folder)) as store:
        list(recovered_states(store))
    assert caught.value.code is ErrorCode.STATE_DAMAGED and caught.value.remedy
    assert caught.value.expected and caught.value.got
    assert {each.name for each in before ^ set(folder.rglob("*"))} <= {"run.db-wal", "run.db-shm"}
    return caught.value


def test_a_damaged_snapshot_gives_way_to_the_older_one(stopped: Run) -> None:
    """Holds `Store.recover`."""
    newest = stopped.folder / "fragments" / "0-2.safetensors"
    flip(newest, newest.stat().st_size - 5)
    with closing(Store(stopped.folder)) as store:
        found = store.recover(2.0)
        assert [state.version for state in found.states] == [0, 0]
        (note,) = found.notes
        assert str(newest) in note and "older snapshot" in note
        (*_, last) = store.replay(TABLE[0], found.states[0])
        assert last.state.digests == stopped.head(0).digests
        assert not newest.exists(), "it must not count as one of the two that are kept"


def test_damage_that_cannot_be_got_over_names_the_file(stopped: Run) -> None:
    pack = stopped.folder / "packs" / "00000001.pack"
    content = pack.read_bytes()
    flip(pack, len(content) - 3)
    error = refusal(stopped.folder)
    assert "packs/00000001.pack" in str(error) and "site-b in round 10" in error.expected
    pack.write_bytes(content[:-1])
    assert "packs/00000001.pack" in str(refusal(stopped.folder))
    pack.unlink()
    assert "No such file" in refusal(stopped.folder).got
    for name in ("0-2", "0-0"):
        (stopped.folder / "fragments" / f"{name}.safetensors").write_bytes(b"no tensors")
    assert "fragments/0-2.safetensors" in str(refusal(stopped.folder))


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE rounds SET period_s = 2.25 WHERE seq = 7",
        "UPDATE rounds SET published = global WHERE seq = 7",
        "UPDATE rounds SET policy = '{}' WHERE seq = 7",
        "UPDATE rounds SET policy = 'x' WHERE seq = 7",
        "UPDATE contributions SET tokens = 101 WHERE seq = 7",
        "DELETE FROM contributions WHERE seq = 7 AND learner = 'site-a'",
        "UPDATE contributions SET digest = 'zz' WHERE seq = 7",
        "UPDATE contributions SET sizes = '[1' WHERE seq = 7",
        "DELETE FROM rounds WHERE seq = 7",
        "UPDATE run SET layout = replace(layout, 'rda', 'mean')",
        "UPDATE run SET layout = 'x'",
        "UPDATE run SET phase = 'x'",
        "DELETE FROM run",
        "DELETE FROM snapshots",
    ],
)
def test_changed_facts_are_noticed(stopped: Run, sql: str) -> None:
    """Holds `Store.recover`."""
    change(stopped.folder, sql)
    assert re.search(r"run\.db|in round 7", str(refusal(stopped.folder)))


def test_a_merge_with_other_bits_is_noticed(stopped: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds `Store.recover`."""

    def other(fragment: Fragment, before: FragmentState, round_: Round) -> Version:
        """The arithmetic of another release."""
        policy = replace(round_.policy, outer_lr=round_.policy.outer_lr * (1 + 2**-20))
        return merge(fragment, before, replace(round_, policy=policy))

    monkeypatch.setattr(history_module, "merge", other)
    assert "version 3 of fragment 0 with digests" in refusal(stopped.folder).expected


def test_a_database_that_is_none_or_another_ones(stopped: Run, tmp_path: Path) -> None:
    folder = stopped.folder
    change(folder, "PRAGMA user_version = 3")
    error = refusal(folder)
    assert (error.expected, error.got) == ("user_version 2", "3")
    (folder / "run.db").write_bytes(b"x" * 5000)
    assert "run.db" in str(refusal(folder)) and "not a database" in refusal(folder).got
    (folder / "run.db").unlink()
    assert "no file" in str(refusal(folder)), "a new database would forget the run"
    with closing(sqlite3.connect(folder / "run.db")) as db:
        db.execute("CREATE TABLE theirs (x)")
    assert refusal(folder).got == "0"
    with closing(sqlite3.connect(folder / "run.db")) as db:
        db.execute("PRAGMA user_version = 2")
    assert refusal(folder).got == "2", "the number of our schema, and none of our tables"


def test_a_run_that_began_before_pushes_had_losses_goes_on(stopped: Run) -> None:
    """Holds `Store.commit` and `row_digest`."""
    folder = stopped.folder
    change(folder, "ALTER TABLE contributions DROP COLUMN loss")
    change(folder, "PRAGMA user_version = 1")

    def losses() -> list[float | None]:
        with closing(History(folder)) as history:
            assert not history.audit().problems
            return [point.loss for point in history.curve()]

    old = losses()
    assert old == [None] * 16, "it is read as it is"
    stopped.store = Store(folder)
    version = next_version(stopped.head(1))
    pushes = tuple(replace(push, loss=2.5) for push in version.round_.contributions)
    stopped.commit(replace(version, round_=replace(version.round_, contributions=pushes)))
    stopped.starts_again()
    assert losses() == [*old, 2.5, 2.5]
    change(folder, "UPDATE contributions SET loss = 1.0 WHERE loss AND learner = 'site-a'")
    with closing(History(folder)) as history:
        assert len(history.audit().problems) == 1, "a loss is a fact of its row"


def test_an_empty_or_a_fresh_database_never_costs_the_files_of_a_run(
    stopped: Run, tmp_path: Path
) -> None:
    folder = stopped.folder
    (folder / "run.db-wal").write_bytes(b"a log, which SQLite would remove")
    for content in (b"", b"x"):
        (folder / "run.db").write_bytes(content)
        assert "run.db" in str(refusal(folder))
        assert (folder / "run.db-wal").exists()
    (folder / "run.db-wal").unlink()
    with closing(Store(tmp_path / "fresh")) as fresh:
        fresh.recover(1.0)
    for name in ("run.db", "run.db-wal", "run.db-shm"):
        (folder / name).unlink(missing_ok=True)
        if (tmp_path / "fresh" / name).exists():
            (tmp_path / "fresh" / name).rename(folder / name)
    assert "a run without version 0 beside" in refusal(folder).got


def test_a_database_that_others_hold_is_waited_for(run: Run) -> None:
    """Holds `Store.commit`."""
    run.store._db.execute("PRAGMA busy_timeout = 1")
    with closing(sqlite3.connect(run.folder / "run.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        written = pack_bytes(run.folder)
        with pytest.raises(OSError, match=r"run\.db cannot be written: .*another process holds it"):
            run.round(0)
        assert pack_bytes(run.folder) == written
        other.execute("ROLLBACK")
    run.round(0)
    run.starts_again()


def test_a_directory_that_was_removed_or_replaced_takes_no_round(tmp_path: Path) -> None:
    """Holds `Store.check_folder`."""
    run = Run(tmp_path / "state")
    run.round(0)
    copytree(run.folder, tmp_path / "copy")
    run.folder.rename(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="was removed or replaced"):
        run.round(0)
    (tmp_path / "copy").rename(run.folder)
    for write in (lambda: run.round(0), lambda: run.store.snapshot(run.head(0))):
        with pytest.raises(StateError, match="the lock of another directory"):
            write()
    run.store.close()


def test_the_facts_of_a_run_are_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o755)  # As a unit file may have made it.
    (folder / "run.db.copies").mkdir(mode=0o755)
    with closing(Run(folder).store):
        files_ = [path for path in folder.iterdir() if path.is_file()]
        assert {path.name for path in files_} >= {"run.db", "run.db-wal", "lock"}
        for path in (*files_, folder / "packs", folder / "fragments"):
            assert path.stat().st_mode & 0o077 == 0, path
    assert (folder / "run.db.copies").stat().st_mode & 0o777 == 0o755, "it is somebody else's"


def test_an_audit_finds_what_is_damaged_and_nothing_else(stopped: Run) -> None:
    folder = stopped.folder
    with closing(History(folder)) as history:
        assert history.audit() == (10, 8, ())
        sums = "SELECT sum(weight) AS weight, min(norm) AS norm FROM contributions WHERE seq = 6"
        (row,) = history.query(sums)
        assert row["weight"] == pytest.approx(1.0) and row["norm"] > 0
    flip(folder / "packs" / "00000001.pack", 20)
    change(folder, "UPDATE run SET clock = 5")
    change(folder, "UPDATE rounds SET reason = 'nobody' WHERE seq = 10")
    snapshot = folder / "fragments" / "1-0.safetensors"
    flip(snapshot, snapshot.stat().st_size - 1)
    with closing(History(folder)) as history:
        problems = "\n".join(history.audit().problems)
    for each in ("clock 5", "00000001.pack", "round 10", "1-0.safetensors"):
        assert each in problems


def test_history_can_be_read_while_the_broker_runs(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.rounds(1)
    with closing(History(tmp_path)) as history:
        run.round(0)
        merged = run.round(1)
        newest = list(history.rounds())[-1]
        assert (newest.seq, newest.round_.version, history.run.clock) == (6, 2, 800)
        assert [each.learner for each in newest.round_.contributions] == ["site-a", "site-b"]
        facts_of_trust = "SELECT weight, norm FROM contributions WHERE seq = 6 ORDER BY learner"
        trust = [(row["weight"], row["norm"]) for row in history.query(facts_of_trust)]
        assert trust == [*zip(merged.weights, merged.norms, strict=True)]
        assert facts(list(history.states())) == facts([run.head(0), run.head(1)])
    run.store.close()


@pytest.mark.parametrize("what", ["audit", "states"])
def test_what_a_running_broker_removes_meanwhile_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Holds `History.audit`."""
    monkeypatch.setattr(files, "PACK_BYTES", 1)
    run = Run(tmp_path)
    read_state = files.read_state

    def read_late(*arguments: Any) -> FragmentState:
        """Reads the first snapshot when two newer ones have taken its place."""
        while run.head(0).version < 3:
            run.rounds(1)
            for fragment in (0, 1):
                run.store.snapshot(run.head(fragment))
        return read_state(*arguments)

    run.rounds(1)
    monkeypatch.setattr(files, "read_state", read_late)
    with closing(History(tmp_path)) as history:
        if what == "audit":
            assert history.audit() == (4, 2, ())
        else:
            assert facts(list(history.states())) == facts([run.head(0), run.head(1)])
    run.store.close()


def test_a_rollback_makes_a_new_directory_and_leaves_the_old_one(
    stopped: Run, tmp_path: Path
) -> None:
    folder, target = stopped.folder, tmp_path / "back"
    # What comes after the round that is gone back to may be damaged.
    pack = folder / "packs" / "00000001.pack"
    flip(pack, pack.stat().st_size - 1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with closing(History(folder)) as history:
        history.rollback(7, target)
        with pytest.raises(ConfigError, match="exists"):
            history.rollback(7, target)
    assert {path: path.read_bytes() for path in before} == before
    assert heads(target) == facts([stopped.states[0][3], stopped.states[1][2]])
    with closing(Store(target)) as store:
        found = store.recover(3.0)
        assert (found.clock, found.life, found.merged["site-a.00000001", 1]) == (1000, 3, 2)
        for state in found.states:
            version = next_version(state)
            store.commit(version)
            # The same pushes on the same state: the same version as in the old directory.
            old = stopped.states[state.fragment][version.state.version]
            assert version.state.digests == old.digests
    with closing(History(target)) as history:
        assert history.audit().problems == ()


def test_a_rollback_beyond_the_snapshots_says_what_is_missing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for _ in range(3):
        run.rounds(1)
        run.store.snapshot(run.head(0))
    run.store.close()
    with closing(History(run.folder)) as history:
        for until in (1, 4):
            with pytest.raises(ConfigError, match=r"got no snapshot.*keep_history"):
                history.rollback(until, tmp_path / "back")


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match=r"file.*--state-dir"):
        Store(tmp_path / "file" / "run")
    Store(tmp_path).close()
    with closing(History(tmp_path)) as history:
        assert (history.run.layout, list(history.states())) == (None, [])


# Safetensors files of users: version 0 to begin with, and the export of the model.


def tensors() -> dict[str, torch.Tensor]:
    """The layout's tensors in three dtypes, and one that no layout names."""
    torch.manual_seed(1)
    return {
        "embedding": torch.randn(20, 16),
        "layer/weight": torch.randn(24, 16).to(torch.bfloat16),
        "scale": torch.randn(16).to(torch.float16),
        "cache": torch.arange(5),
    }


def test_a_file_becomes_version_0_and_version_0_the_same_file(tmp_path: Path) -> None:
    """Holds `read_initial`."""
    begin, end = tmp_path / "begin.safetensors", tmp_path / "end.safetensors"
    save_file(tensors(), begin)
    states = read_initial(begin, LAYOUT, TABLE)
    assert [state.version for state in states] == [0, 0]
    assert all(not state.momentum.any() for state in states)
    assert [state.digests.global_ for state in states] == [s.digests.published for s in states]
    del (expected := tensors())["cache"]
    # Values between those of a dtype are rounded as torch does.
    for factor in (1.0, 1.001):
        export_model(
            end, LAYOUT, TABLE, [state.global_ * np.float32(factor) for state in states], {}
        )
        found = load_file(end)
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            wanted = (tensor.float() * factor).to(tensor.dtype)
            assert found[name].dtype == wanted.dtype and torch.equal(found[name], wanted), name


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("scale", None, "scale of shape.*no such tensor"),
        ("scale", torch.zeros(17), r"scale of shape \[16\].*got \[17\]"),
        ("scale", torch.zeros(16, dtype=torch.float64), "F32 or F16 or BF16.*F64"),
        ("scale", torch.full((16,), torch.nan), "scale.*finite"),
    ],
)
def test_a_file_that_does_not_fit(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    """Holds `read_initial`."""
    content = tensors()
    del content[name]
    if tensor is not None:
        content[name] = tensor
    save_file(content, tmp_path / "begin")
    with pytest.raises(ConfigError, match=message):
        read_initial(tmp_path / "begin", LAYOUT, TABLE)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """Holds `read_initial`."""
    with pytest.raises(ConfigError, match="No such file"):
        read_initial(tmp_path / "none", LAYOUT, TABLE)
    save_file(tensors(), tmp_path / "short")
    content = (tmp_path / "short").read_bytes()
    for cut in (b"", content[:5], content[:100], content[:-1]):
        (tmp_path / "short").write_bytes(cut)
        with pytest.raises(ConfigError, match="a safetensors file"):
            read_initial(tmp_path / "short", LAYOUT, TABLE)
