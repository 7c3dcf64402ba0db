"""The journal where nothing fails: numbers, batches, segments, reopening, cutting, two threads."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from fake_disk import FakeDisk
from journal_cases import (
    RUN,
    SEGMENT_BYTES,
    Story,
    append,
    body,
    contents,
    opened,
    segment_bytes,
    sync,
)

from narrows.broker.storage import segments, window
from narrows.broker.storage.disk import DirectoryFiles
from narrows.broker.storage.durable_files import StateError
from narrows.broker.storage.journal import Journal, JournalError
from narrows.broker.storage.segments import RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES
from narrows.proto.errors import ErrorCode, LocalProtocolError

ROOMY_BYTES = 1 << 16


@pytest.fixture
def directory_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def names(disk: FakeDisk) -> list[str]:
    return sorted(disk.contents())


def named(*numbers: int) -> list[str]:
    return [f"journal-{number:08d}.log" for number in numbers]


# Records.


def test_a_new_journal_is_empty() -> None:
    disk = FakeDisk()
    journal = opened(disk)
    assert (journal.first, journal.durable, journal.warnings) == (1, 0, [])
    assert contents(journal) == [] and list(journal.records(7)) == []
    journal.sync()
    journal.close()
    assert names(disk) == []


def test_append_only_queues_and_sync_makes_durable() -> None:
    disk = FakeDisk()
    journal = opened(disk)
    journal.sync()
    before = len(disk.calls)
    assert [journal.append([b"one"]), journal.append([b"two"])] == [1, 2]
    assert len(disk.calls) == before
    assert journal.durable == 0 and contents(journal) == []
    journal.sync()
    assert journal.durable == 2 and contents(journal) == [b"one", b"two"]
    assert bytes(next(journal.records(2)).body) == b"two"
    assert contents(opened(FakeDisk(disk.contents()))) == [b"one", b"two"]


def test_a_body_is_its_parts_in_a_row() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    disk = FakeDisk()
    journal = opened(disk)
    journal.append([b"head", memoryview(b""), values.data, b"", np.empty(0, np.float32).data])
    journal.append([])
    journal.append([b""])
    journal.sync()
    assert contents(opened(disk)) == [b"head" + values.tobytes(), b"", b""]


@pytest.mark.parametrize("block_bytes", [1 << 20, 100])
def test_bodies_larger_than_what_is_read_at_once(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "BLOCK_BYTES", block_bytes)
    sizes = [3 * block_bytes + 5, 0, block_bytes, 1, 2 * block_bytes - RECORD_HEADER_BYTES]
    story = Story(FakeDisk(), segment_bytes=4 * block_bytes)
    story.follow((append(*sizes), sync, append(*reversed(sizes)), sync))
    story.open()
    assert [len(each) for each in story.bodies] == [*sizes, *reversed(sizes)]


def test_a_batch_is_one_write_and_one_sync() -> None:
    disk = FakeDisk()
    journal = opened(disk, ROOMY_BYTES)
    traces: list[list[str]] = []
    for count in (3, 1, 200):
        before = len(disk.calls)
        for _ in range(count):
            journal.append([b"head", b"rest"])
        journal.sync()
        traces.append(disk.calls[before:])
    creation = ["create", "write", "sync", "sync_directory"]
    assert traces == [
        ["sync_directory", *creation, "write", "sync"], ["write", "sync"], ["write", "sync"]
    ]  # fmt: skip


def test_nothing_to_sync_is_no_call() -> None:
    disk = FakeDisk()
    journal = opened(disk)
    journal.append([b"one"])
    journal.sync()
    before = len(disk.calls)
    journal.sync()
    assert len(disk.calls) == before


def test_the_queue_is_bounded() -> None:
    limit = 3 * (RECORD_HEADER_BYTES + 10)
    journal = Journal.open(
        FakeDisk(), run_id=RUN, segment_bytes=SEGMENT_BYTES, queued_bytes_max=limit
    )
    for number in (1, 2, 3):
        assert journal.append([bytes(10)]) == number
    with pytest.raises(JournalError) as caught:
        journal.append([])
    assert caught.value.code == ErrorCode.JOURNAL_FAILED
    assert str(limit) in caught.value.expected and caught.value.remedy
    journal.sync()
    assert journal.append([bytes(10)]) == 4
    journal.sync()
    assert contents(journal) == [bytes(10)] * 4


# Segments.


def test_segments_are_rolled_and_hold_what_fits() -> None:
    disk = FakeDisk()
    journal = opened(disk, segment_bytes(10, 20))
    for size in (10, 20, 1):
        journal.append([bytes(size)])
    journal.sync()
    assert names(disk) == named(1, 2)
    assert {len(content) for content in disk.contents().values()} == {segment_bytes(10, 20)}
    journal.append([bytes(20)])
    journal.sync()
    assert names(disk) == named(1, 2)
    journal.append([])
    journal.sync()
    assert names(disk) == named(1, 2, 3)
    assert [len(each) for each in contents(opened(disk))] == [10, 20, 1, 20, 0]


def test_a_record_larger_than_a_segment_has_one_of_its_own() -> None:
    disk = FakeDisk()
    journal = opened(disk)
    for size in (1, 2 * SEGMENT_BYTES, 2):
        journal.append([bytes(size)])
    journal.sync()
    assert [len(content) for _, content in sorted(disk.contents().items())] == [
        SEGMENT_BYTES, segment_bytes(2 * SEGMENT_BYTES), SEGMENT_BYTES
    ]  # fmt: skip
    assert [len(each) for each in contents(opened(disk))] == [1, 2 * SEGMENT_BYTES, 2]


def test_a_batch_over_several_segments_is_durable_one_by_one() -> None:
    disk = FakeDisk()
    journal = opened(disk)
    journal.sync()
    for size in (300, 300, 300):
        journal.append([bytes(size)])
    # The second segment cannot be made.
    disk.errors = {len(disk.calls) + 8: OSError(errno.ENOSPC, "full")}
    with pytest.raises(JournalError, match="records after 1 are not durable"):
        journal.sync()
    assert disk.calls[-1] == "create" and journal.durable == 1
    journal.sync()
    assert journal.durable == 3
    assert [len(each) for each in contents(opened(disk))] == [300] * 3


def test_opening_writes_nothing_and_an_old_segment_is_never_written_to_again() -> None:
    disk = FakeDisk()
    for life in range(1, 5):
        before = disk.contents()
        calls = len(disk.calls)
        journal = opened(disk)
        assert set(disk.calls[calls:]) <= {"names", "size", "read"}
        journal.append([b"life", bytes([life])])
        journal.sync()
        after = disk.contents()
        assert names(disk) == named(*range(1, life + 1))
        assert {name: after[name] for name in before} == before
        assert contents(journal) == [b"life" + bytes([each]) for each in range(1, life + 1)]


def test_room_that_cannot_be_taken_in_advance_is_no_harm() -> None:
    disk = FakeDisk()
    disk.preallocates = False
    story = Story(disk)
    story.follow((append(5, 6), sync, append(500, 7), sync))
    assert all(len(each) <= segment_bytes(500) for each in disk.contents().values())
    story.open()
    assert len(story.bodies) == 4


# Opening again.


def test_the_newest_batch_is_written_again_before_it_counts() -> None:
    disk = FakeDisk()
    story = Story(disk)
    story.follow((append(10, 11), sync, append(12, 13, 14), sync))
    journal = story.open()
    assert len(contents(journal)) == 5 and journal.durable == 2
    journal.sync()
    assert journal.durable == 5 and names(disk) == named(1, 2)
    second = disk.contents()[named(2)[0]]
    assert second[20:28] == (3).to_bytes(8, "little") and second[28:36] == (5).to_bytes(8, "little")
    assert contents(journal) == story.bodies
    assert contents(opened(disk)) == story.bodies


def test_copies_share_one_segment_however_large_they_are() -> None:
    disk = FakeDisk()
    story = Story(disk, segment_bytes=4 * SEGMENT_BYTES)
    story.follow((append(*[200] * 8), sync))
    small = opened(disk, SEGMENT_BYTES)
    small.append([b"next"])
    small.sync()
    assert names(disk) == named(1, 2, 3)
    assert len(disk.contents()[named(2)[0]]) == segment_bytes(*[200] * 8)
    assert contents(opened(disk)) == [*story.bodies, b"next"]


def test_copies_are_not_held_up_by_a_small_queue() -> None:
    disk = FakeDisk()
    Story(disk).follow((append(90, 90, 90), sync))
    journal = Journal.open(disk, run_id=RUN, segment_bytes=SEGMENT_BYTES, queued_bytes_max=150)
    with pytest.raises(JournalError):
        journal.append([])
    journal.sync()
    assert journal.append([]) == 4


def test_an_unfinished_copy_is_not_used() -> None:
    disk = FakeDisk()
    story = Story(disk)
    story.follow((append(50, 60, 70), sync))
    story.open().sync()
    name = named(2)[0]
    cut = disk.contents()[name][: segment_bytes(50, 60) + 3]
    journal = opened(FakeDisk({**disk.contents(), name: cut}))
    assert contents(journal) == story.bodies and journal.durable == 0
    assert len(journal.warnings) == 1 and name in journal.warnings[0]


def test_a_creation_that_was_cut_short_is_passed_over_and_removed() -> None:
    story = Story(FakeDisk())
    story.follow((append(50), sync))
    for header in (b"", bytes(SEGMENT_BYTES), b"NARROWSJ\1\0\0\0\2\0" + bytes(70), b"NARR"):
        disk = FakeDisk({**story.disk.contents(), named(2)[0]: header})
        journal = opened(disk)
        assert contents(journal) == story.bodies
        assert len(journal.warnings) == 1 and named(2)[0] in journal.warnings[0]
        journal.sync()
        assert names(disk) == named(1, 3)
        assert opened(disk).warnings == []


def test_a_leftover_that_cannot_be_removed_is_no_harm() -> None:
    story = Story(FakeDisk())
    story.follow((append(50), sync))
    disk = FakeDisk({**story.disk.contents(), named(2)[0]: b""})
    journal = opened(disk)
    disk.errors = {len(disk.calls) + 2: OSError(errno.EIO, "disk")}
    journal.sync()
    assert "unlink" in disk.calls and names(disk) == named(1, 2, 3)
    assert contents(opened(disk)) == story.bodies


def test_a_segment_says_that_all_before_it_were_durable() -> None:
    disk = FakeDisk()
    story = Story(disk)
    story.follow((append(300), sync, append(300), sync))
    name = named(2)[0]
    header = disk.contents()[name][:SEGMENT_HEADER_BYTES]
    journal = opened(FakeDisk({**disk.contents(), name: header}))
    assert contents(journal) == story.bodies[:1]
    assert journal.durable == 1 and journal.append([]) == 2


def test_foreign_files_are_left_alone() -> None:
    foreign = {"journal-1.log": b"x", "journal-000000001.log": b"y", "journal-00000001.log~": b"z"}
    disk = FakeDisk({**foreign, "journal-00000000.log": b"0", "lock": b""})
    story = Story(disk)
    story.follow((append(300), sync, append(300), sync))
    story.open()
    assert disk.contents().items() >= foreign.items()
    assert set(named(1, 2)) <= set(names(disk))


def test_another_run_another_format_and_another_name_are_refused() -> None:
    disk = FakeDisk()
    Story(disk).follow((append(50), sync))
    ((name, content),) = disk.contents().items()
    with pytest.raises(StateError, match=f"expected {name} of run other") as caught:
        Journal.open(disk, run_id="other", segment_bytes=SEGMENT_BYTES)
    assert caught.value.got == f"{name} of run {RUN}" and caught.value.remedy
    with pytest.raises(StateError, match="expected format 1 or 2, got format 3"):
        opened(FakeDisk({name: content[:8] + b"\3" + content[9:]}))
    with pytest.raises(StateError, match=f"got {name}"):
        opened(FakeDisk({name: content, named(7)[0]: content}))


def test_a_run_id_that_does_not_fit_is_misuse() -> None:
    longest = "n" * segments.RUN_ID_BYTES_MAX
    disk = FakeDisk()
    for _ in range(2):
        journal = Journal.open(disk, run_id=longest, segment_bytes=SEGMENT_BYTES)
        journal.append([b"x"])
        journal.sync()
    for run_id in ("", longest + "n", "a\0"):
        with pytest.raises(LocalProtocolError):
            Journal.open(FakeDisk(), run_id=run_id, segment_bytes=SEGMENT_BYTES)


# Cutting.


def long_story() -> Story:
    """Segments with one or two records each."""
    story = Story(FakeDisk())
    for _ in range(6):
        story.follow((append(150, 150), sync))
    assert names(story.disk) == named(1, 2, 3, 4, 5, 6)
    return story


@pytest.mark.parametrize("number", range(15))
def test_segments_are_cut_when_all_of_their_records_are_older(number: int) -> None:
    story = long_story()
    assert story.journal
    story.journal.cut_before(number)
    cut = max(0, min(5, (number - 1) // 2))
    assert names(story.disk) == named(*range(cut + 1, 7))
    for journal in (story.journal, opened(story.disk)):
        assert journal.first == 2 * cut + 1
        assert contents(journal) == story.bodies[2 * cut :]
        with pytest.raises(StateError, match=named(cut + 1)[0]):
            journal.records(2 * cut)


def test_cutting_removes_the_oldest_first_and_makes_it_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story, gone = long_story(), list[str]()
    unlink = story.disk.unlink

    def noted(name: str) -> None:
        gone.append(name)
        unlink(name)

    monkeypatch.setattr(story.disk, "unlink", noted)
    assert story.journal
    story.journal.cut_before(8)
    assert gone == named(1, 2, 3) and story.disk.calls[-1] == "sync_directory"


def test_records_that_were_not_copied_yet_are_not_cut() -> None:
    story = Story(FakeDisk())
    story.follow((append(150, 150), sync, append(100, 100, 100), sync))
    before = names(story.disk)
    journal = story.open()
    journal.cut_before(5)
    assert names(story.disk) == before[-1:]
    journal.sync()
    journal.cut_before(5)
    assert contents(journal) == contents(opened(story.disk)) == story.bodies[journal.first - 1 :]
    assert journal.first <= 5


def test_a_segment_that_is_gone_already_is_cut() -> None:
    story = long_story()
    assert story.journal
    story.disk.unlink(named(1)[0])
    story.journal.cut_before(5)
    assert names(story.disk) == named(3, 4, 5, 6)


def test_the_count_goes_on_when_everything_was_cut() -> None:
    story = long_story()
    opened(story.disk).cut_before(100)
    assert names(story.disk) == named(6)
    assert opened(story.disk).append([b"next"]) == 13


def test_an_unfinished_copy_does_not_take_the_place_of_the_count() -> None:
    story = Story(FakeDisk())
    story.follow((append(50, 60), sync))
    story.open().sync()
    name = named(2)[0]
    cut = story.disk.contents()[name][: segment_bytes(50)]
    disk = FakeDisk({**story.disk.contents(), name: cut})
    opened(disk).cut_before(3)
    assert opened(disk).append([b"next"]) == 3


def test_the_count_goes_on_after_a_checkpoint_that_is_newer_than_the_journal() -> None:
    story = long_story()
    journal = story.open()
    journal.continue_after(5)
    assert contents(journal) == story.bodies
    journal.continue_after(40)
    assert (journal.first, journal.durable) == (41, 40)
    assert list(journal.records(41)) == []
    assert journal.append([b"next"]) == 41
    with pytest.raises(LocalProtocolError):
        journal.continue_after(50)
    journal.sync()
    for each in (journal, opened(story.disk)):
        assert each.first == 41 and contents(each) == [b"next"]
        with pytest.raises(StateError, match="records 13 to 40 are missing"):
            each.records(12)


# Two threads.


class SlowDisk(FakeDisk):
    """Its syncs wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.go_on = Event(), Event()

    def sync(self, handle: int) -> None:
        self.waiting.set()
        assert self.go_on.wait(60)
        super().sync(handle)


