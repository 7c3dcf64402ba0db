"""The last inputs of a machine, each with what it decided, as lines that can be played again.

Both machines are pure: the same inputs lead to the same decisions. An input is encoded at once, so
no line changes later and none holds anything large. The owner of a machine writes the lines to a
file (proto/events.py), and bench/replay.py plays them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import msgspec

INPUTS_MAX: Final = 10_000
INPUTS_BYTES_MAX: Final = 32 << 20
"""Bytes of all lines: peers choose how large their messages are."""

P = ParamSpec("P")
Result = TypeVar("Result")


class Recorder:
    """The newest inputs of one machine, as lines of JSON."""

    def __init__(self, machine: str, *given: object) -> None:
        """`given` is what the machine's constructor was given, as far as it can be encoded."""
        self.lines: deque[bytes] = deque()
        self.is_busy = False
        """A method of the machine runs: what it calls itself is no input."""
        self._head = {"machine": machine, "given": msgspec.Raw(_ENCODER.encode(given))}
        self._bytes = 0
        self._put = 0

    def told(self, answer: Result) -> Result:
        """The machine asks, and this is the answer: a line before that of the input."""
        self.put((answer,))
        return answer

    def put(self, line: tuple[object, ...]) -> None:
        """Takes a line, and forgets the oldest ones beyond the bounds."""
        self._put += 1
        try:
            self.lines.append(_ENCODER.encode(line))
            self._bytes += len(self.lines[-1])
        except Exception:
            pass  # A run must not end because an odd text cannot be encoded: the line is lost.
        while len(self.lines) > INPUTS_MAX or self._bytes > INPUTS_BYTES_MAX:
            self._bytes -= len(self.lines.popleft())

    def text(self) -> bytes:
        """All lines. The first one says how many are lost."""
        lines = list(self.lines)  # At once: another thread may add to them.
        head = {**self._head, "lost": self._put - len(lines)}
        return b"\n".join([_ENCODER.encode(head), *lines])


def recorded(
    method: Callable[Concatenate[Any, P], Result],
) -> Callable[Concatenate[Any, P], Result]:
    """Marks a method of a machine as an input: calls from outside are recorded."""

    @wraps(method)
    def record(machine: Any, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        recorder: Recorder = machine.recorder
        if recorder.is_busy:
            return method(machine, *args, **kwargs)
        # Effects that are not performed yet: a host may take them out in any order.
        pending = list(machine.effects)
        result = None
        try:
            recorder.is_busy = True
            result = method(machine, *args, **kwargs)
            return result
        finally:
            recorder.is_busy = False
            decided = list(machine.effects)
            recorder.put((method.__name__, args, kwargs, pending, decided, result))

    return record


def _encoded(value: object) -> object:
    """An exception as its fields or its text, a quantity as a number."""
    if isinstance(value, Exception):
        return {**vars(value), "text": str(value)} if vars(value) else str(value)
    return float(value)  # type: ignore[arg-type]  # Anything else: a TypeError, and no line.


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_encoded)
