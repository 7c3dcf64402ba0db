"""A disk that forgets, tears, flips or refuses: no promise is broken, nothing is invented."""

from __future__ import annotations

import errno
from collections import Counter
from random import Random

import pytest
from fake_disk import FakeDisk
from journal_cases import (
    SEGMENT_BYTES,
    Script,
    Step,
    Story,
    append,
    calls_of,
    contents,
    cut_before,
    opened,
    persistent,
    reopen,
    sync,
    three_segments,
)
from xxhash import xxh3_64_intdigest

from narrows.broker.storage import segments, window
from narrows.broker.storage.durable_files import StateError
from narrows.broker.storage.segments import RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES
from narrows.proto.errors import ErrorCode

LIFE: tuple[Step, ...] = (
    append(20, 5), sync, append(60), sync, append(200, 90, 3), sync, cut_before(3),
    append(600), sync, append(1), append(0, 30), sync, cut_before(6), append(40), sync,
)  # fmt: skip
SCRIPT: Script = (
    *LIFE,
    reopen,
    append(33, 10),
    sync,
    reopen,
    append(300, 250),
    sync,
    cut_before(9),
)
SECOND: Script = (append(25, 300), sync, append(70), sync)
"""Script for the journal that has survived the first crash."""

MAGIC, MARKER = b"NARROWSJ", bytes.fromhex("9d524543")
EIO, ENOSPC = errno.EIO, errno.ENOSPC


def crashed(script: Script, at: int, preallocates: bool = True) -> Story:
    """The story of a script during whose call `at` the power goes."""
    story = Story(FakeDisk())
    story.disk.preallocates = preallocates
    story.disk.crash_at = at
    assert story.crashes(script)
    return story


@pytest.mark.parametrize("preallocates", [True, False])
def test_a_crash_at_any_call_leaves_every_promise(preallocates: bool) -> None:
    random, checked = Random(1), 0
    for at in range(1, calls_of(SCRIPT, lambda: Story(FakeDisk())) + 1):
        story = crashed(SCRIPT, at, preallocates)
        for files in story.disk.survivors(random, 100):
            survivor = story.on(FakeDisk(files))
            survivor.follow((reopen, *SECOND, reopen))
            checked += 1
    assert checked > 3000


def test_a_second_crash_at_any_call_after_a_first_one_does_so_too() -> None:
    random, checked = Random(2), 0
    for at in range(1, calls_of(SCRIPT, lambda: Story(FakeDisk())) + 1, 2):
        story = crashed(SCRIPT, at)
        for files in story.disk.survivors(random, 2):
            for again in range(1, 100):
                second = story.on(FakeDisk(files))
                second.disk.crash_at = again
                if not second.crashes((reopen, *SECOND)):
                    break
                for left in second.disk.survivors(random, 6):
                    second.on(FakeDisk(left)).follow((reopen, append(8), sync, reopen))
                    checked += 1
    assert checked > 3000


def test_the_survivors_of_a_crash_differ() -> None:
    # The tests above would prove nothing if every disk had kept everything.
    kept: Counter[int] = Counter()
    story = Story(FakeDisk())
    story.follow((append(20, 5), sync, append(60, 50)))
    story.disk.crash_at = len(story.disk.calls) + 2
    assert story.crashes([sync])
    for files in story.disk.survivors(Random(3), 1000):
        kept[len(contents(opened(FakeDisk(files))))] += 1
    assert set(kept) == {2, 3, 4} and kept.total() > 200


# Errors.


@pytest.mark.parametrize("code", [EIO, ENOSPC])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_the_disk_may_fail_at_any_call(code: int, length: int) -> None:
    script = [persistent(step) for step in SCRIPT]
    calls = calls_of(SCRIPT, lambda: Story(FakeDisk()))
    refused = 0
    for at in range(1, calls + 1):
        story = Story(FakeDisk())
        story.disk.errors = {each: OSError(code, "disk") for each in range(at, at + length)}
        for step in script:
            for _ in range(20):
                try:
                    step(story)
                    break
                except StateError as error:  # Nothing was written; the start fails.
                    assert error.code == ErrorCode.STATE_DAMAGED and error.remedy
                    refused += 1
        assert story.promised == len(story.bodies)
        everything = [*story.bodies]
        story.open()
        assert story.bodies == everything
    assert 0 < refused < calls * length


def test_a_failing_disk_and_then_a_crash_or_a_restart_break_no_promise() -> None:
    # After a failed sync, what a process reads back is not what is on the disk.
    random, checked = Random(4), 0
    script = (append(20, 5), sync, append(60), sync, append(40, 200), sync, append(9), sync)
    calls = calls_of(script, lambda: Story(FakeDisk()))
    for at in range(1, calls + 1):
        for crash_at in range(at + 1, calls + 20):
            for restart in (False, True):
                story = Story(FakeDisk())
                story.disk.errors = {at: OSError(EIO, "disk")}
                story.disk.crash_at = crash_at
                if not story.crashes([after_failure(step, restart) for step in script]):
                    continue
                for files in story.disk.survivors(random, 20):
                    story.on(FakeDisk(files)).follow((reopen, append(8), sync, reopen))
                    checked += 1
    assert checked > 5000