def test_append_does_not_wait_for_a_sync_and_belongs_to_the_next_one() -> None:
    disk = SlowDisk()
    journal = opened(disk)
    journal.append([b"one"])
    thread = Thread(target=journal.sync)
    thread.start()
    assert disk.waiting.wait(60)
    assert journal.append([b"two"]) == 2
    assert journal.durable == 0
    disk.go_on.set()
    thread.join()
    assert journal.durable == 1
    journal.sync()
    assert contents(opened(disk)) == [b"one", b"two"]


def test_one_thread_appends_while_another_one_syncs() -> None:
    disk, count = FakeDisk(), 3000
    journal = opened(disk, 1 << 14)
    done = Event()

    def sync_on() -> None:
        while not done.is_set():
            journal.sync()

    thread = Thread(target=sync_on)
    thread.start()
    for number in range(1, count + 1):
        assert journal.append([body(number, 30)]) == number
    done.set()
    thread.join()
    journal.sync()
    assert journal.durable == count
    assert contents(opened(disk)) == [body(number, 30) for number in range(1, count + 1)]


# On a real disk.


def test_a_journal_in_a_directory(directory_fd: int, tmp_path: Path) -> None:
    files = DirectoryFiles(directory_fd)
    written = [body(number, 37 * number) for number in range(1, 30)]
    for pair in pairwise(range(0, 30, 3)):
        journal = opened(files, ROOMY_BYTES)
        for each in written[slice(*pair)]:
            journal.append([each[:9], memoryview(each)[9:]])
        journal.sync()
        journal.close()
    journal = opened(files, ROOMY_BYTES)
    assert contents(journal) == written[:27] and journal.warnings == []
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == named(*range(1, 10))
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert {path.stat().st_size for path in paths} == {ROOMY_BYTES}
    journal.cut_before(20)
    assert not paths[0].exists() and contents(journal) == written[journal.first - 1 : 27]


