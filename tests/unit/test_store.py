"""The store: what is durable when, what a full or failing disk does, and SIGKILL anywhere."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
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

from narrows.broker.store import DiskFull, History, Store, packs
from narrows.broker.store import store as store_module
from narrows.proto.errors import ConfigError, ErrorCode, StateError
from narrows.proto.messages import Phase


def rows(folder: Path) -> int:
    """Rounds that another process can see."""
    with closing(sqlite3.connect(f"file:{folder}/run.db?mode=ro", uri=True)) as db:
        return int(db.execute("SELECT count(*) FROM rounds WHERE version > 0").fetchone()[0])


def pack_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "packs").iterdir())


@contextmanager
def failing(sync: str, code: int, good: int = 0) -> Iterator[None]:
    """A disk on which a call of the os module works so many times and fails from then on."""
    real, left = getattr(os, sync), [good]

    def fail(fd: int) -> None:
        if not left[0]:
            raise OSError(code, os.strerror(code))
        left[0] -= 1
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, sync, fail)
        yield


def test_payloads_are_durable_before_the_row_and_the_row_before_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int | None]] = []
    run = Run(tmp_path, reach=lambda place: see(place))

    def see(what: str) -> None:
        # The digest comes from another connection: the loop never waits for a commit.
        digest = run.store.published_digest(0, 1)
        seen.append((what, rows(tmp_path), digest))

    synced = os.fdatasync

    def seen_sync(fd: int) -> None:
        see("fdatasync")
        synced(fd)

    monkeypatch.setattr(os, "fdatasync", seen_sync)
    version = run.round(0)
    expected = version.state.digests.published
    assert seen == [("fdatasync", 0, None), ("appended", 0, None), ("durable", 1, expected)]
    size = sum(len(chunk) for each in version.round_.contributions for chunk in each.chunks)
    assert pack_bytes(tmp_path) == size, "a payload is written once, as it travelled"
    run.store.close()


def test_a_life_is_durable_before_it_begins(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = store.recover(5.0)
    assert (first.life, first.phase, first.layout, first.states) == (1, Phase.SEEDING, None, ())
    with closing(sqlite3.connect(f"file:{tmp_path}/run.db?mode=ro", uri=True)) as db:
        assert db.execute("SELECT life, at FROM lives").fetchall() == [(1, 5.0)]
    store.close()
    store = Store(tmp_path)
    second = store.recover(6.0)
    assert (second.life, second.run_id) == (2, first.run_id)
    store.close()


def test_each_start_makes_the_names_durable_that_a_kill_may_have_left_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(tmp_path).close()  # It stands for a life that was killed before it synced.
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    Store(tmp_path).close()
    assert {tmp_path.stat().st_ino, tmp_path.parent.stat().st_ino} <= set(synced)


def test_what_a_start_finds(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.rounds(2)
    run.store.end()
    run.store.close()
    store = Store(tmp_path)
    found = store.recover(9.0)
    assert (found.life, found.phase, found.layout, found.fragments) == (2, Phase.ENDED, LAYOUT, 2)
    assert (found.clock, found.period_s, found.notes) == (800, 2.5, ())
    assert found.merged == {
        (f"{name}.0000000a", fragment): 2 for name in ("site-a", "site-b") for fragment in (0, 1)
    }
    for state in found.states:
        again = store.replay(TABLE[state.fragment], state)
        assert [version.round_.reason for version in again] == ["everybody"] * 2
    assert store.published_digest(1, 0) == run.states[1][0].digests.published
    assert store.published_digest(1, 3) is None
    store.close()


def test_a_failed_sync_holds_the_round_back_and_its_pack_is_never_used_again(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.round(0)
    before = pack_bytes(tmp_path)
    version = next_version(run.head(0))
    with failing("fdatasync", errno.EIO):
        for _ in range(3):
            with pytest.raises(DiskFull, match="Input/output error"):
                run.store.commit(version)
    assert (rows(tmp_path), pack_bytes(tmp_path)) == (1, before), "nothing has changed"
    first = (tmp_path / "packs" / "00000001.pack").read_bytes()
    run.store.commit(version)
    assert (tmp_path / "packs" / "00000001.pack").read_bytes() == first
    run.states[0].append(version.state)
    run.store.close()
    assert heads(tmp_path) == facts([run.head(0), run.head(1)])


def test_a_full_disk_leaves_nothing_behind_and_short_writes_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.round(1)
    before, room = pack_bytes(tmp_path), [100]
    write = os.write

    def short(fd: int, data: bytes) -> int:
        """A disk that takes 7 bytes at a time, until there is no room left."""
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(fd, bytes(data[: min(7, room[0])]))
        room[0] -= taken
        return taken

    version = next_version(run.head(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        with pytest.raises(DiskFull, match="No space left"):
            run.store.commit(version)
        assert (rows(tmp_path), pack_bytes(tmp_path)) == (1, before)
        room[0] = 1 << 30
        run.store.commit(version)
    run.states[1].append(version.state)
    run.store.close()
    assert heads(tmp_path) == facts([run.head(0), run.head(1)])


def test_a_database_without_room_is_a_full_disk(tmp_path: Path) -> None:
    run = Run(tmp_path)
    # There is no other way to fill one file only.
    (pages,) = run.store._db.execute("PRAGMA page_count").fetchone()
    run.store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFull, match=r"run\.db.*full"):
        for _ in range(200):
            run.round(0)
    written = pack_bytes(tmp_path)
    with pytest.raises(DiskFull):
        run.round(0)
    assert pack_bytes(tmp_path) == written, "what no row knows fills the disk for good"
    run.store._db.execute("PRAGMA max_page_count = 1000000")
    run.round(0)
    run.store.close()
    assert heads(tmp_path) == facts([run.head(0), run.head(1)])


def test_a_snapshot_on_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.round(0)
    before = sorted(path.name for path in (tmp_path / "fragments").iterdir())
    with failing("fsync", errno.ENOSPC), pytest.raises(DiskFull):
        run.store.snapshot(run.head(0))
    assert sorted(path.name for path in (tmp_path / "fragments").iterdir()) == before
    run.store.snapshot(run.head(0))
    run.store.close()


def test_a_push_is_merged_once_and_a_version_is_made_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = run.round(0, push_id=7)
    with pytest.raises(StateError, match=r"UNIQUE.*push_id"):
        run.store.commit(next_version(run.head(0), push_id=7))
    with pytest.raises(StateError, match=r"UNIQUE.*rounds\.version"):
        run.store.commit(first)
    run.store.close()
    assert heads(tmp_path) == facts([run.head(0), run.head(1)])


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(StateError, match=f"process {os.getpid()}") as caught:
        Store(tmp_path)
    assert caught.value.code is ErrorCode.STATE_LOCKED
    run.round(0)
    run.store.close()
    Store(tmp_path).close()


def killed(folder: Path, place: str, visit: int) -> list[list[tuple[int, str]]]:
    """Runs rounds and snapshots in a child that dies by SIGKILL at the given visit of a place: one
    that the store reports, or a call into the os module.

    Returns what the child had told, per fragment: (version, digests) of each durable one.
    """
    visits = 0

    def reach(reached: str) -> None:
        nonlocal visits
        visits += reached == place
        if visits == visit:
            os.kill(os.getpid(), signal.SIGKILL)

    def reaching(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def reached(*arguments: Any, **options: Any) -> Any:
            reach(name)
            return call(*arguments, **options)

        return reached

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for name in ("fsync", "fdatasync", "rename", "unlink"):
                setattr(os, name, reaching(name, getattr(os, name)))
            run = Run(folder, reach=reach)
            for _ in range(4):
                for fragment in range(2):
                    state = run.round(fragment).state
                    os.write(writing, f"{fragment} {state.version} {state.digests}\n".encode())
                    run.store.snapshot(state)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading) as file:
        told = [line.strip().split(" ", 2) for line in file]
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child was not killed"
    return [[(int(v), d) for f, v, d in told if int(f) == fragment] for fragment in range(2)]


@pytest.mark.parametrize(
    ("place", "visit"),
    [
        *((place, visit) for place in ("appended", "durable", "fdatasync") for visit in (1, 2, 7)),
        *(("fsync", visit) for visit in range(1, 23, 2)),
        ("rename", 2),
        ("rename", 6),
        ("unlink", 1),
        ("unlink", 3),
    ],
)
def test_nothing_that_was_told_is_lost_by_a_kill(tmp_path: Path, place: str, visit: int) -> None:
    told = killed(tmp_path, place, visit)
    store = Store(tmp_path)
    states = store.recover(3.0).states
    store.close()
    if not states:
        assert told == [[], []], "version 0 was durable before the first round"
        return
    again = Store(tmp_path)
    for fragment, state in enumerate(recovered_states(again)):
        newest, digests = told[fragment][-1] if told[fragment] else (0, "")
        assert newest <= state.version <= newest + 1, "at most one round was durable and not told"
        if newest == state.version and newest:
            assert str(state.digests) == digests
        # The next round can be made: every push before is known, no file is in the way.
        version = next_version(state)
        again.commit(version)
        again.snapshot(version.state)
    again.close()


def test_an_older_copy_that_is_put_back_gets_a_life_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.rounds(1)
    run.store.close()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    store = Store(tmp_path / "run")
    assert store.recover(2.0).life == 2
    later = next_version(run.head(0))
    store.commit(later)
    store.close()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "copy").rename(tmp_path / "run")
    store = Store(tmp_path / "run")
    # The number may come twice; the host's nonce tells the lives apart.
    assert store.recover(3.0).life == 2
    assert store.published_digest(0, 2) is None, "learners that hold it are told to go back"
    assert store.published_digest(0, 1) == run.head(0).digests.published
    store.commit(later)
    store.close()


def test_what_no_start_needs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 1)
    run = Run(tmp_path)
    for _ in range(4):
        run.rounds(2)
        run.store.snapshot(run.head(0))
    assert len(list((tmp_path / "packs").iterdir())) == 15, "fragment 1 still needs them"
    for _ in range(2):
        run.rounds(1)
        run.store.snapshot(run.head(1))
    names = sorted(path.name for path in (tmp_path / "fragments").iterdir())
    assert names == [f"{name}.safetensors" for name in ("0-6", "0-8", "1-10", "1-9")]
    kept = len(list((tmp_path / "packs").iterdir()))
    assert kept == 8, "from version 7 of fragment 0 on, as its older snapshot needs"
    run.store.close()
    assert heads(tmp_path) == facts([run.head(0), run.head(1)])
    assert rows(tmp_path) == 20, "the history stays"


def test_files_that_no_row_knows_are_removed_at_a_start(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.rounds(1)
    run.store.close()
    strays = [
        tmp_path / "packs" / "00000099.pack",
        tmp_path / "fragments" / "0-5.safetensors",
        tmp_path / "fragments" / "0-6.safetensors.new",
    ]
    for each in strays:
        each.write_bytes(b"left by a crash")
    assert heads(tmp_path) == facts([run.head(0), run.head(1)])
    assert not any(each.exists() for each in strays)


def test_without_a_journal_a_crash_falls_back_to_the_snapshots(tmp_path: Path) -> None:
    run = Run(tmp_path, journal=False)
    run.rounds(2)
    run.store.snapshot(run.head(0))
    run.rounds(2)
    assert not list((tmp_path / "packs").iterdir())
    run.store.close()
    with closing(History(tmp_path)) as history:
        audit = history.audit()
        assert (audit.rounds, audit.replayed, audit.problems) == (10, 0, ())
        assert [state.version for state in history.states()] == [2, 0]
        with pytest.raises(ConfigError, match="up to version 2"):
            history.rollback(10, tmp_path / "back")
    store = Store(tmp_path, journal=False)
    found = store.recover(4.0)
    assert [state.version for state in found.states] == [2, 0]
    assert not any(list(store.replay(TABLE[state.fragment], state)) for state in found.states)
    assert found.clock == 400, "the tokens of what is lost do not count"
    assert found.merged == {("site-a.0000000a", 0): 2, ("site-b.0000000a", 0): 2}
    assert len(found.notes) == 2 and "from version 4 to 2" in found.notes[0]
    store.commit(next_version(found.states[1]))  # The same push ids are new again.
    store.close()


def test_only_the_newest_incarnations_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "INCARNATIONS_KEPT", 2)
    run = Run(tmp_path)
    for name in ("site-c", "site-b", "site-a"):
        run.round(0, learners=[name])
    run.store.snapshot(run.head(0))
    run.store.close()
    store = Store(tmp_path)
    assert list(store.recover(2.0).merged) == [("site-b.0000000a", 0), ("site-a.0000000a", 0)]
    store.close()


def test_seeding_is_all_or_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.recover(1.0)
    with failing("fsync", errno.ENOSPC, good=1), pytest.raises(DiskFull):
        store.seed(LAYOUT, first_states())
    store.close()
    store = Store(tmp_path)
    assert (store.recover(2.0).phase, store.published_digest(0, 0)) == (Phase.SEEDING, None)
    store.seed(LAYOUT, first_states())
    store.close()
    assert heads(tmp_path) == facts(first_states())


def test_two_workers_commit_and_snapshot_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 1)
    run = Run(tmp_path)

    def work(fragment: int) -> None:
        for _ in range(10):
            state = run.round(fragment).state
            run.store.snapshot(state)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    run.store.close()
    assert heads(tmp_path) == facts([run.head(0), run.head(1)])
    with closing(History(tmp_path)) as history:
        assert history.audit().problems == ()
