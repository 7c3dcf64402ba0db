"""What all segments of a journal hold together: which records count, and which are lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.storage.disk import Files
from narrows.broker.storage.durable_files import Damaged, RecordsLost, StateError
from narrows.broker.storage.segments import Segment, scan_segment, segment_name, segment_number
from narrows.proto.errors import ErrorCode


@dataclass
class Recovered:
    """What a scan has found; the rules are those of `segments`."""

    segments: list[Segment] = field(default_factory=list[Segment])
    """Every segment that has content, oldest first."""
    counting: list[Segment] = field(default_factory=list[Segment])
    """Those of them whose records count, each up to its `last`."""
    empty: list[str] = field(default_factory=list[str])
    """Files that were never finished."""
    number: int = 0
    """The highest number of a segment."""
    first: int = 1
    """From this record on every one is there."""
    proven: int = 0
    """The newest record that was durable for certain."""
    newest: int = 0
    """The newest record; those after `proven` may not be on the disk yet."""
    faults: list[str] = field(default_factory=list[str])
    """What is lost, and where."""
    warnings: list[str] = field(default_factory=list[str])


def recover(files: Files, run_id: str) -> Recovered:
    """Scans every segment. Raises StateError STATE_DAMAGED if one cannot be read or judged."""
    found = Recovered()
    try:
        for number in sorted({segment_number(name) for name in files.names()} - {0}):
            segment = scan_segment(files, segment_name(number), run_id)
            found.number = number
            if segment:
                found.segments.append(segment)
            else:
                found.empty.append(segment_name(number))
    except (OSError, Damaged) as error:
        raise unreadable("the journal cannot be read", error) from error
    _judge(found)
    return found


def unreadable(message: str, problem: Exception) -> StateError:
    """The disk does not give the files; nobody knows yet whether they are damaged."""
    return StateError(
        ErrorCode.STATE_DAMAGED, message, got=str(problem),
        remedy="check the disk and the rights of the state directory, then start again",
    )  # fmt: skip


def lost(message: str, found: str, *, expected: str = "") -> RecordsLost:
    """Records are needed that are not there. What can be done without a backup depends on who
    needs them: the broker's start adds it."""
    return RecordsLost(
        ErrorCode.STATE_DAMAGED, message, expected=expected, got=found,
        remedy="restore the state directory from a backup",
    )  # fmt: skip


def supersede(counting: list[Segment], segment: Segment) -> None:
    """Lets a segment take the place of all records from its `first` on."""
    while counting and counting[-1].first >= segment.first:
        counting.pop()
    if counting:
        counting[-1].last = min(counting[-1].last, segment.first - 1)
    counting.append(segment)


def _judge(found: Recovered) -> None:
    segments, counting = found.segments, found.counting
    if segments and not segments[-1].first:
        # Whatever was in it, no later segment says that it is not needed.
        raise lost("the newest segment of the journal is damaged", segments[-1].damage)
    for segment in segments:
        if segment.first and segment.last >= segment.copied:
            supersede(counting, segment)
    found.proven = max((segment.proven for segment in segments), default=0)
    found.newest = max(counting[-1].last if counting else 0, found.proven)
    found.first = found.newest + 1
    for segment in reversed(counting):
        if segment.last + 1 != found.first:
            break
        found.first = segment.first
    _describe(found)


def _describe(found: Recovered) -> None:
    """Names all damage; a part of a file that is not needed is no damage."""
    segments, counting = found.segments, found.counting
    found.faults += [each.damage for each in segments if not each.first]
    following = [*(segment.first for segment in counting[1:]), found.newest + 1]
    for segment, first in zip(counting, following, strict=False):
        if segment.last + 1 < first:
            missing = f"records {segment.last + 1} to {first - 1} are missing behind {segment.name}"
            found.faults.append(segment.damage or missing)
    for name in found.empty:
        found.warnings.append(f"{name}: its creation was cut short, there is nothing in it")
    newest = segments[-1] if segments else None
    if newest and newest.last < newest.copied:
        found.warnings.append(f"{newest.name}: an unfinished copy of older records, not used")
    elif newest and newest.damage:
        found.warnings.append(f"{newest.damage}; it and what follows in this file is not used")
