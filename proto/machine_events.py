"""Events and effects that the state machines of both sides have in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeadlineReached:
    """An event: the time that the machine's `next_deadline` named has come."""


@dataclass(frozen=True)
class Drop:
    """An effect: forget these payloads."""

    handles: tuple[int, ...]


@dataclass(frozen=True)
class Note:
    """An effect: one line for the operator, told on change. `level` is a name of `logging`."""

    level: str
    text: str
    about: str = ""
    """Kind and peer of a line that a peer can cause as often as it likes: such lines are limited.
    Empty: it is told each time."""
