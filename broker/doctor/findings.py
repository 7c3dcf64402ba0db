"""A check and its finding, and the order in which checks are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from narrows.proto.errors import NarrowsError

Subject = TypeVar("Subject")


class Verdict(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """It does not apply here, or could not be made."""


@dataclass(frozen=True)
class Finding:
    """A verdict in words, and for a failure what to do about it."""

    verdict: Verdict
    text: str
    remedy: str = ""


def ok(text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(Verdict.OK, text)


def failed(text: str, remedy: str) -> Finding:
    """Something is wrong."""
    return Finding(Verdict.FAILED, text, remedy)


def unknown(text: str) -> Finding:
    """Nobody can say from here, or now."""
    return Finding(Verdict.UNKNOWN, text)


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """A question to a subject. `look` answers it, or raises NarrowsError or OSError: a failure."""

    name: str
    look: Callable[[Subject], Finding]
    needs: str = ""
    """The check without which this one says nothing; "": none."""


class Row(NamedTuple):
    """A line of the report."""

    check: str
    finding: Finding


def examine(checks: Iterable[Check[Subject]], subject: Subject) -> Iterator[Row]:
    """Makes the checks in order. One whose basis is not sound is not made."""
    sound = {""}
    for check in checks:
        if check.needs not in sound:
            finding = unknown(f"cannot be told before this is well: {check.needs}")
        else:
            try:
                finding = check.look(subject)
            except NarrowsError as error:
                finding = failed(said(error), error.remedy)
            except OSError as error:
                finding = failed(str(error), "this machine refuses it: see its permissions and log")
        if finding.verdict is Verdict.OK:
            sound.add(check.name)
        yield Row(check.name, finding)


def said(error: NarrowsError) -> str:
    """An error without its code and remedy."""
    if not error.expected:
        return error.message
    return f"{error.message} (expected {error.expected}, got {error.got})"
