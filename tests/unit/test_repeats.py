"""Lines that peers cause: few of a kind pass, the others are counted, and no flood fills a disk."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field

import pytest

from narrows.broker.process.notes import Notes
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.repeats import (
    BYTES,
    BYTES_PER_S,
    KINDS_MAX,
    LINE_EVERY_S,
    LINES,
    Repeats,
    with_count,
)


def test_few_lines_of_a_kind_pass_and_the_next_one_counts_the_others() -> None:
    repeats = Repeats()
    first = [repeats.let_pass("left a", 50, 1.0) for _ in range(100)]
    assert first == [0] * LINES + [None] * (100 - LINES)
    assert repeats.let_pass("left b", 50, 1.0) == 0
    assert repeats.let_pass("left a", 50, 1.0 + LINE_EVERY_S) == 100 - LINES
    assert repeats.let_pass("left a", 50, 1.0 + LINE_EVERY_S) is None
    assert repeats.suppressed == 100 - LINES + 1


@pytest.mark.parametrize("kinds", [1, 50, 100_000])
def test_a_flood_does_not_exceed_its_bytes(kinds: int) -> None:
    repeats, size_bytes, seconds = Repeats(), 200, 60
    passed = sum(
        repeats.let_pass(f"refused {number % kinds}", size_bytes, number / 1000) is not None
        for number in range(seconds * 1000)
    )
    assert 0 < passed * size_bytes <= BYTES + BYTES_PER_S * seconds
    # Log and journal together, with one flood in each.
    assert 2 * (BYTES + BYTES_PER_S * seconds) / seconds < 10_000


def test_no_more_kinds_are_remembered_than_there_may_be_peers() -> None:
    repeats = Repeats()
    for number in range(2 * KINDS_MAX):
        repeats.let_pass(f"left {number}", 1, float(number))
    kept = next(value for value in vars(repeats).values() if isinstance(value, Sized))
    assert len(kept) == KINDS_MAX


def test_the_count_stands_in_the_line() -> None:
    assert with_count("left", 0) == "left"
    assert with_count("left", 7) == "left (and 7 more like it before)"


@dataclass
class Journal:
    """Takes the fates that would be written."""

    fates: list[ev.LogFate] = field(default_factory=list[ev.LogFate])

    def note(self, fate: ev.LogFate) -> None:
        self.fates.append(fate)


def test_the_journal_keeps_few_fates_of_a_kind_and_each_forgotten_name() -> None:
    journal = Journal()
    notes = Notes(None, journal)
    for push_id in range(100):
        notes.fate(ev.LogFate("refused", "a", "1", 0, push_id, "stale_base"))
        notes.fate(ev.LogFate("forgotten", "a", str(push_id)))
    kinds = [fate.what for fate in journal.fates]
    assert kinds.count("forgotten") == 100
    assert kinds.count("refused") == LINES


def test_the_log_has_few_lines_of_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes(None)
    for _ in range(100):
        notes.note(ev.Note("warning", "10.0.0.1 refused", about="bad_name 10.0.0.1"))
        notes.note(ev.Note("warning", "the disk is slow"))
    lines = [record.message for record in caplog.records]
    assert lines.count("10.0.0.1 refused") == LINES
    assert lines.count("the disk is slow") == 100
