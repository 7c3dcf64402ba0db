"""The journal: numbered records that are durable, whole and in order when they are read again.

Records get numbers from 1 on without gaps. `append` queues them in memory, `sync` makes all that
are queued durable with few writes and one fdatasync. The bytes on the disk are described in
`segments`. What a record means is the business of others.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import Final, NamedTuple, Self

from narrows.broker.storage.disk import Files
from narrows.broker.storage.durable_files import Damaged
from narrows.broker.storage.scan import Recovered, lost, recover, supersede, unreadable
from narrows.broker.storage.segments import (
    RECORD_HEADER_BYTES,
    RUN_ID_BYTES_MAX,
    SEGMENT_HEADER_BYTES,
    Record,
    Segment,
    read_records,
    record_header,
    segment_header,
    segment_name,
)
from narrows.proto.errors import ErrorCode, LocalProtocolError, NarrowsError

__all__ = ["Journal", "JournalError", "Record"]

QUEUED_BYTES_MAX: Final = 1 << 30


class JournalError(NarrowsError):
    """JOURNAL_FAILED: the disk does not take the records now. None is lost; try again."""


class _Queued(NamedTuple):
    number: int
    body: tuple[memoryview, ...]
    size_bytes: int
    """On the disk."""


class Journal:
    """The journal of one run, in a directory that nobody else writes to.

    One thread may call `append` while another one calls `sync`; `append` never waits for the
    disk. Everything else belongs to the thread of `sync`, or to a time when none is under way.
    `durable` may be read by any.
    """

    def __init__(
        self, files: Files, run_id: str, segment_bytes: int, queued_bytes_max: int,
        found: Recovered,
    ) -> None:  # fmt: skip
        self.durable = found.proven
        """The newest durable record, 0: none. All before it are durable too."""
        self.warnings = found.warnings
        """What was cut off or passed over; the caller tells the operator."""
        self._files = files
        self._run_id = run_id
        self._segment_bytes = segment_bytes
        self._queued_bytes_max = queued_bytes_max
        self._found = found
        self._copied = found.newest
        self._lock = Lock()
        """Guards the queue, its size and `_next`; held for moments."""
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._next = found.proven + 1
        self._handle: int | None = None
        """Of the last segment, while records may be appended to it."""
        self._position_bytes = 0
        self._names_are_durable = False

    @classmethod
    def open(
        cls, files: Files, *, run_id: str, segment_bytes: int,
        queued_bytes_max: int = QUEUED_BYTES_MAX,
    ) -> Self:  # fmt: skip
        """Scans what is there and writes nothing. Call `sync` before anybody relies on it.

        The newest records may never have reached the disk. They can be read, but they are queued
        as if they had just been appended, and `durable` does not count them: the first `sync`
        writes them again, and makes sure that files which are gone do not come back.

        Raises StateError STATE_DAMAGED if the journal belongs to another run or format or cannot
        be read. Other damage is no matter until somebody asks for the records that are lost.
        """
        if not 0 < len(run_id.encode()) <= RUN_ID_BYTES_MAX or "\0" in run_id:
            expected = f"1 to {RUN_ID_BYTES_MAX} bytes without NUL"
            raise LocalProtocolError(ErrorCode.MISUSE, "run id", expected=expected, got=run_id)
        found = recover(files, run_id)
        journal = cls(files, run_id, segment_bytes, queued_bytes_max, found)
        for record in journal.records(found.proven + 1):
            journal._enqueue((record.body,))
        return journal

    def close(self) -> None:
        """Closes the file. What is queued is forgotten: call `sync` before."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):  # Nothing in it depends on that.
                self._files.close(handle)

    @property
    def first(self) -> int:
        """The record from which on all are there; the next one's number if there is none."""
        return self._found.first

    # Reading.

    def records(self, first: int) -> Iterator[Record]:
        """The records in the files from `first` on, in order and verified.

        Those that `append` has queued since `open` are among them once they are durable. Raises
        StateError STATE_DAMAGED at once if one of them is lost, and later if a file has changed.
        """
        segments = [each for each in self._found.counting if each.last >= first]
        if first < self.first:
            begins = [f"{each.name} begins with record {each.first}" for each in segments[:1]]
            raise lost(
                f"record {first} is needed, and the journal is whole from {self.first} on only",
                "; ".join([*self._found.faults, *self.warnings, *begins]),
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

    def append(self, body: Sequence[bytes | memoryview]) -> int:
        """Queues a record whose body is these parts in a row, and returns its number.

        The parts must not change until the record is durable. Raises JournalError if the queue is
        full: the record was not taken.
        """
        return self._enqueue(tuple(memoryview(part).cast("B") for part in body if len(part)))

    def _enqueue(self, body: tuple[memoryview, ...]) -> int:
        size_bytes = RECORD_HEADER_BYTES + sum(map(len, body))
        with self._lock:
            number = self._next
            queued_bytes = self._queued_bytes + size_bytes
            # What the files hold has to be copied, however much it is.
            # A record that is too large for the queue must not be refused for ever.
            is_full = self._queue and queued_bytes > self._queued_bytes_max
            if is_full and number > self._copied:
                raise JournalError(
                    ErrorCode.JOURNAL_FAILED, "too much waits to be written to the journal",
                    expected=f"up to {self._queued_bytes_max} bytes", got=f"{queued_bytes} bytes",
                    remedy="see whether the disk is full, failing or too slow",
                )  # fmt: skip
            self._queue.append(_Queued(number, body, size_bytes))
            self._queued_bytes = queued_bytes
            self._next += 1
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
        written = self.durable
        for record in batch:
            if not self._has_room(record):
                self._flush(parts, written)
                self._begin_segment(record)
                parts = []
            salt = self._found.segments[-1].salt
            parts += [record_header(salt, record.number, self.durable, record.body), *record.body]
            self._position_bytes += record.size_bytes
            written = record.number
        self._flush(parts, written)

    def _has_room(self, record: _Queued) -> bool:
        if self._handle is None:
            return False
        # Copies share one segment, because it counts only with all of them.
        fits = self._position_bytes + record.size_bytes <= self._segment_bytes
        return fits or record.number <= self._copied

    def _flush(self, parts: Sequence[bytes | memoryview], written: int) -> None:
        """Writes the parts, the last of which belong to record `written`, and makes them so."""
        if not parts or self._handle is None:
            return
        segment = self._found.segments[-1]
        segment.newest = max(segment.newest, written)
        self._files.write(self._handle, parts)
        self._files.sync(self._handle)
        segment.last = written
        supersede(self._found.counting, segment)
        with self._lock:
            while self._queue and self._queue[0].number <= written:
                self._queued_bytes -= self._queue.popleft().size_bytes
        self.durable = written

    def _begin_segment(self, record: _Queued) -> None:
        """Ends the segment and makes one that begins with `record`; all before it are durable."""
        self.close()
        while self._found.empty:
            with suppress(OSError):  # It would be no harm.
                self._files.unlink(self._found.empty.pop())
        self._found.number += 1
        name, first = segment_name(self._found.number), record.number
        salt = int.from_bytes(os.urandom(8), "little")
        segment = Segment(name, first, self._copied, salt, first - 1, newest=first)
        size_bytes = max(self._segment_bytes, SEGMENT_HEADER_BYTES + record.size_bytes)
        self._handle = self._files.create(name, size_bytes)
        self._found.segments.append(segment)
        self._files.write(self._handle, [segment_header(segment, self._run_id)])
        self._files.sync(self._handle)
        self._files.sync_directory()
        self._position_bytes = SEGMENT_HEADER_BYTES

    def _give_up(self) -> None:
        """Leaves the segment; one without a durable record goes, its room may be needed."""
        if self._handle is None:
            return
        self.close()
        segment = self._found.segments[-1]
        if segment.first > self.durable:
            self._found.segments.pop()
            with suppress(OSError):
                self._files.unlink(segment.name)

    def cut_before(self, number: int) -> None:
        """Removes the oldest segments as far as all of their records are older than `number`.

        The newest one that counts stays, and with it the count. Raises JournalError: some of
        those that are to go may be there still.
        """
        found = self._found
        try:
            while found.counting and (oldest := found.segments[0]) is not found.counting[-1]:
                if oldest.newest >= number:
                    break
                with suppress(FileNotFoundError):
                    self._files.unlink(oldest.name)
                self._forget(found.segments.pop(0))
            self._files.sync_directory()
        except OSError as error:
            raise JournalError(
                ErrorCode.JOURNAL_FAILED, "old segments cannot be removed", got=str(error),
                remedy="see to the disk; it is tried again",
            ) from error  # fmt: skip

    def _forget(self, segment: Segment) -> None:
        self._found.counting = [each for each in self._found.counting if each is not segment]
        self._found.first = max(self._found.first, segment.last + 1)

    def continue_after(self, number: int) -> None:
        """Says that a checkpoint holds everything up to `number`: later records go on from there.

        Needed where the journal may have lost its end, and with it the count. Raises
        LocalProtocolError if it would jump over records that were appended since `open`.
        """
        with self._lock:
            if number < self._next:
                return
            if self._next != self._found.newest + 1:
                raise LocalProtocolError(
                    ErrorCode.MISUSE, "the journal is being written already",
                    expected=f"less than {self._next}", got=str(number),
                    remedy="call continue_after before append",
                )  # fmt: skip
            self._found.faults.append(f"records {self._next} to {number} are missing")
            self._queue.clear()
            self._queued_bytes = 0
            self._next = number + 1
        self._found.first = self._next
        self.durable = number
