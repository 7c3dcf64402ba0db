"""A sealed journal: nothing is altered unnoticed without the key, and a crash is no alteration."""

from __future__ import annotations

from random import Random

import pytest
from fake_disk import FakeDisk
from journal_cases import (
    Script,
    SealedStory,
    append,
    calls_of,
    contents,
    cut_before,
    opened,
    reopen,
    sync,
    three_segments,
)
from seal_cases import digested, places

from narrows.broker.storage import window
from narrows.broker.storage.chain import Chain
from narrows.broker.storage.durable_files import StateError
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.seal import SealKey
from narrows.broker.storage.segments import (
    SEALED_SEGMENT_HEADER_BYTES,
)

KEY = SealKey(b"k" * 32)
CHAIN = Chain(KEY)
WHOLE = Chain(KEY, needed_from=1)
"""All records are needed."""
SCRIPT: Script = (
    append(20, 5), sync, append(60), sync, append(200, 90, 3), sync, cut_before(3),
    append(600), sync, append(1), reopen, append(33, 10), sync, reopen, append(300, 250), sync,
    cut_before(9),
)  # fmt: skip
SECOND: Script = (append(25, 300), sync, append(70), sync)


def refused(files: dict[str, bytes], chain: Chain = WHOLE) -> str:
    """The words in which a journal is refused; "": it is not."""
    try:
        journal = opened(FakeDisk(files), chain=chain)
        contents(journal)
    except StateError as error:
        assert error.remedy
        return str(error)
    return ""


def sealed() -> tuple[dict[str, bytes], list[bytes]]:
    files, bodies = three_segments(SealedStory)
    assert all(digested(content) == content for content in files.values())
    return files, bodies


# A crash is no alteration.


def test_a_crash_at_any_call_leaves_every_promise_and_is_no_alteration() -> None:
    random, checked = Random(1), 0
    for at in range(1, calls_of(SCRIPT, lambda: SealedStory(FakeDisk())) + 1):
        story = SealedStory(FakeDisk())
        story.disk.crash_at = at
        assert story.crashes(SCRIPT)
        for files in story.disk.survivors(random, 60):
            survivor = story.on(FakeDisk(files))
            survivor.follow((reopen, *SECOND, reopen))
            checked += 1
    assert checked > 1500


def test_a_second_crash_after_a_first_one_is_none_either() -> None:
    random, checked = Random(2), 0
    for at in range(1, calls_of(SCRIPT, lambda: SealedStory(FakeDisk())) + 1, 3):
        story = SealedStory(FakeDisk())
        story.disk.crash_at = at
        assert story.crashes(SCRIPT)
        for files in story.disk.survivors(random, 2):
            for again in range(1, 100):
                second = story.on(FakeDisk(files))
                second.disk.crash_at = again
                if not second.crashes((reopen, *SECOND)):
                    break
                for left in second.disk.survivors(random, 4):
                    second.on(FakeDisk(left)).follow((reopen, append(8), sync, reopen))
                    checked += 1
    assert checked > 1000


@pytest.mark.parametrize("lost", range(1, 60, 7))
def test_a_torn_last_record_is_recovered_without_a_word_of_alteration(lost: int) -> None:
    files, bodies = sealed()
    name = max(files)
    used = files[name].rstrip(b"\0")
    torn = used[:-lost].ljust(len(files[name]), b"\0")
    journal = opened(FakeDisk({**files, name: torn}), chain=CHAIN)
    found = contents(journal)
    assert found == bodies[: len(found)] and len(found) >= len(bodies) - 2
    assert "does not verify" in journal.warnings[0] and "seal" not in journal.warnings[0]


# What is altered is named.


def test_every_flipped_byte_is_named_although_the_digests_are_right() -> None:
    files, bodies = sealed()
    newest = max(files)
    for name, content in files.items():
        used = len(content.rstrip(b"\0"))
        for at in range(used):
            flipped = bytearray(content)
            flipped[at] ^= 1 << at % 8
            altered = {**files, name: digested(bytes(flipped))}
            if altered[name] == content:
                continue  # The byte was one of a digest.
            told = refused(altered)
            if told:
                assert name in told or at < SEALED_SEGMENT_HEADER_BYTES, (name, at, told)
                continue
            # The end of the newest segment: it was cut, and what is left is a prefix, and said.
            journal = opened(FakeDisk(altered), chain=WHOLE)
            assert name == newest and len(contents(journal)) < len(bodies), (name, at)
            assert name in journal.warnings[0] and "does not verify" in journal.warnings[0]


