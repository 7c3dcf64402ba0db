"""`narrows doctor`: says which of the likely failures is there, and what to do about it."""

from __future__ import annotations

import json as json_module
import os
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from narrows.broker.cli.status import find_broker
from narrows.broker.config import load_broker
from narrows.broker.doctor import machine, way
from narrows.broker.doctor.findings import Row, Verdict, examine
from narrows.proto.config import parse_address
from narrows.proto.errors import ConfigError, printable
from narrows.proto.keys import check_name

MARKS: Final = {Verdict.OK: "✓", Verdict.FAILED: "✗", Verdict.UNKNOWN: "–"}  # noqa: RUF001

TIMEOUT_S_MAX: Final = 600


def doctor(
    config: Path | None = None,
    *,
    broker: str | None = None,
    name: str | None = None,
    key: Path | None = None,
    state_dir: str | None = None,
    json: bool = False,
    timeout_s: float = 5,
) -> int:
    """Say what is wrong, and what to do about it. Exit code 1: something is.

    At a site it looks at the way to the broker, and at what the broker tells of this learner. At
    the broker, with a state directory or a config, it looks at the machine, too, and at all
    learners. Nothing changes, and no learner waits for it; for a second it loads the line up.

    Args:
        config: TOML file of the broker.
        broker: Control address of the broker (default: NARROWS_BROKER, the key's, or
            tcp://127.0.0.1:7070).
        name: Learner whose place this is (default: NARROWS_NAME, or the key's).
        key: Key file of a site, if the broker has keys (default: NARROWS_KEY).
        state_dir: State directory of the broker, on this machine.
        json: Print the findings as JSON.
        timeout_s: Seconds to wait for one thing.
    """
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise ConfigError(
            "--timeout-s", expected=f"seconds up to {TIMEOUT_S_MAX}", got=str(timeout_s)
        )
    own: Iterator[Row] = iter(())
    if config or state_dir:
        began = (time.time(), time.monotonic())
        settings = load_broker(config, {"broker.state_dir": state_dir} if state_dir else {}).broker
        broker = broker or settings.listen.replace("*", "127.0.0.1")
        place = machine.Machine(Path(settings.state_dir), began)
        own = examine(machine.CHECKS, place)
    address, site, _ = find_broker(broker, key)
    learner = name or os.environ.get("NARROWS_NAME")
    if site is not None and not (config or state_dir):
        learner = learner or site.name
    via = os.environ.get("NARROWS_RELAY")
    visit = way.Visit(
        parse_address(address),
        site,
        check_name(learner, "the learner's name") if learner else "",
        timeout_s,
        parse_address(via) if via else None,
    )
    rows: list[Row] = []
    for row in chain(own, examine(way.CHECKS, visit)):
        rows.append(row)
        if not json:
            print(_line(row), flush=True)
    if json:
        print(json_module.dumps([_plain(row) for row in rows], indent=2))
    return int(any(row.finding.verdict is Verdict.FAILED for row in rows))


def _line(row: Row) -> str:
    finding = row.finding
    text = f"{MARKS[finding.verdict]} {row.check:16} {printable(finding.text)}"
    if finding.remedy:
        text += f"\n{'':19}{printable(finding.remedy)}"
    # A terminal that has no such marks shows others.
    return text.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding)


def _plain(row: Row) -> dict[str, str]:
    """A row as JSON has it; a peer's words as they are, since JSON escapes them."""
    finding = row.finding
    return {
        "check": row.check,
        "verdict": finding.verdict.value,
        "text": finding.text,
        "remedy": finding.remedy,
    }
