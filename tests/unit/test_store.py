"""The store: what is durable when, what a full or failing disk does, and SIGKILL anywhere."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from store_cases import (
    LAYOUT,
    TABLE,
    Run,
    facts,
    first_states,
    heads,
    next_version,
    recovered_states,
)

from narrows.broker.records import FragmentState
from narrows.broker.store import DiskFull, History, Store, files
from narrows.broker.store import store as store_module
from narrows.proto.errors import ConfigError, StateError
from narrows.proto.messages import Phase


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
    real, left = getattr(os, sync), [good]

    def fail(*arguments: Any) -> Any:
        if not left[0]:
            raise OSError(code, os.strerror(code))
        left[0] -= 1
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, sync, fail)
        yield


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.store.close()


def test_payloads_are_durable_before_the_row_and_the_row_before_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    full = run.store._db.execute("PRAGMA synchronous").fetchone()
    assert full == (2,), "else a power cut takes rows back that learners have seen"
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


def test_a_failed_sync_holds_the_round_back_and_its_pack_is_never_used_again(run: Run) -> None:
    run.round(0)
    before, first = pack_bytes(run.folder), run.folder / "packs" / "00000001.pack"
    content, version = first.read_bytes(), next_version(run.head(0))
    with failing("fdatasync", errno.EIO):
        for _ in range(3):
            with pytest.raises(DiskFull, match=r"packs cannot be written: .*Input/output"):
                run.store.commit(version)
    assert (rows(run.folder), pack_bytes(run.folder)) == (1, before), "nothing has changed"
    run.commit(version)
    assert first.read_bytes() == content
    run.starts_again()


def test_short_writes_are_finished(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:7])))
        run.round(1)
    run.starts_again()


def test_a_database_without_room_is_a_full_disk(run: Run) -> None:
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
    run.round(0)
    before = names(run.folder)
    with failing("fsync", errno.ENOSPC), pytest.raises(DiskFull):
        run.store.snapshot(run.head(0))
    assert names(run.folder) == before
    run.store.snapshot(run.head(0))


def test_seeding_is_all_or_nothing(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        store.recover(1.0)
        with failing("fsync", errno.ENOSPC, good=1), pytest.raises(DiskFull):
            store.seed(LAYOUT, first_states())
    with closing(Store(tmp_path)) as store:
        assert (store.recover(2.0).phase, store.published_digest(0, 0)) == (Phase.SEEDING, None)
        store.seed(LAYOUT, first_states())
    assert heads(tmp_path) == facts(first_states())


def test_a_push_is_merged_once_and_a_version_is_made_once(run: Run) -> None:
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


def test_without_a_journal_a_crash_falls_back_to_the_snapshots(tmp_path: Path) -> None:
    run = Run(tmp_path, journal=False)
    run.rounds(2)
    run.store.snapshot(run.head(0))
    run.rounds(2)
    assert not list((tmp_path / "packs").iterdir())
    run.store.close()
    with closing(History(tmp_path)) as history:
        assert history.audit() == (10, 0, ())
        assert [state.version for state in history.states()] == [2, 0]
        with pytest.raises(ConfigError, match="up to version 2"):
            history.rollback(10, tmp_path / "back")
    with closing(Store(tmp_path, journal=False)) as store:
        found = store.recover(4.0)
        assert [state.version for state in found.states] == [2, 0]
        assert not any(list(store.replay(TABLE[each.fragment], each)) for each in found.states)
        assert found.clock == 400, "the tokens of what is lost do not count"
        assert found.merged == {("site-a.00000001", 0): 2, ("site-b.00000001", 0): 2}
        assert len(found.notes) == 2 and "from version 4 to 2" in found.notes[0]
        store.commit(next_version(found.states[1]))  # The same push ids are new again.


def test_only_the_newest_incarnations_are_remembered(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
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