@pytest.mark.parametrize("region", ["number", "durable", "seal", "mark", "payload"])
def test_a_record_that_is_altered_is_named_by_its_number(region: str) -> None:
    files, _ = sealed()
    name = sorted(files)[1]
    for at, body, end, number in places(files[name]):
        where = {"number": at + 12, "durable": at + 20, "seal": at + 40, "mark": at + 70}
        place = where.get(region, (body + end) // 2)
        if place >= end:
            continue
        flipped = bytearray(files[name])
        flipped[place] ^= 1
        told = refused({**files, name: digested(bytes(flipped))})
        assert name in told and f"record {number} " in told, told


def test_records_are_not_removed_inserted_or_swapped() -> None:
    story = SealedStory(FakeDisk(), 4096)
    for _ in range(5):
        story.follow((append(40), sync))
    ((name, content),) = story.disk.contents().items()
    records = [content[at:end] for at, _, end, _ in places(content)]
    head, size = content[:SEALED_SEGMENT_HEADER_BYTES], len(content)
    changes = {
        "removed": [0, 1, 3, 4], "swapped": [0, 2, 1, 3, 4], "twice": [0, 1, 1, 2, 3, 4],
        "first removed": [1, 2, 3, 4],
    }  # fmt: skip
    for what, order in changes.items():
        target = bytearray(head)
        for number, index in enumerate(order, 1):
            record = bytearray(records[index])
            record[12:20] = number.to_bytes(8, "little")
            record[20:28] = (number - 1).to_bytes(8, "little")
            target += record
        told = refused({name: digested(bytes(target).ljust(size, b"\0"))})
        assert name in told and "does not match its seal" in told, what


def test_a_segment_that_is_removed_or_comes_from_an_older_copy_is_named() -> None:
    files, _ = sealed()
    first, middle, last = sorted(files)
    told = refused({first: files[first], last: files[last]})
    assert first in told and "behind it are missing" in told
    # The same run goes another way from the first segment on.
    disk = FakeDisk({first: files[first]})
    other = opened(disk, 1024, CHAIN)
    for size in (9, 300, 300, 300, 200):
        other.append([b"x" * size])
        other.sync()
    copies = disk.contents()
    assert middle in copies
    told = refused({**files, middle: copies[middle]})
    assert told and (middle in told or last in told)
    # Another run with the same key.
    disk = FakeDisk()
    foreign = Journal.open(disk, run_id="another", segment_bytes=1024, chain=CHAIN)
    foreign.append([b"body"])
    foreign.sync()
    ((name, content),) = disk.contents().items()
    target = bytearray(content)
    target[44:88] = files[first][44:88]
    assert name in refused({name: digested(bytes(target))})


def test_a_journal_that_ends_before_its_checkpoint_is_named() -> None:
    files, bodies = sealed()
    journal = opened(FakeDisk(files), chain=CHAIN)
    journal.sync()
    anchored = Chain(KEY, anchors={len(bodies): journal.sealer.seal})
    assert refused(files, anchored) == ""
    assert f"record {len(bodies)} of the journal is missing" in refused(
        {name: files[name] for name in sorted(files)[:-1]}, anchored
    )
    other = Chain(KEY, anchors={len(bodies) - 1: b"s" * 32})
    assert "another one than a checkpoint follows" in refused(files, other)


def test_another_key_and_no_seal_at_all_are_refused() -> None:
    files, _ = sealed()
    assert "does not match its seal" in refused(files, Chain(SealKey(b"j" * 32)))
    unsealed, bodies = three_segments()
    assert "it is not sealed" in refused(unsealed)
    # Whoever reads needs no key.
    sealed_files, sealed_bodies = sealed()
    assert contents(opened(FakeDisk(sealed_files))) == sealed_bodies
    adopted = {name: KEY.seal("file", [content]).hex() for name, content in unsealed.items()}
    chain = Chain(KEY, adopted)
    assert refused(unsealed, chain) == ""
    name = min(unsealed)
    flipped = bytearray(unsealed[name])
    flipped[-1] ^= 1
    assert name in refused({**unsealed, name: bytes(flipped)}, chain)
    # It goes on sealed, behind what was not.
    disk = FakeDisk(unsealed)
    journal = opened(disk, chain=chain)
    assert journal.has_unsealed
    journal.append([b"sealed"])
    journal.sync()
    again = opened(disk, chain=chain)
    assert contents(again) == [*bodies, b"sealed"]


def test_seals_are_kept_for_those_who_ask_and_for_nobody_else() -> None:
    disk = FakeDisk()
    journal = opened(disk, 4096, CHAIN)
    for number in range(1, 6):
        assert journal.append([b"body"], keep_seal=number in (2, 4)) == number
    journal.sync()
    fourth = journal.sealer.take(4)
    assert any(fourth) and journal.sealer.take(2) == bytes(32) == journal.sealer.take(4)
    assert fourth != journal.sealer.seal
    reopened = opened(disk, 4096, Chain(KEY, anchors={4: fourth}))
    assert contents(reopened) == [b"body"] * 5
    unsealed = opened(FakeDisk())
    unsealed.append([b"body"], keep_seal=True)
    unsealed.sync()
    assert unsealed.sealer.take(1) == bytes(32)


def test_a_journal_that_was_moved_away_goes_on_from_the_checkpoint() -> None:
    chain = Chain(KEY, anchors={7: b"s" * 32})
    disk = FakeDisk()
    journal = opened(disk, 4096, chain)
    journal.continue_after(7)
    assert journal.append([b"body"]) == 8
    journal.sync()
    assert contents(opened(disk, 4096, chain)) == [b"body"]
    assert "does not follow" in refused(
        disk.contents(), Chain(KEY, anchors={7: b"t" * 32})
    ) or "another one" in refused(disk.contents(), Chain(KEY, anchors={7: b"t" * 32}))


def test_a_gap_that_the_writer_left_is_none_that_somebody_made() -> None:
    disk = FakeDisk()
    journal = opened(disk, 4096, CHAIN)
    journal.append([b"one"])
    journal.sync()
    journal = opened(disk, 4096, CHAIN)
    journal.continue_after(5)
    assert journal.append([b"six"]) == 6
    journal.sync()
    assert contents(opened(disk, 4096, CHAIN), 6) == [b"six"]


@pytest.mark.parametrize("size_bytes", [255, 256, 257, 1000, 1024])
def test_a_record_that_is_read_in_several_pieces_keeps_its_seal(
    size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "BLOCK_BYTES", 256)
    disk = FakeDisk()
    journal = opened(disk, 4096, CHAIN)
    bodies = [bytes(range(250)) * (size_bytes // 250), b"x" * size_bytes]
    for each in bodies:
        journal.append([each[:100], each[100:]])
    journal.sync()
    assert contents(opened(disk, 4096, CHAIN)) == bodies