def test_more_parts_and_shorter_writes_than_the_kernel_takes_at_once(
    directory_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sizes = os.writev, list[int]()

    def short(fd: int, parts: Sequence[memoryview]) -> int:
        assert 0 < len(parts) <= 1024
        first = b"".join(parts)[: 1000 + len(sizes)]
        sizes.append(len(first))
        return real(fd, [first])

    monkeypatch.setattr(os, "writev", short)
    files = DirectoryFiles(directory_fd)
    journal = opened(files, ROOMY_BYTES)
    written = [body(number, number % 40) for number in range(1, 2000)]
    for each in written:
        journal.append([each])
    journal.sync()
    assert len(sizes) > 50
    assert contents(opened(files)) == written


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_not_a_regular_file_is_refused(
    kind: str, directory_fd: int, tmp_path: Path
) -> None:
    path = tmp_path / named(1)[0]
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(bytes(SEGMENT_HEADER_BYTES))
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(StateError, match=path.name):
        opened(DirectoryFiles(directory_fd))


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSPC])
def test_room_that_cannot_be_had(
    code: int, directory_fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    journal = opened(DirectoryFiles(directory_fd))
    journal.append([b"one"])
    if code == errno.ENOSPC:
        with pytest.raises(JournalError, match="No space left"):
            journal.sync()
        assert list(tmp_path.iterdir()) == []
        monkeypatch.undo()
    journal.sync()
    assert contents(opened(DirectoryFiles(directory_fd))) == [b"one"]
