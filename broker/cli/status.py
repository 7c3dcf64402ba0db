"""`narrows status` and `narrows watch`: ask a broker for the state of the run and show it."""

from __future__ import annotations

import json as json_module
import os
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.markup import escape

from narrows.broker.asking import Asker
from narrows.broker.config import BrokerConfig
from narrows.broker.verdict import duration, learner_text, verdict
from narrows.proto.errors import (
    BrokerUnreachable,
    ConfigError,
    printable,
)
from narrows.proto.keys import SiteKey, check_trust, read_site_key
from narrows.proto.messages import (
    LearnerState,
    LearnerStatus,
    Phase,
    Status,
)
from narrows.proto.units import Amount, Duration, Size
from narrows.proto.wire import plain

if TYPE_CHECKING:  # It takes a tenth of a second to load, and JSON does without.
    from rich.table import Table

LEGEND: Final = (
    "merged: tokens in the model/that it has trained on, both since its process began;\n"
    "pushed: time since a push was merged; up, down: bit/s of its data;\n"
    "behind: versions that it has not adopted yet"
)

PAUSE_S_MIN: Final = 0.1
TIMEOUT_S: Final = 5.0
"""Shortest time between two questions, and longest wait for an answer, while a run is followed. A
connection over a long line takes some round trips, however often the user wants a line."""

LANE_COLOURS: Final[dict[str, str]] = {
    LearnerState.TRAINING: "green",
    LearnerState.STALLED: "yellow",
    LearnerState.SILENT: "yellow",
    LearnerState.LOST: "red",
    LearnerState.REVOKED: "red",
    "line up cut": "red",
    "line down cut": "red",
}

MARKS: Final = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "bad": ("✗", "red")}
"""Sign and colour of each level."""


def status(
    broker: str | None = None, *, key: Path | None = None, json: bool = False, timeout_s: float = 5
) -> None:
    """Say in one sentence how a run is and what to do, and show its learners.

    Args:
        broker: Control address of the broker (default: NARROWS_BROKER, the key's, or
            tcp://127.0.0.1:7070).
        key: Key file of a site, if the broker has keys (default: NARROWS_KEY).
        json: Print everything as JSON.
        timeout_s: Seconds to wait for an answer.
    """
    address, site, _ = find_broker(broker, key)
    answer = ask_status(address, site, timeout_s=timeout_s)
    if json:
        print(json_module.dumps(_facts(answer), indent=2))
    else:
        _show(answer)


def watch(
    broker: str | None = None,
    *,
    key: Path | None = None,
    every: str = "10s",
    json: bool = False,
) -> None:
    """Follow a run: a line now and then, until it has ended.

    Args:
        broker: Control address of the broker (default: NARROWS_BROKER, the key's, or
            tcp://127.0.0.1:7070).
        key: Key file of a site, if the broker has keys (default: NARROWS_KEY).
        every: Time between two lines, such as 10s or 1min.
        json: Print everything as JSON, an object per line.
    """
    pause_s = max(PAUSE_S_MIN, float(Duration.parse(every, "--every: ")))
    address, site, _ = find_broker(broker, key)
    with closing(Asker(address, site)) as asker:
        asked_at = time.monotonic()
        while _tell(asker, json=json) != Phase.ENDED:
            time.sleep(max(0.0, asked_at + pause_s - time.monotonic()))
            asked_at = time.monotonic()


def _tell(asker: Asker, *, json: bool) -> str:
    """Asks, and prints one line; returns the phase of the run, "" if the broker does not answer."""
    phase = ""
    try:
        answer = asker.ask(TIMEOUT_S)
    except BrokerUnreachable as error:
        facts: dict[str, Any] = {"error": str(error)}
        line = f"{MARKS['bad'][0]} {error}"
    else:
        phase = answer.phase
        facts = _facts(answer)
        found = verdict(answer)
        line = f"{MARKS[found.level][0]} {found.text}"
    if json:
        print(json_module.dumps({"at_unix": round(time.time(), 3), **facts}), flush=True)
    else:
        print(f"{datetime.now():%H:%M:%S} {printable(line)}", flush=True)
    return phase


