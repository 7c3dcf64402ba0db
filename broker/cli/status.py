"""`narrows status`: asks a broker for the state of the run and shows it."""

from __future__ import annotations

import json as json_module
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import zmq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrows.broker.config import BrokerConfig
from narrows.proto.config import Address, parse_address
from narrows.proto.errors import (
    BrokerUnreachable,
    ConfigError,
    ErrorCode,
    NarrowsError,
    Refused,
    printable,
)
from narrows.proto.keys import SiteKey, check_trust, read_site_key, servers_of
from narrows.proto.messages import (
    CONTROL_BYTES_MAX,
    AskStatus,
    LearnerStatus,
    Refuse,
    Status,
)
from narrows.proto.sockets import Dial, Kind, needs_ipv6
from narrows.proto.units import Size
from narrows.proto.wire import decode_control, encode_control, plain

LOOK_S: Final = 0.1
"""Longest time between two looks at a connection that says nothing."""

LEGEND: Final = (
    "heard: time since its last message; logged: tokens that it has trained on since its start;\n"
    "merged: those that are in the model; behind: versions that it has not adopted yet"
)


def status(
    broker: str | None = None, *, key: Path | None = None, json: bool = False, timeout_s: float = 5
) -> None:
    """Show the learners, the progress of the run, and what it waits for.

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
        # ASCII alone: escape sequences that a peer has written do nothing to a terminal.
        print(json_module.dumps(plain(answer), indent=2))
        return
    for line in _headline(answer):
        print(printable(line))
    Console(highlight=False, soft_wrap=True).print(_table(answer.learners))
    print(LEGEND)


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
    address = parse_address(broker)
    until = time.monotonic() + timeout_s
    *others, last = servers_of(key)
    for server in others:
        # A site trusts two keys while the broker changes its own; with the other one it breaks off.
        with suppress(BrokerUnreachable):
            return _ask(address, key, server, until)
    return _ask(address, key, last, until)


def _ask(address: Address, key: SiteKey | None, server: str, until: float) -> Status:
    """Asks over a connection that expects the broker whose public key is `server`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        ipv6 = needs_ipv6(address)
        dial = Dial(context, Kind.LEARNER_CONTROL, address, key, server, ipv6=ipv6)
        return _answer(dial, address, until)
    finally:
        context.destroy(linger=0)


def _answer(dial: Dial, address: Address, until: float) -> Status:
    """Asks once for each connection: a broker that ends before it answers, and starts again, has
    not heard the question."""
    trouble: NarrowsError | None = None
    now = time.monotonic()
    while now < until:
        zmq.select([dial.socket, dial.monitor], [], [], min(LOOK_S, until - now))
        if dial.look(now):
            with suppress(zmq.Again):  # The connection is gone already, and comes again.
                dial.socket.send_multipart(encode_control(AskStatus()), zmq.NOBLOCK)
        trouble = dial.error(now)
        # Silence decides nothing: a broker that is frozen may answer yet.
        if trouble is not None and not dial.is_silent:
            raise trouble
        if dial.socket.poll(0):
            said = decode_control(dial.socket.recv_multipart(), CONTROL_BYTES_MAX)
            if isinstance(said, Status):
                return said
            if isinstance(said, Refuse):
                raise Refused(
                    ErrorCode(said.code),
                    said.message,
                    expected=said.expected,
                    got=said.got,
                    remedy=said.remedy,
                )
        now = time.monotonic()
    raise trouble or BrokerUnreachable(
        f"{address} did not answer", remedy="is the broker running, and is this its control port?"
    )


def _headline(said: Status) -> list[str]:
    goal = f" of {said.goal_tokens:,}" if said.goal_tokens else ""
    versions = [each.version for each in said.fragments]
    spread = f"{min(versions)} to {max(versions)}" if min(versions, default=-1) >= 0 else "none yet"
    pushes = said.contributions / max(1, said.merges)
    line = said.line
    lines = [
        f"run {said.run_id}: {said.phase}; the broker is up for {said.uptime_s:.0f} s,"
        f" has received {Size(line.up_bytes).text()} and sent {Size(line.down_bytes).text()}",
        f"{said.run_tokens:,}{goal} tokens are learned, {said.tokens_per_s:,.0f} a second;"
        f" newest versions of the fragments: {spread};"
        f" {said.merges:,} merges of {pushes:.2f} pushes since the broker's start",
    ]
    lines += [f"waits for {each}" for each in said.waiting_for]
    lines += [each.hint for each in said.learners.values() if each.hint]
    return lines


def _table(learners: dict[str, LearnerStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("learner", "state"):
        table.add_column(column)
    for column in ("heard", "steps/s", "loss", "logged", "merged", "behind"):
        table.add_column(column, justify="right")
    for name, each in learners.items():
        state = f"{each.state}: {each.reason}" if each.reason else each.state
        table.add_row(
            printable(name),
            Text(printable(state)),  # Markup in the words of a peer would be obeyed.
            f"{each.heard_s:.0f} s",
            f"{each.steps_per_s:.2f}",
            "-" if each.loss is None else f"{each.loss:.3f}",
            f"{each.logged_tokens:,}",
            f"{each.merged_tokens:,}",
            str(each.versions_behind),
        )
    return table
