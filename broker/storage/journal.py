"""The journal: numbered records that are durable, whole and in order when they are read again.

Records get numbers from 1 on without gaps. `append` queues them in memory; `sync` makes the whole
queue durable with few writes and one fdatasync. `segments` describes the bytes on the disk. The
meaning of a record is in `records`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import Final, NamedTuple, Self

from narrows.broker.storage.chain import Chain, Sealer, seal_in
from narrows.broker.storage.disk import Files
from narrows.broker.storage.durable_files import Damaged
from narrows.broker.storage.names import segment_name
from narrows.broker.storage.scan import JournalScan, lost, scan_journal, supersede, unreadable
from narrows.broker.storage.seal import NO_SEAL
from narrows.broker.storage.segments import (
    RECORD_HEADER_BYTES,
    RUN_ID_BYTES_MAX,
    SEALED_RECORD_HEADER_BYTES,
    Record,
    Segment,
    read_records,
    record_header,
    segment_header,
)
from narrows.proto.errors import ErrorCode, LocalProtocolError, NarrowsError

__all__ = ["Journal", "JournalError", "Record"]

QUEUED_BYTES_MAX: Final = 1 << 30
"""Bytes that may wait for the disk. Beyond them it has failed for long, and memory would run
out."""


class JournalError(NarrowsError):
    """JOURNAL_FAILED: the disk does not take the records now. None is lost; the caller tries
    again."""


class _Queued(NamedTuple):
    number: int
    body: tuple[memoryview, ...]
    size_bytes: int
    """On the disk."""
    keep_seal: bool = False


class Journal:
    """The journal of one run, in a directory that nobody else writes to.

    One thread may call `append` while another one calls `sync`; `append` never waits for the
    disk. Everything else belongs to the thread of `sync`, or to a time when none is under way.
    `durable` may be read by any.
    """

    def __init__(
        self, files: Files, run_id: str, segment_bytes: int, queued_bytes_max: int,
        scan: JournalScan, chain: Chain | None,
    ) -> None:  # fmt: skip
        self.durable = scan.proven
        """The newest durable record, 0: none. All before it are durable too."""
        self.warnings = scan.warnings
        """Ends and files that were left out; the caller tells the operator."""
        self.sealer = Sealer(chain)
        self._record_header_bytes = SEALED_RECORD_HEADER_BYTES if chain else RECORD_HEADER_BYTES
        self._files = files
        self._run_id = run_id
        self._segment_bytes = segment_bytes
        self._queued_bytes_max = queued_bytes_max
        self._scan = scan
        self._copied = scan.newest
        self._lock = Lock()
        """Guards the queue, its size and `_next`; held for moments."""
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._next = scan.proven + 1
        self._handle: int | None = None
        """Handle of the last segment, while records may be appended to it."""
        self._position_bytes = 0
        self._names_are_durable = False

    @classmethod
    def open(
        cls, files: Files, *, run_id: str, segment_bytes: int,
        queued_bytes_max: int = QUEUED_BYTES_MAX, chain: Chain | None = None,
    ) -> Self:  # fmt: skip
        """Scans the files and writes nothing. Call `sync` before anybody relies on the records.

        The newest records may never have reached the disk. They can be read, but they are queued
        as if they had just been appended, and `durable` does not count them: the first `sync`
        writes them again, and makes sure that files which are gone do not come back.

        With a chain every record that counts must have its seal, and every new one gets one.

        Raises StateError STATE_DAMAGED if the journal belongs to another run or format, cannot be
        read, or was altered without the key of the chain. Other damage does not matter until
        somebody asks for the records that are lost.
        """
        if not 0 < len(run_id.encode()) <= RUN_ID_BYTES_MAX or "\0" in run_id:
            expected = f"1 to {RUN_ID_BYTES_MAX} bytes without NUL"
            raise LocalProtocolError(ErrorCode.MISUSE, "run id", expected=expected, got=run_id)
        scan = scan_journal(files, run_id, chain)
        journal = cls(files, run_id, segment_bytes, queued_bytes_max, scan, chain)
        journal.sealer.resume(files, scan.counting, scan.proven)
        for record in journal.records(scan.proven + 1):
            journal._enqueue((record.body,))
        return journal

    def close(self) -> None:
        """Closes the file. The queue is forgotten: call `sync` before."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):  # Its records are durable already, or will be written anew.
                self._files.close(handle)

    @property
    def first(self) -> int:
        """The record from which on all are there; the next one's number if there is none."""
        return self._scan.first

    @property
    def newest(self) -> int:
        """The newest record in the files; it may not be durable."""
        return self._scan.newest

    @property
    def damage(self) -> list[str]:
        """All places where a record should be that does not verify, needed or not."""
        return [each.damage for each in self._scan.segments if each.damage]

    @property
    def has_unsealed(self) -> bool:
        """True if the newest record that counts was written before the journal was sealed."""
        counting = self._scan.counting
        return bool(counting) and counting[-1].is_adopted

    def seal_of(self, number: int) -> bytes:
        """The seal of a record in the files or in a checkpoint; NO_SEAL if there is none."""
        found = seal_in(self._files, self._scan.counting, number) or NO_SEAL
        return found if any(found) else self.sealer.anchors.get(number, NO_SEAL)

    # Reading.

    def records(self, first: int) -> Iterator[Record]:
        """The records in the files from `first` on, in order and verified.

        Those that `append` has queued since `open` are among them once they are durable. Raises
        StateError STATE_DAMAGED at once if one of them is lost, and later if a file has changed.
        """
        segments = [each for each in self._scan.counting if each.last >= first]
        if first < self.first:
            begins = [f"{each.name} begins with record {each.first}" for each in segments[:1]]
            raise lost(
                f"record {first} is needed, and the journal is whole from {self.first} on only",
                "; ".join([*self._scan.faults, *self.warnings, *begins]),
            )
        return self._read(segments, first)

    def _read(self, segments: list[Segment], first: int) -> Iterator[Record]:
        try:
            for segment in segments:
                yield from read_records(self._files, segment, first)
        except OSError as error:
            raise unreadable("the journal cannot be read any more", error) from error
        except Damaged as error:
            raise lost("the journal has changed since it was opened", str(error)) from error

    # Writing.

    def append(self, body: Sequence[bytes | memoryview], *, keep_seal: bool = False) -> int:
        """Queues a record whose body is these parts in a row, and returns its number.

        The parts must not change until the record is durable. `keep_seal`: `sealer.take` will be
        called once it is. Raises JournalError if the queue is full: the record was not taken.
        """
        parts = tuple(memoryview(part).cast("B") for part in body if len(part))
        return self._enqueue(parts, keep_seal=keep_seal)

    def _enqueue(self, body: tuple[memoryview, ...], *, keep_seal: bool = False) -> int:
        size_bytes = self._record_header_bytes + sum(map(len, body))
        with self._lock:
            number = self._next
            queued_bytes = self._queued_bytes + size_bytes
            # Records that the files hold must be copied, however many they are. A single record
            # that is larger than the queue must not be refused for ever.
            is_full = self._queue and queued_bytes > self._queued_bytes_max
            if is_full and number > self._copied:
                raise JournalError(
                    ErrorCode.JOURNAL_FAILED, "too much waits to be written to the journal",
                    expected=f"up to {self._queued_bytes_max} bytes", got=f"{queued_bytes} bytes",
                    remedy="see whether the disk is full, failing or too slow",
                )  # fmt: skip
            self._queue.append(_Queued(number, body, size_bytes, keep_seal))
            self._queued_bytes = queued_bytes
            self._next += 1
            assert number == self._queue[0].number + len(self._queue) - 1, "numbers have no gaps"
        return number

    def sync(self) -> None:
        """Makes all records durable that were queued before the call.

        Raises JournalError: those after `durable` stay queued, and the next call writes them
        again, into a new file, since nobody knows what has become of the old one.
        """
        with self._lock:
            batch = tuple(self._queue)
        try:
            if not self._names_are_durable:
                self._files.sync_directory()
                self._names_are_durable = True
            self._write(batch)
        except BaseException as error:
            self._give_up()
            if not isinstance(error, OSError):
                raise
            raise JournalError(
                ErrorCode.JOURNAL_FAILED, f"records after {self.durable} are not durable",
                got=str(error), remedy="make room or see to the disk; it is tried again",
            ) from error  # fmt: skip

    def _write(self, batch: Sequence[_Queued]) -> None:
        parts: list[bytes | memoryview] = []
        written, seal, key = self.durable, self.sealer.seal, self.sealer.key
        for record in batch:
            if not self._has_room(record):
                self._flush(parts, written, seal)
                self._begin_segment(record)
                parts = []
            segment = self._scan.segments[-1]
            seal = self.sealer.next(seal, record.number, record.body, keep=record.keep_seal)
            header = record_header(segment, record.number, self.durable, record.body, key, seal)
            parts += [header, *record.body]
            self._position_bytes += record.size_bytes
            written = record.number
        self._flush(parts, written, seal)

    def _has_room(self, record: _Queued) -> bool:
        if self._handle is None:
            return False
        # Copies share one segment, because it counts only with all of them.
        fits = self._position_bytes + record.size_bytes <= self._segment_bytes
        return fits or record.number <= self._copied

    def _flush(self, parts: Sequence[bytes | memoryview], written: int, seal: bytes) -> None:
        """Writes the parts and makes them durable; the last of them belong to record `written`."""
        if not parts or self._handle is None:
            return
        segment = self._scan.segments[-1]
        segment.newest = max(segment.newest, written)
        self._files.write(self._handle, parts)
        self._files.sync(self._handle)
        segment.last = written
        supersede(self._scan.counting, segment)
        with self._lock:
            while self._queue and self._queue[0].number <= written:
                self._queued_bytes -= self._queue.popleft().size_bytes
        assert written >= self.durable, f"{written} after {self.durable}: what is durable stays so"
        self.durable, self.sealer.seal = written, seal

    def _begin_segment(self, record: _Queued) -> None:
        """Ends the segment and makes one that begins with `record`; all before it are durable."""
        assert record.number == self.durable + 1, f"{record.number} after {self.durable}"
        self.close()
        while self._scan.empty:
            with suppress(OSError):  # An unfinished file does no harm; the next start removes it.
                self._files.unlink(self._scan.empty.pop())
        self._scan.number += 1
        name, first = segment_name(self._scan.number), record.number
        salt = int.from_bytes(os.urandom(8), "little")
        segment = Segment(name, first, self._copied, salt, first - 1, newest=first)
        segment.before = self.sealer.seal
        header = segment_header(segment, self._run_id, self.sealer.key)
        size_bytes = max(self._segment_bytes, len(header) + record.size_bytes)
        self._handle = self._files.create(name, size_bytes)
        self._scan.segments.append(segment)
        self._files.write(self._handle, [header])
        self._files.sync(self._handle)
        self._files.sync_directory()
        self._position_bytes = len(header)

    def _give_up(self) -> None:
        """Leaves the segment. One without a durable record goes, because a full disk needs its
        room."""
        if self._handle is None:
            return
        self.close()
        segment = self._scan.segments[-1]
        if segment.first > self.durable:
            self._scan.segments.pop()
            with suppress(OSError):
                self._files.unlink(segment.name)

    def cut_before(self, number: int) -> None:
        """Removes the oldest segments as far as all of their records are older than `number`.

        The newest segment that counts stays, because it has the number of the last record. Raises
        JournalError; then some of the old ones may still be there.
        """
        scan = self._scan
        try:
            while scan.counting and (oldest := scan.segments[0]) is not scan.counting[-1]:
                if oldest.newest >= number:
                    break
                with suppress(FileNotFoundError):
                    self._files.unlink(oldest.name)
                self._forget(scan.segments.pop(0))
            self._files.sync_directory()
        except OSError as error:
            raise JournalError(
                ErrorCode.JOURNAL_FAILED, "old segments cannot be removed", got=str(error),
                remedy="see to the disk; it is tried again",
            ) from error  # fmt: skip

    def _forget(self, segment: Segment) -> None:
        self._scan.counting = [each for each in self._scan.counting if each is not segment]
        self._scan.first = max(self._scan.first, segment.last + 1)

    def continue_after(self, number: int) -> None:
        """Goes on after `number`: a checkpoint holds everything up to it.

        A journal that has lost its end has lost the number of its last record as well, and two
        records must never share a number. Raises LocalProtocolError if records that were appended
        since `open` would be skipped.
        """
        with self._lock:
            if number < self._next:
                return
            if self._next != self._scan.newest + 1:
                raise LocalProtocolError(
                    ErrorCode.MISUSE, "the journal is being written already",
                    expected=f"less than {self._next}", got=str(number),
                    remedy="call continue_after before append",
                )  # fmt: skip
            self._scan.faults.append(f"records {self._next} to {number} are missing")
            self._queue.clear()
            self._queued_bytes = 0
            self._next = number + 1
        counting = self._scan.counting
        self.sealer.resume(self._files, counting, counting[-1].last if counting else number)
        self._scan.first = self._next
        self.durable = number