def after_failure(step: Step, restart: bool) -> Step:
    """The step, and after it has failed once more, by the same process or by another one."""

    def work(story: Story) -> None:
        try:
            persistent(step)(story) if not restart else step(story)
        except Exception as error:
            assert getattr(error, "code", None) in {
                ErrorCode.JOURNAL_FAILED, ErrorCode.STATE_DAMAGED
            }  # fmt: skip
            story.open()
            story.sync()

    return work


def test_a_disk_that_stays_full_is_not_filled_with_attempts() -> None:
    for preallocates in (True, False):
        story = Story(FakeDisk())
        story.disk.preallocates = preallocates
        story.follow((append(20), sync, append(900, 900)))
        before = set(story.disk.contents())
        for call in range(len(story.disk.calls) + 1, len(story.disk.calls) + 400):
            if call % 6 == 5:
                story.disk.errors[call] = OSError(ENOSPC, "full")
        with pytest.raises(AssertionError, match="no end"):
            persistent(sync)(story)
        assert len(set(story.disk.contents()) - before) <= 1
        story.disk.errors = {}
        story.sync()
        story.open()
        assert len(story.bodies) == 3


# Damage.


def outcome(files: dict[str, bytes], bodies: list[bytes]) -> str:
    """The broker's reaction to a damaged journal. Fails if the broker believes something false."""
    try:
        journal = opened(FakeDisk(files))
        found = contents(journal, 1)
    except StateError as error:
        assert error.code == ErrorCode.STATE_DAMAGED and error.remedy
        assert "journal-0000000" in str(error)
        return "detected"
    assert found == bodies[: len(found)], "silent corruption"
    if len(found) == len(bodies):
        return "harmless"
    return "last records gone, said" if journal.warnings else "last records gone"


@pytest.mark.parametrize("block_bytes", [1 << 20, 128])
def test_every_flipped_bit(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "BLOCK_BYTES", block_bytes)
    files, bodies = three_segments()
    counts: Counter[str] = Counter()
    for name, content in files.items():
        for bit in range(8 * len(content)) if block_bytes > 128 else range(0, 8 * len(content), 7):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            result = outcome({**files, name: bytes(flipped)}, bodies)
            counts[result] += 1
            # Only the newest batch can go: whatever is before it, it proves.
            used = content.rstrip(b"\0")
            assert result != "harmless" or bit // 8 >= len(used), (name, bit)
            assert not result.startswith("last") or name == max(files), (name, bit)
    print(f"flipped bits: {dict(counts)}")
    assert set(counts) == {"detected", "harmless", "last records gone, said"}


def test_every_truncation() -> None:
    files, bodies = three_segments()
    counts: Counter[str] = Counter()
    for name, content in files.items():
        for length in range(len(content)):
            result = outcome({**files, name: content[:length]}, bodies)
            counts[result] += 1
            used = len(content.rstrip(b"\0"))
            assert (result == "harmless") == (length >= used), (name, length)
            assert name == max(files) or not result.startswith("last"), (name, length)
    print(f"truncations: {dict(counts)}")
    assert set(counts) == {
        "detected", "harmless", "last records gone", "last records gone, said"
    }  # fmt: skip


def test_every_missing_segment() -> None:
    files, bodies = three_segments()
    results = [
        outcome({each: files[each] for each in files if each != name}, bodies) for name in files
    ]
    assert results[1:] == ["detected", "last records gone"]
    assert results[0] == "detected"


def test_every_overwritten_stretch_is_detected_or_at_the_end() -> None:
    files, bodies = three_segments()
    random = Random(5)
    for _ in range(2000):
        name = random.choice(list(files))
        content = bytearray(files[name])
        start = random.randrange(len(content))
        length = random.randrange(1, 200)
        fill = random.choice((bytes(length), random.randbytes(length), content[:length]))
        content[start : start + length] = fill[: len(content) - start]
        assert outcome({**files, name: bytes(content)}, bodies)


def test_a_record_in_the_place_of_another_one_is_damage() -> None:
    story = Story(FakeDisk())
    for _ in range(4):
        story.follow((append(40), sync))
    ((name, content),) = story.disk.contents().items()
    size = RECORD_HEADER_BYTES + 40
    records = [content[SEGMENT_HEADER_BYTES + at * size :][:size] for at in range(4)]
    for place, moved in ((0, 1), (1, 0), (1, 3), (2, 1)):
        changed = [*records[:place], records[moved], *records[place + 1 :]]
        damaged = content[:SEGMENT_HEADER_BYTES] + b"".join(changed)
        assert outcome({name: damaged}, story.bodies) == "detected"


@pytest.mark.parametrize("size_bytes", range(128))
def test_a_trace_is_found_wherever_a_block_ends(
    size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "BLOCK_BYTES", 128)
    story = Story(FakeDisk())
    story.follow((append(size_bytes), sync, append(11), sync))
    ((name, content),) = story.disk.contents().items()
    damaged = bytearray(content)
    damaged[SEGMENT_HEADER_BYTES] ^= 1
    assert outcome({name: bytes(damaged)}, story.bodies) == "detected"


