"""`narrows broker`: configuration from file and flags, signals, and a service that serves."""

from __future__ import annotations

import logging
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from narrows.broker.config import load_broker
from narrows.broker.process.log import LimitRepeats, log
from narrows.broker.process.service import Service
from narrows.proto.codec import uncached_advice
from narrows.proto.errors import ConfigError
from narrows.proto.messages import Phase
from narrows.proto.timing import LEAVE_S

FILES: Final = 16_384
"""Files that a broker of LEARNERS_MAX learners has open, and some room."""


def run_broker(
    config: Path | None,
    flags: Mapping[str, str | None],
    assignments: Sequence[str] = (),
    *,
    events: Path | None = None,
    ready_file: Path | None = None,
) -> None:
    """Serves until the run has ended or a signal comes. Raises NarrowsError and OSError.

    `flags` are settings by dotted key, None for those that were not given; `assignments` are the
    texts of `--set key=value`, which win.
    """
    given = {key: text for key, text in flags.items() if text is not None}
    loaded = load_broker(config, given | assigned(assignments))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    log.addFilter(LimitRepeats())
    if advice := uncached_advice():
        log.warning("%s", advice)
    # A learner has nine connections, so the usual soft limit of 1,024 files is that of a hundred
    # learners, or of a stranger who holds as many connections open.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    service = Service(loaded, events=events, environment=os.environ)
    _stop_on_signals(service)
    address = service.link.listens_on
    log.info("serving on %s; state in %s", address, loaded.broker.state_dir)
    if ready_file is not None:
        # Renamed, so that who waits for the file never reads half of the address.
        temporary = ready_file.with_name(ready_file.name + ".tmp")
        temporary.write_text(address + "\n")
        temporary.rename(ready_file)
    if service.host.syncer.state.phase is Phase.ENDED:
        log.info(
            "this run has ended: the final model is served for %.0f s at least; "
            "a new run needs another --state-dir", LEAVE_S,
        )  # fmt: skip
    if missing := service.run().missing:
        log.warning("without the final model: %s", "; ".join(missing))
    log.info("stopped; everything is durable in %s", loaded.broker.state_dir)


def assigned(assignments: Sequence[str]) -> dict[str, str]:
    """The values of `--set`, by dotted key. Raises ConfigError."""
    values: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError("--set", expected="KEY=VALUE", got=repr(assignment[:200]))
        values[key.strip()] = value.strip()
    return values


def _stop_on_signals(service: Service) -> None:
    """The first signal ends the broker in order, the second one at once."""
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
