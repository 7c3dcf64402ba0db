"""`narrows debug replay`: builds a machine from a file of its last inputs and plays them again.

A file may come from a stranger. It names a machine and its methods, which are looked up here, and
nothing else is imported or called.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

from narrows.broker.config import BrokerConfig
from narrows.broker.records import Contribution, NotFinite, Recovered
from narrows.broker.syncer import Syncer
from narrows.learner.session import Session
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError, fault

MACHINES: Final[dict[str, type]] = {"syncer": Syncer, "session": Session}


def replay(file: Path, /, *, last: int = 200) -> None:
    """Play the inputs that a broker or a learner has recorded, and print what it decided.

    Each input has its time as its last argument, if it has one. Below it stand its result and all
    effects that wait then. The first of them that differ from the recorded ones end it with an
    error.

    Args:
        file: File that the log of the process names: inputs-*.jsonl.
        last: Inputs to print, counted from the end or from the first that differs; all are played.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"{file}",
            expected="a file of inputs",
            got=error.strerror or str(error),
            remedy="the log of the broker or the learner names the file that it has written",
        ) from error
    try:
        _replay(last, *map(msgspec.json.decode, lines))
    # Whatever is wrong, the file brought it.
    except (LookupError, TypeError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise fault(
            f"{file}",
            expected="the lines that this version of Narrows writes",
            got=f"{type(error).__name__} {error}",
        ) from error


def _replay(last: int, head: dict[str, Any], *lines: list[Any]) -> None:
    kind = MACHINES[head["machine"]]
    answers = [line[0] for line in lines if len(line) == 1]
    inputs = [line for line in lines if len(line) != 1]
    machine = None if head["lost"] else _build(kind, head["given"], answers)
    shown = deque[str](maxlen=last)
    for number, line in enumerate(inputs, 1):
        name, args, kwargs, pending, *decided = line
        method = vars(kind)[name]
        given = _typed(args, method.__wrapped__)  # Only an input wraps another function.
        shown.append(f"{number} {name} {args} {kwargs or ''}{_text(decided)}")
        if machine is not None:
            # The host has performed the others.
            kept = [
                each
                for each in machine.effects
                if msgspec.json.decode(msgspec.json.encode(each)) in pending
            ]
            machine.effects.clear()
            machine.effects.extend(kept)
            try:
                method(machine, *given, **kwargs)
            except Exception as error:  # It may have ended the recorded call, too.
                shown.append(f"  raised {error!r}")
            played = msgspec.json.decode(machine.recorder.lines[-1])
            if played != line:
                print(*shown, sep="\n")
                print(f"DIFFERS. Played now, it decides:{_text(played[4:])}")
                raise fault(f"input {number}", expected="the recorded decisions", got="others")
    print(*shown, sep="\n")
    verdict = f"Inputs played: {len(inputs)}. All decisions are as recorded"
    if machine is None:
        verdict = (
            f"Not played: the file holds the newest inputs, and not the first {head['lost']}, so "
            "nobody knows the state that these met. It shows what the machine was told and what it "
            "decided; whether it would decide so again, it cannot tell"
        )
    print(verdict)


def _text(decided: list[Any]) -> str:
    """All effects that wait after an input, and its result: a line each."""
    effects, result = decided
    return "".join(f"\n  -> {each}" for each in (*effects, result) if each is not None)


def _build(kind: type, given: list[Any], answers: list[Any]) -> Any:
    """The machine as its constructor made it. The answers take the place of the store."""
    if kind is Session:
        return Session(*_typed(given, Session.__init__))
    config, epoch, facts, merged, now = given
    hints = get_type_hints(Recovered)
    known = {name: msgspec.convert(value, hints[name]) for name, value in facts.items()}
    return Syncer(
        msgspec.convert(config, BrokerConfig, dec_hook=_decoded),
        epoch,
        Recovered(**known, merged={tuple(key): push_id for key, push_id in merged}),
        now,
        published_digest=lambda fragment, version: answers.pop(0),
        newest_push=lambda incarnation, fragment: answers.pop(0),
    )


def _typed(values: list[Any], function: Any) -> tuple[Any, ...]:
    """Arguments of a function, of the types that it declares."""
    kinds = tuple(get_type_hints(function).values())[: len(values)]
    return tuple(msgspec.convert(values, tuple.__class_getitem__(kinds), dec_hook=_decoded))


def _decoded(kind: Any, value: Any) -> Any:
    """A quantity, which is a number, or an exception: its fields, else its text."""
    match value:
        case {"code": code, "text": _, "message": message, **texts}:
            words = {str(name): str(text) for name, text in texts.items()}
            return NarrowsError(ErrorCode(code), message, **words)
        case {"longest": longest, "text": text}:
            return NotFinite(text, msgspec.convert(longest, Contribution))
    return kind(value)