@pytest.mark.parametrize("place", [SEGMENT_HEADER_BYTES + 5, SEGMENT_HEADER_BYTES + 50])
def test_what_changes_after_open_is_not_believed(place: int) -> None:
    disk = FakeDisk()
    story = Story(disk)
    story.follow((append(20, 20), sync))
    journal = story.open()
    ((name, content),) = disk.contents().items()
    damaged = bytearray(content)
    damaged[place] ^= 1
    disk.unlink(name)
    disk.write(disk.create(name, 0), [bytes(damaged)])
    with pytest.raises(StateError, match=f"{name}: record 1 does not verify any more"):
        contents(journal)
    disk.errors = {len(disk.calls) + 2: OSError(EIO, "broken")}
    with pytest.raises(StateError, match="broken"):
        contents(journal)


def test_any_garbage_is_survived() -> None:
    files, _ = three_segments()
    random = Random(6)
    pieces = [*files.values(), MARKER, MAGIC, bytes(50)]
    for _ in range(1500):
        size = random.randrange(0, 3 * SEGMENT_BYTES)
        content = random.randbytes(random.randrange(50))
        while len(content) < size:
            piece = random.choice(pieces)
            start = random.randrange(len(piece))
            content += piece[start : start + random.randrange(len(piece))]
        name = f"journal-{random.randrange(1, 5):08d}.log"
        try:
            journal = opened(FakeDisk({**files, name: content}))
            list(journal.records(journal.first))
            journal.append([b"more"])
            journal.sync()
        except StateError as error:
            assert error.code == ErrorCode.STATE_DAMAGED


def test_a_length_beyond_the_file_allocates_nothing() -> None:
    files, bodies = three_segments()
    name = max(files)
    used = files[name].rstrip(b"\0")
    salt = int.from_bytes(used[36:44], "little")
    segment = segments.Segment(name, 1, 0, salt, 0)
    header = segments.record_header(segment, len(bodies) + 1, len(bodies), [memoryview(b"x")])
    prefix = header[:4] + (1 << 62).to_bytes(8, "little") + header[12:36]
    digest = xxh3_64_intdigest(prefix, salt).to_bytes(8, "little")
    journal = opened(FakeDisk({**files, name: used + prefix + digest + b"x"}))
    assert contents(journal) == bodies and journal.durable == len(bodies)
    assert "does not verify" in journal.warnings[0]


def test_what_looks_like_records_inside_of_a_torn_body_proves_nothing() -> None:
    longer, _ = three_segments()
    story = Story(FakeDisk())
    story.follow((append(20), sync, append(30), sync))
    journal = story.open()
    journal.append([*longer.values()])
    journal.sync()
    files = story.disk.contents()
    name = max(files)
    torn = files[name][:-100]
    assert torn.count(MARKER) > 10
    journal = opened(FakeDisk({**files, name: torn}))
    assert contents(journal) == story.bodies and name in journal.warnings[0]


# What can be said about damage, and done.


def test_damage_names_the_file_the_byte_and_the_remedy_and_is_no_matter_behind_it() -> None:
    files, bodies = three_segments()
    name = sorted(files)[1]
    damaged = bytearray(files[name])
    damaged[100 + 50] ^= 1
    journal = opened(FakeDisk({**files, name: bytes(damaged)}))
    assert journal.warnings == []
    with pytest.raises(StateError) as caught:
        journal.records(1)
    assert f"{name}: byte {SEGMENT_HEADER_BYTES}" in caught.value.got
    # What else can be done depends on who asks; only the broker's start knows what it would cost.
    assert caught.value.remedy == "restore the state directory from a backup"
    assert journal.first > 5
    with pytest.raises(StateError):
        journal.records(journal.first - 1)
    assert contents(journal) == bodies[journal.first - 1 :]


def test_writing_goes_on_behind_a_damaged_end() -> None:
    files, bodies = three_segments()
    name = max(files)
    damaged = bytearray(files[name])
    damaged[SEGMENT_HEADER_BYTES] ^= 1
    disk = FakeDisk({**files, name: bytes(damaged)})
    journal = opened(disk)
    # The newest batch says that all before it were durable; of itself nobody knows.
    assert journal.durable == len(bodies) - 2
    assert journal.first == len(bodies) - 1 and contents(journal) == []
    journal.continue_after(len(bodies))
    assert journal.append([b"new"]) == len(bodies) + 1
    journal.sync()
    for each in (journal, opened(disk)):
        assert each.first == len(bodies) + 1 and contents(each) == [b"new"]
        with pytest.raises(StateError, match=name):
            each.records(len(bodies) - 2)


def test_a_damaged_header_of_the_newest_segment_is_refused_at_once() -> None:
    files, _ = three_segments()
    name = max(files)
    damaged = bytearray(files[name])
    damaged[20] ^= 1
    with pytest.raises(StateError, match=f"{name}: byte 0"):
        opened(FakeDisk({**files, name: bytes(damaged)}))
