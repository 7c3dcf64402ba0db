"""`narrows doctor`: says which of the likely failures is there, and what to do about it."""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import Final

from narrows.broker.cli.status import find_broker
from narrows.broker.doctor import way
from narrows.broker.doctor.findings import Row, Verdict, examine
from narrows.proto.config import parse_address
from narrows.proto.errors import printable
from narrows.proto.keys import check_name

MARKS: Final = {Verdict.OK: "✓", Verdict.FAILED: "✗", Verdict.UNKNOWN: "–"}  # noqa: RUF001


def doctor(
    *,
    broker: str | None = None,
    name: str | None = None,
    key: Path | None = None,
    json: bool = False,
    timeout_s: float = 5,
) -> int:
    """Say what is wrong between this machine and the broker, and what to do. Exit code 1: it is.

    Args:
        broker: Control address of the broker (default: NARROWS_BROKER, the key's, or
            tcp://127.0.0.1:7070).
        name: Learner whose place this is (default: NARROWS_NAME, or the key's).
        key: Key file of a site, if the broker has keys (default: NARROWS_KEY).
        json: Print the findings as JSON.
        timeout_s: Seconds to wait for one thing.
    """
    address, site, _ = find_broker(broker, key)
    name = name or os.environ.get("NARROWS_NAME") or (site.name if site else "doctor")
    via = os.environ.get("NARROWS_RELAY")
    visit = way.Visit(
        parse_address(address),
        site,
        check_name(name, "the learner's name"),
        timeout_s,
        parse_address(via) if via else None,
    )
    rows: list[Row] = []
    for row in examine(way.CHECKS, visit):
        rows.append(row)
        if not json:
            print(_line(row), flush=True)
    if json:
        print(json_module.dumps([_plain(row) for row in rows], indent=2))
    return int(any(row.finding.verdict is Verdict.FAILED for row in rows))


def _line(row: Row) -> str:
    finding = row.finding
    text = f"{MARKS[finding.verdict]} {row.check:16} {printable(finding.text)}"
    return f"{text}\n{'':19}{printable(finding.remedy)}" if finding.remedy else text


def _plain(row: Row) -> dict[str, str]:
    """A row as JSON has it; a peer's words as they are, since JSON escapes them."""
    finding = row.finding
    return {
        "check": row.check,
        "verdict": finding.verdict.value,
        "text": finding.text,
        "remedy": finding.remedy,
    }
