"""The scan of a whole journal: which records count, and which are lost.

`segments` has the rules. This file applies them to all segments together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.storage.chain import Chain
from narrows.broker.storage.disk import Files
from narrows.broker.storage.durable_files import Damaged, RecordsLost, StateError
from narrows.broker.storage.names import segment_name, segment_number
from narrows.broker.storage.segments import (
    Segment,
    scan_segment,
)
from narrows.proto.errors import ErrorCode


@dataclass
class JournalScan:
    """The result of a scan, by the rules of `segments`."""

    segments: list[Segment] = field(default_factory=list[Segment])
    """Every segment that has content, oldest first."""
    counting: list[Segment] = field(default_factory=list[Segment])
    """The segments whose records count, each up to its `last`; oldest first."""
    empty: list[str] = field(default_factory=list[str])
    """Names of files that were never finished."""
    number: int = 0
    """The highest number of a segment."""
    first: int = 1
    """The record from which on every one is there."""
    proven: int = 0
    """The newest record that was durable for certain."""
    newest: int = 0
    """The newest record; those after `proven` may not be on the disk yet."""
    faults: list[str] = field(default_factory=list[str])
    """Sentences that say which records are lost, and where."""
    warnings: list[str] = field(default_factory=list[str])


def scan_journal(files: Files, run_id: str, chain: Chain | None = None) -> JournalScan:
    """Scans every segment. Raises StateError STATE_DAMAGED if one cannot be read or judged, or if
    it does not fit the chain of seals."""
    scan = JournalScan()
    try:
        for number in sorted({segment_number(name) for name in files.names()} - {0}):
            name = segment_name(number)
            segment = (
                chain.scan(files, name, run_id) if chain else scan_segment(files, name, run_id)
            )
            scan.number = number
            if segment:
                scan.segments.append(segment)
            else:
                scan.empty.append(name)
        _judge(scan)
        if chain:
            chain.check(files, scan.counting, scan.proven)
    except (OSError, Damaged) as error:
        raise unreadable("the journal cannot be read", error) from error
    return scan


def unreadable(message: str, problem: Exception) -> StateError:
    """The error for files that the disk does not give: they may be whole all the same."""
    return StateError(
        ErrorCode.STATE_DAMAGED, message, got=str(problem),
        remedy="check the disk and the rights of the state directory, then start again",
    )  # fmt: skip


def lost(message: str, got: str, *, expected: str = "") -> RecordsLost:
    """The error for records that are needed and missing.

    The remedy without a backup depends on the purpose, so the start of the broker adds it.
    """
    return RecordsLost(
        ErrorCode.STATE_DAMAGED, message, expected=expected, got=got,
        remedy="restore the state directory from a backup",
    )  # fmt: skip


def supersede(counting: list[Segment], segment: Segment) -> None:
    """Lets a segment replace all records from its `first` on."""
    assert segment.first >= 1, f"{segment.name}: its header is damaged"
    while counting and counting[-1].first >= segment.first:
        counting.pop()
    if counting:
        counting[-1].last = min(counting[-1].last, segment.first - 1)
    counting.append(segment)


def _judge(scan: JournalScan) -> None:
    segments, counting = scan.segments, scan.counting
    if segments and not segments[-1].first:
        # A later segment could say that its records are not needed; there is none.
        raise lost("the newest segment of the journal is damaged", segments[-1].damage)
    for segment in segments:
        if segment.first and segment.last >= segment.copied:
            supersede(counting, segment)
    # A header says which records were durable when it was written, even one that does not count.
    scan.proven = max((segment.proven for segment in segments), default=0)
    scan.newest = max(counting[-1].last if counting else 0, scan.proven)
    scan.first = scan.newest + 1
    for segment in reversed(counting):
        if segment.last + 1 != scan.first:
            break
        scan.first = segment.first
    _describe(scan)


def _describe(scan: JournalScan) -> None:
    """Adds the sentences about damage. Damage in records that are not needed is none."""
    segments, counting = scan.segments, scan.counting
    scan.faults += [each.damage for each in segments if not each.first]
    following = [*(segment.first for segment in counting[1:]), scan.newest + 1]
    for segment, first in zip(counting, following, strict=False):
        if segment.last + 1 < first:
            missing = f"records {segment.last + 1} to {first - 1} are missing behind {segment.name}"
            scan.faults.append(segment.damage or missing)
    for name in scan.empty:
        scan.warnings.append(f"{name}: its creation was cut short, there is nothing in it")
    newest = segments[-1] if segments else None
    if newest and newest.last < newest.copied:
        scan.warnings.append(f"{newest.name}: an unfinished copy of older records, not used")
    elif newest and newest.damage:
        scan.warnings.append(f"{newest.damage}; it and what follows in this file is not used")
