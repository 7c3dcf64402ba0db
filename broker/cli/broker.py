"""`narrows broker`: configuration from file and flags, signals, the process around a Service."""

from __future__ import annotations

import logging
import os
import signal
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from types import FrameType, MappingProxyType
from typing import Final

from narrows.broker.cli.tables import Table
from narrows.broker.config import BrokerConfig, load_config
from narrows.broker.process import Service
from narrows.broker.storage import open_state_dir
from narrows.proto.address import parse_listen
from narrows.proto.codec import uncached_advice
from narrows.proto.config import described
from narrows.proto.errors import ConfigError

EMPTY: Final[Mapping[str, object]] = MappingProxyType({})

HELP_COLUMNS: Final = 78
"""Width of the settings in the help: they fit a terminal of 80 columns."""

_log = logging.getLogger("narrows.broker")


@dataclass(frozen=True)
class BrokerCommand:
    """The arguments of the command line."""

    config: Path | None
    flags: dict[str, object]
    """Values by dotted key; they win over the file."""
    assignments: Sequence[str]
    """KEY=VALUE texts of `--set`."""
    events: Path | None
    ready_file: Path | None


def run_broker(command: BrokerCommand) -> None:
    """Serves until the run has ended or a signal comes. Raises NarrowsError."""
    config = _configuration(command)
    if advice := uncached_advice():
        _log.warning("%s", advice)
    service = Service(config, events=command.events)
    _stop_on_signals(service)
    _reload_on_signal(service, command)
    wires = service.wires
    _log.info(
        "serving on %s (data ports %d and %d); state in %s",
        wires.address,
        wires.uplink_port,
        wires.downlink_port,
        config.broker.state_dir,
    )
    address = join_address(wires.address)
    if config.security.keys:
        _log.info("invite a site with: narrows keys invite NAME --address %s", address)
    else:
        _log.info("join with: narrows learner --broker %s --name NAME", address)
    if command.ready_file is not None:
        # Renamed, so that a script that waits for the file never reads half of the address.
        temporary = command.ready_file.with_suffix(".tmp")
        temporary.write_text(wires.address + "\n")
        temporary.rename(command.ready_file)
    _log.info("stopped: %s", service.run())
    if service.hangs:
        # A thread is stuck in a system call; Python would wait for it for ever.
        _log.error("the disk does not answer; leaving without the journal's last records")
        os._exit(1)


def renew_run_secret(command: BrokerCommand) -> None:
    """Makes a new secret for the run in the state directory. Raises NarrowsError, OSError."""
    config = _configuration(command)
    with open_state_dir(config) as state_dir:
        path = state_dir.renew_secret()
    print(
        f"{path} is new. What learners were told before proves nothing now: one that has met a\n"
        "broker of a higher term is refused (wrong_epoch) until it is started again. Copy the new\n"
        "file to every standby and into the backup. The model and its rounds are as they were."
    )


def join_address(listen: str) -> str:
    """Address that learners dial. Nobody can dial a wildcard, so HOST stands for the broker's
    name."""
    host, port = parse_listen(listen)
    return f"tcp://HOST:{port}" if host in ("*", "0.0.0.0", "[::]") else listen


def read_configuration(
    path: Path | None, assignments: Sequence[str], flags: Mapping[str, object] = EMPTY
) -> BrokerConfig:
    """The settings that the file `path`, `flags` and the texts of `--set` make, in this order.

    Raises ConfigError.
    """
    return load_config(path, {**flags, **assigned(assignments)})


def _configuration(command: BrokerCommand) -> BrokerConfig:
    return read_configuration(command.config, command.assignments, command.flags)


def settings_help() -> str:
    """Every setting as `--set` takes it, with its default and its possible values, in Markdown."""
    table = Table(("setting", "default", "takes"), left=("default", "takes"))
    for row in described(BrokerConfig):
        table.add(*row)
    rows = [line.text for line in table.lines(None)]
    indent = " " * rows[0].index("takes")
    lines = "\n".join(fill(row, HELP_COLUMNS, subsequent_indent=indent) for row in rows)
    head = "Settings of --config and --set; broker/config.py has the reason of each:"
    return f"{head}\n\n```text\n{lines}\n```"


def assigned(assignments: Sequence[str]) -> dict[str, object]:
    """The values of `--set`, by dotted key. Raises ConfigError."""
    values: dict[str, object] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError("--set", expected="KEY=VALUE", got=repr(assignment))
        values[key.strip()] = _value(value.strip())
    return values


def _value(text: str) -> object:
    """A TOML value, or the text itself where quotes were left out: 2, 0.5, true, 1.5s."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _reload_on_signal(service: Service, command: BrokerCommand) -> None:
    """Has SIGHUP read the rates again. An error keeps the old ones: the run must go on."""

    def reload(_number: int, _frame: FrameType | None) -> None:
        try:
            service.reload(_configuration(command))
        except (ConfigError, OSError) as error:
            _log.error("the configuration was not read again: %s", error)

    signal.signal(signal.SIGHUP, reload)


def _stop_on_signals(service: Service) -> None:
    """Has the first signal stop the broker in order, and the second one at once."""
    asked = False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        name = signal.Signals(number).name
        if asked:
            os.write(2, f"narrows: second {name}, leaving at once\n".encode())
            os._exit(1)
        asked = True
        service.stop(f"the broker was stopped by {name}")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