def _facts(said: Status) -> dict[str, Any]:
    """A Status and its verdict, for JSON; ASCII alone, as `json.dumps` writes it: escape sequences
    of a peer do nothing to a terminal."""
    return {**plain(said), "verdict": verdict(said)._asdict()}


def find_broker(broker: str | None, key: Path | None) -> tuple[str, SiteKey | None, Path | None]:
    """Control address, key and key file as they were given, else those of the environment; without
    an address the key's, or this machine. Raises ConfigError for a key that cannot be used."""
    given = key or os.environ.get("NARROWS_KEY")
    file = Path(given) if given else None
    site = read_key(file)
    address = broker or os.environ.get("NARROWS_BROKER")
    if site is not None:
        address = address or site.broker
    return address or BrokerConfig().broker.listen, site, file


def read_key(file: Path | None) -> SiteKey | None:
    """The key of a site that trusts a broker, if there is a file. Raises ConfigError."""
    if file is None:
        return None
    if file.name == "broker.key":
        raise ConfigError(
            f"{file} is the broker's own key, which no broker admits",
            expected="the key of a site, or one that you make for yourself",
            remedy="narrows keys new me.key --name operator --server KEY, and allow it",
        )
    return check_trust(read_site_key(file), file)


def ask_status(broker: str, key: SiteKey | None, *, timeout_s: float) -> Status:
    """The Status of a broker. Raises ConfigError, Refused, and BrokerUnreachable, after
    `timeout_s` unless it is certain before."""
    with closing(Asker(broker, key)) as asker:
        return asker.ask(timeout_s)


def _show(said: Status) -> None:
    """Prints the sentence, the figures of the run, and a lane for each learner."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    found = verdict(said)
    mark, colour = MARKS[found.level]
    console.print(f"[bold {colour}]{mark}[/] {escape(printable(found.text))}")
    if found.remedy:
        console.print(f"  → {escape(printable(found.remedy))}")
    for line in _figures(said):
        console.print(escape(printable(line)))
    console.print(_lanes(said.learners))
    print(LEGEND)


def _figures(said: Status) -> list[str]:
    goal = f" of {said.goal_tokens:,}" if said.goal_tokens else ""
    versions = [each.version for each in said.fragments]
    spread = f"{min(versions)} to {max(versions)}" if min(versions, default=-1) >= 0 else "none yet"
    newest = f", newest {duration(said.last_merge.ago_s)} ago" if said.last_merge else ""
    line = said.line
    lines = [
        f"run {said.run_id} {said.phase}: {said.run_tokens:,}{goal} tokens learned,"
        f" {said.tokens_per_s:,.0f} a second; versions {spread}{newest};"
        f" {Size(line.up_bytes).text()} received, {Size(line.down_bytes).text()} sent"
        f" in {duration(said.uptime_s)}"
    ]
    lines += [f"waits for {each}" for each in said.waiting_for]
    lines += [each.hint for each in said.learners.values() if each.hint]
    return lines


def _lanes(learners: dict[str, LearnerStatus]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("learner", "state"):
        table.add_column(column)
    for column in ("steps/s", "loss", "merged", "pushed", "up", "down", "behind"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, each in learners.items():
        word, state = learner_text(each)
        tokens = Amount(each.merged_tokens).text(), Amount(each.logged_tokens).text()
        colour = LANE_COLOURS.get(word, "")
        table.add_row(
            printable(name),
            Text(printable(state), colour),  # Markup in the words of a peer would be obeyed.
            f"{each.steps_per_s:.2f}",
            "-" if each.loss is None else f"{each.loss:.3f}",
            "/".join(tokens),
            "-" if each.merged_s is None else duration(each.merged_s),
            Amount(each.up_bits_per_s).text(),
            Amount(each.down_bits_per_s).text(),
            str(each.versions_behind),
        )
    return table
