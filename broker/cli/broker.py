"""`narrows broker`: configuration from file and flags, signals, and a service that serves."""

from __future__ import annotations

import logging
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Final

from narrows.broker.config import assigned, load_broker
from narrows.broker.process.service import LimitRepeats, Service, log
from narrows.broker.store import History
from narrows.broker.store.history import DATABASE
from narrows.proto.codec import uncached_advice
from narrows.proto.config import check_output
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
    resume: bool = False,
) -> None:
    """Serves until the run has ended or a signal comes. Raises NarrowsError and OSError.

    `flags` are settings by dotted key, None for those that were not given; `assignments` are the
    texts of `--set key=value`, which win. With `resume` the state directory must hold a run.
    """
    given = {key: text for key, text in flags.items() if text is not None}
    loaded = load_broker(config, given | assigned(assignments))
    for flag, file in {"--events": events, "--ready-file": ready_file}.items():
        if file is not None:
            check_output(file, flag)
    if resume:
        _need_run(Path(loaded.broker.state_dir))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    log.addFilter(LimitRepeats())
    advice = uncached_advice()
    if advice:
        log.warning("%s", advice)
    # A learner has nine connections, so the usual soft limit of 1,024 files is used up by a hundred
    # learners, or by a stranger who opens as many connections.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    service = Service(loaded, events=events)
    _stop_on_signals(service)
    address = service.sockets.listens_on
    log.info("serving on %s; state in %s", address, loaded.broker.state_dir)
    if ready_file is not None:
        # Renamed, so that nobody who waits for the file reads half of the address.
        temporary = ready_file.with_name(ready_file.name + ".tmp")
        temporary.write_text(address + "\n")
        temporary.rename(ready_file)
    if service.host.syncer.state.phase is Phase.ENDED:
        log.info(
            "this run has ended: the final model is served for %.0f s at least; "
            "a new run needs another --state-dir", LEAVE_S,
        )  # fmt: skip
    finished = service.run()
    if finished.missing:
        log.warning("without the final model: %s", "; ".join(finished.missing))
    if service.is_saved:
        log.info("stopped; everything is durable in %s", loaded.broker.state_dir)
    else:
        log.info("stopped")


def _need_run(folder: Path) -> None:
    """Raises ConfigError unless a state directory holds version 0 of a run."""
    got = "no run"
    file = folder / DATABASE
    if file.exists() and file.stat().st_size:
        with closing(History(folder)) as history:
            if history.run.layout is not None:
                return
        got = "a run without version 0"
    raise ConfigError(
        f"{folder}: there is nothing to resume",
        expected="the state directory of a run that has begun",
        got=got,
        remedy="Is its volume mounted? A new run is begun without --resume",
    )


def _stop_on_signals(service: Service) -> None:
    """The first signal ends the broker in order, the second one at once. SIGUSR1 has it write its
    last inputs."""
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
    signal.signal(signal.SIGUSR1, lambda *_: service.write_inputs())
