"""The last words of a failed process, in one line, and the place of the rest."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from narrows.proto.errors import ErrorCode, NarrowsError

REASON_CHARACTERS_MAX: Final = 200
_BEGIN: Final = "Traceback (most recent call last):"
_RANK: Final = re.compile(r"^\[rank\d+\]: ?")
"""torch puts this before every line of a traceback."""

_RAISED: Final = re.compile(r"(?:[\w.]+\.)?[A-Z]\w*(?:: (.*))?")
_PLACE: Final = re.compile(r"^\[/\S+\]\s*")
"""Gloo's messages begin with the line of its source."""


class ProcessFailed(NarrowsError):
    """A child of a bench has failed; `name` is that of its log."""

    def __init__(self, name: str, message: str, *, remedy: str = "") -> None:
        self.name = name
        super().__init__(ErrorCode.MISUSE, message, remedy=remedy)

    def __str__(self) -> str:
        """One sentence. The base class begins with the code, which would speak of misuse."""
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


def ended(name: str, code: int, log: str) -> ProcessFailed:
    """A child that has ended with a failure, and the reason from its log."""
    if code >= 0:
        return ProcessFailed(name, f"{name} ended with code {code}: {reason_of(log)}")
    return ProcessFailed(name, f"{name} was ended by {signal.Signals(-code).name}")


def reason_of(log: str) -> str:
    """Reason why a process failed: the error of its last traceback, without the frames; otherwise
    the last error, or the last line."""
    lines = [_RANK.sub("", line).rstrip() for line in log.splitlines()]
    begins = [number for number, line in enumerate(lines) if line.lstrip() == _BEGIN]
    said = [line for line in lines if line]
    if begins and (raised := _raised(lines[begins[-1] + 1 :])):
        return _cut(raised)
    errors = [line.removeprefix("ERROR:") for line in said if line.startswith("ERROR:")]
    last = (errors or said or ["it said nothing"])[-1]
    return _cut(last.removeprefix("narrows: "))


def _raised(lines: list[str]) -> str:
    """The message below a traceback's frames. Frames are indented; a message may have several
    lines."""
    for number, line in enumerate(lines):
        match = _RAISED.fullmatch(line)
        if line and not line.startswith(" ") and match:
            more = lines[number + 1 :]
            # The error's own text goes on indented. Other text comes from somebody else.
            is_longer = bool(more) and more[0].startswith(" ")
            return " ".join([match[1] or line, *(more if is_longer else [])])
    return ""


def _cut(text: str) -> str:
    words = " ".join(_PLACE.sub("", text.strip()).split())
    if len(words) <= REASON_CHARACTERS_MAX:
        return words
    return words[:REASON_CHARACTERS_MAX].rstrip() + " ..."


@contextmanager
def logs_kept(folder: Path, *, stays: bool = False) -> Generator[None]:
    """Names the log of a process that fails in the block, and copies it to a folder that stays,
    unless `folder` itself stays."""
    try:
        yield
    except ProcessFailed as error:
        if error.remedy:
            raise
        raise ProcessFailed(
            error.name, error.message, remedy=log_of(folder, error.name, stays=stays)
        ) from error


def log_of(folder: Path, name: str, *, stays: bool = False) -> str:
    """Place of a process's log after the end of the bench, as half a sentence."""
    place = folder if stays else Path(tempfile.mkdtemp(prefix="narrows-failed-"))
    if not stays:
        for path in folder.glob("*.log"):
            shutil.copy(path, place)
    return f"its log: {place / name}.log"
