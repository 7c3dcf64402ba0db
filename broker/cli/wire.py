"""`narrows wire`: prints frames of the protocol field by field, from files or from a line."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from narrows.proto.address import Address, parse_address
from narrows.proto.errors import ConfigError

if TYPE_CHECKING:
    from narrows.broker.cli.dissecting import Printer
    from narrows.broker.cli.relay import Route

EXIT_FAULTY = 1
PORTS = 3
"""Control, uplink and downlink."""


def wire(
    source: Path | None = None,
    *,
    listen: Annotated[list[str] | None, Parameter(negative="")] = None,
    to: Annotated[list[str] | None, Parameter(negative="")] = None,
    ports: int = PORTS,
    out: Path | None = None,
    json: bool = False,
    only: Annotated[list[str] | None, Parameter(negative="")] = None,
    insecure: bool = False,
) -> None:
    """Print frames field by field, and name the first byte that is wrong.

    A second reader of proto/PROTOCOL.md, which shares no code with the one of broker and learner.
    It reads a file or a journal (exit code 1 if something in it is wrong), or relays a line.

    To watch a broker at 127.0.0.1:7070: `narrows wire --listen 127.0.0.2:7070 --to 127.0.0.1:7070`,
    and learners with `--broker tcp://127.0.0.2:7070`. A learner looks for the data ports at the
    host that it dials, under the numbers that the broker tells; so the relay needs a host of its
    own, where it listens on the same numbers. Ctrl-C ends it with a summary.

    Parameters
    ----------
    source
        A capture made with --out, a file with one frame, frames in hex as JSON, a segment of a
        journal, or a broker's state directory. It is only read, and may be in use.
    listen
        HOST:PORT for learners. Repeatable, each with its own --to: then exactly these ports.
    to
        HOST:PORT of the broker's control port.
    ports
        Ports in a row from --to on that are relayed; those after the first have the same number
        on both sides.
    out
        File for the frames that pass, to be read again by `narrows wire FILE`.
    json
        Print a line of JSON per frame.
    only
        Print one kind of frame alone: a message (`push`), `header`, `payload`, `topic`, ... or
        `faulty`; repeatable. The summary counts all.
    insecure
        Allow to listen beyond loopback, although whoever comes there reaches the broker.
    """
    from narrows.broker.cli.dissecting import Printer, read_path

    printer = Printer(as_json=json, only=only or [])
    if source is not None:
        if listen or to or out:
            raise ConfigError("wire: a file and a relay at once", expected="FILE, or --listen --to")
        read_path(source, printer)
        if printer.tally.faulty:
            sys.exit(EXIT_FAULTY)
        return
    _relay(routes_of(listen or [], to or [], ports), printer, out, insecure=insecure)


def routes_of(listen: list[str], to: list[str], ports: int) -> list[Route]:
    """The ports to relay. Raises ConfigError."""
    from narrows.broker.cli.relay import Route

    if not listen or len(listen) != len(to):
        raise ConfigError(
            "wire", expected="a FILE, or one --to for each --listen",
            got=f"{len(listen)} --listen and {len(to)} --to",
        )  # fmt: skip
    pairs = [
        Route(_address(near, "--listen"), _address(far, "--to"))
        for near, far in zip(listen, to, strict=True)
    ]
    if len(pairs) > 1:
        return pairs
    ((near, far),) = pairs
    if not 1 <= ports <= 65536 - far.port:
        raise ConfigError("--ports", expected=f"1 to {65536 - far.port}", got=str(ports))
    numbers = range(far.port + 1, far.port + ports)
    data = [Route(near._replace(port=n), far._replace(port=n)) for n in numbers]
    return [*pairs, *data]


def _address(text: str, what: str) -> Address:
    return parse_address(text if text.startswith("tcp://") else f"tcp://{text}", what)


def _relay(routes: list[Route], printer: Printer, out: Path | None, *, insecure: bool) -> None:
    from narrows.broker.cli.relay import Watcher, check_route, run_relay
    from narrows.proto.dissector import capture

    for route in routes:
        check_route(route, insecure=insecure)
    with ExitStack() as stack:
        file = None
        if out is not None:
            try:
                file = stack.enter_context(out.open("xb"))
            except FileExistsError:
                raise ConfigError(f"{out} exists", remedy="name a new file with --out") from None
            file.write(capture.HEAD)
        run_relay(routes, Watcher(printer, file))
