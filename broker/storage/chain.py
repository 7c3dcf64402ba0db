"""The chain of seals through the segments of a journal: which record follows which.

`segments` compares the seals within one file. This file compares the ends of the files with each
other, and the whole with the checkpoints: a segment that was removed, swapped, or put back from an
older copy has another record before it than its own header says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from narrows.broker.storage.disk import Files
from narrows.broker.storage.seal import NO_SEAL, SealKey, altered
from narrows.broker.storage.segments import Segment, scan_segment, seal_of
from narrows.broker.storage.window import FileWindow


@dataclass(frozen=True)
class Chain:
    """The key of a sealed journal, and what is known of the journal from outside of it."""

    key: SealKey
    adopted: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Seals (hex) of whole files that were written before the journal was sealed, by name."""
    anchors: Mapping[int, bytes] = field(default_factory=lambda: MappingProxyType({}))
    """Seals of records as the checkpoints have them, by number."""
    needed_from: int | None = None
    """The first record that some checkpoint needs; None: none is needed. Older ones may be missing
    one by one, because a power cut may undo a part of a cut."""

    def scan(self, files: Files, name: str, run_id: str) -> Segment | None:
        """`scan_segment`, with every seal compared. Raises StateError, OSError, Damaged."""
        if name not in self.adopted:
            segment = scan_segment(files, name, run_id, self.key)
            if segment is not None and not segment.first:
                raise altered(name, "its header does not verify")
            return segment
        window = FileWindow(files, name)
        if self.key.seal("file", window.pieces(0, window.size_bytes)).hex() != self.adopted[name]:
            raise altered(name, "does not match the seal that it got when the directory was sealed")
        segment = scan_segment(files, name, run_id)
        if segment is not None and segment.first:
            segment.is_adopted = True
        return segment

    def check(self, files: Files, counting: Sequence[Segment], proven: int) -> None:
        """Raises StateError unless the segments that count follow each other without a break."""
        before: Segment | None = None
        for segment in counting:
            if before is not None and not segment.is_adopted:
                self._check_link(files, before, segment)
            before = segment
        if before is None:
            return
        if before.last < proven:
            lost = f"record {before.last + 1} and later ones are missing or do not verify"
            raise altered(before.name, before.damage.partition(": ")[2] or lost)
        for number, seal in self.anchors.items():
            self._check_anchor(files, counting, number, seal)

    def _check_link(self, files: Files, before: Segment, segment: Segment) -> None:
        expected = NO_SEAL if before.is_adopted else seal_of(files, before, before.last)
        if segment.before == expected:
            return  # Numbers may be missing all the same: those that the disk never took.
        if before.last + 1 < segment.first:
            if self.needed_from is None or self.needed_from >= segment.first:
                return
            missing = f"records {before.last + 1} to {segment.first - 1} behind it are missing"
            raise altered(before.name, before.damage.partition(": ")[2] or missing)
        raise altered(
            segment.name,
            f"its first record does not follow record {before.last} of {before.name}",
            expected=f"the seal {expected.hex()[:16]} before it",
            got=segment.before.hex()[:16],
        )

    def _check_anchor(
        self, files: Files, counting: Sequence[Segment], number: int, seal: bytes
    ) -> None:
        if number < counting[0].first - 1:
            return  # The journal was cut back behind it.
        last, place = counting[-1], f"record {number} of the journal"
        found = seal_in(files, counting, number)
        if found is None:
            raise altered(
                last.name, f"{place} is missing: a checkpoint holds it, and it was durable",
                got=f"record {last.last} as the last one",
            )  # fmt: skip
        if found not in (seal, NO_SEAL):
            raise altered(
                last.name, f"{place} is another one than a checkpoint follows",
                expected=f"seal {seal.hex()[:16]}", got=found.hex()[:16],
            )  # fmt: skip


class Sealer:
    """The end of a chain while records are added; without a chain all seals are NO_SEAL."""

    def __init__(self, chain: Chain | None) -> None:
        self.key = chain.key if chain else None
        self.seal = NO_SEAL
        """The seal of the newest durable record."""
        self.anchors: Mapping[int, bytes] = chain.anchors if chain else {}
        """Seals of records as the checkpoints have them, by number."""
        self._kept: dict[int, bytes] = {}

    def next(self, before: bytes, number: int, body: Sequence[memoryview], *, keep: bool) -> bytes:
        """The seal of a record behind `before`; `keep`: until somebody takes it."""
        seal = self.key.record(before, number, body) if self.key else NO_SEAL
        if self.key and keep:
            self._kept[number] = seal
        return seal

    def take(self, number: int) -> bytes:
        """The seal of a record, once; those of older records are forgotten."""
        for each in [each for each in self._kept if each < number]:
            del self._kept[each]
        return self._kept.pop(number, NO_SEAL)

    def resume(self, files: Files, counting: Sequence[Segment], number: int) -> None:
        """Goes on from a record in the files; without files, from the checkpoint that holds it."""
        if self.key:
            found = seal_in(files, counting, number) if counting else self.anchors.get(number)
            self.seal = found or NO_SEAL


def seal_in(files: Files, counting: Sequence[Segment], number: int) -> bytes | None:
    """The seal of a record in the segments that count: NO_SEAL if it has none, None if it is not
    there. Raises OSError, Damaged."""
    for segment in reversed(counting):
        if segment.first - 1 <= number <= segment.last:
            return NO_SEAL if segment.is_adopted else seal_of(files, segment, number)
    return None
