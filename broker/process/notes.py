"""Everything that the broker writes down beside the model: log, events file, fates in the journal.

What peers cause is limited, so that no flood of them fills a disk.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Final, Protocol

from narrows.broker.syncer import Repeats, with_count
from narrows.broker.syncer import events as ev
from narrows.proto.errors import printable
from narrows.proto.shell import EventFile

_log = logging.getLogger("narrows.broker")

FATE_BYTES: Final = 250
"""Bytes that a learner's fate takes in the journal, beside its reason."""

LINE_BYTES: Final = 60
"""Bytes that a line of the log takes, beside its text."""


class Fates(Protocol):
    """The journal, as far as it takes fates."""

    def note(self, fate: ev.LogFate) -> None: ...


class Notes:
    """Writes lines for operators."""

    def __init__(self, events: EventFile | None, journal: Fates | None = None) -> None:
        self.events, self.journal = events, journal
        self.lines, self.fates = Repeats(), Repeats()

    def note(self, note: ev.Note) -> None:
        """One line in the log and in the events file, unless there are too many of its kind."""
        text = printable(note.text)
        if note.about:
            # The events file has the line again.
            size_bytes = (1 + (self.events is not None)) * (len(text) + LINE_BYTES)
            left_out = self.lines.let_pass(note.about, size_bytes, time.monotonic())
            if left_out is None:
                return
            text = with_count(text, left_out)
        _log.log(getattr(logging, note.level.upper()), "%s", text)
        self.record({"event": "note", "level": note.level, "text": text})

    def warn(self, text: str) -> None:
        """A warning that no peer can cause again and again."""
        self.note(ev.Note("warning", text))

    def fate(self, fate: ev.LogFate) -> None:
        """Has the journal keep the fate of a learner or a push, unless there are too many."""
        if self.journal is None:
            return
        # The audit has to know each name that is forgotten.
        if fate.what != "forgotten":
            about = f"{fate.what} {fate.reason if fate.what == 'refused' else ''} {fate.learner}"
            size_bytes = FATE_BYTES + len(fate.reason)
            left_out = self.fates.let_pass(about, size_bytes, time.monotonic())
            if left_out is None:
                return
            fate = replace(fate, reason=with_count(fate.reason, left_out))
        self.journal.note(fate)

    def record(self, record: dict[str, object]) -> None:
        """One line in the events file: for benches, not for recovery."""
        if self.events is not None:
            self.events.write(record)

    def close(self) -> None:
        """Closes the events file."""
        if self.events is not None:
            self.events.close()
