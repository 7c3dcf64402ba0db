"""The learner's shell: a background thread with the sockets, and the training thread's door.

The training thread only copies (snapshot, adopt) and hands over; encoding, decoding, sending and
waiting happen behind its back. One lock guards the session; nobody copies while holding it.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from narrows.learner.module import DeviceParameters, DeviceSnapshot
from narrows.learner.session import Connection, DataConnection, DataConnections, JoinWatch
from narrows.learner.session import events as ev
from narrows.learner.transport.datapath import OUT_OF_MEMORY, reason_of
from narrows.learner.transport.push import rounded_base
from narrows.learner.transport.thread import Background, ParameterHost
from narrows.proto import messages as msg
from narrows.proto.codec import F32, STATE_CODEC, empty_f32
from narrows.proto.errors import Unfinished
from narrows.proto.flow import chunk_elements
from narrows.proto.fragments import Fragment
from narrows.proto.terms import Ranges

__all__ = ["Client", "ParameterHost"]

_log = logging.getLogger("narrows.learner")

SAY_S = 5.0
"""While it waits, a learner says so often what it waits for."""


@dataclass
class _Times:
    """Seconds of the training thread, and what it did with them."""

    adopt_s: float = 0.0
    snapshot_s: float = 0.0
    waited_s: float = 0.0
    versions_adopted: int = 0


class Client:
    """Connects one process to the broker. Make it, `start`, `boundary` per step, `finish`."""

    def __init__(
        self,
        *,
        broker: str,
        name: str,
        layout: tuple[msg.LayoutEntry, ...],
        frozen_digest: int,
        host: ParameterHost,
        join_timeout_s: float = 60.0,
        contribute_after_steps: int = 0,
        events: Path | None = None,
    ) -> None:
        self._broker, self._host = broker, host
        self._join_timeout_s = join_timeout_s
        self.background = Background(
            broker=broker,
            name=name,
            layout=layout,
            frozen_digest=frozen_digest,
            host=host,
            contribute_after_steps=contribute_after_steps,
            events=events,
        )
        self._session, self._exchange = self.background.session, self.background.exchange
        self._times = _Times()
        #: Sum of the versions adopted when the learner joined: 0 if the run began with it.
        self.joined_version_sum = 0
        self._run_step = 0.0
        self._joined = False

    def start(self) -> None:
        """Blocks until every fragment is adopted, and says meanwhile what it waits for.

        Raises Refused if the broker refuses this learner, or has not admitted it within
        `join_timeout_s`; BrokerUnreachable after that time without a sign of a broker, or with
        data due and a data port, which it names, that lets nothing through.
        """
        try:
            self.background.start()
            self._join()
        except BaseException:
            self.abort()
            raise
        self.joined_version_sum = sum(link.adopted for link in self._session.links)
        self._joined = True
        _log.info("joined run %s at versions %s", self._session.run_id, self._versions())

    def _versions(self) -> str:
        adopted = self._session.links.adopted
        return f"{min(adopted)}..{max(adopted)}"

    def _join(self) -> None:
        said_at = time.monotonic()
        watch = JoinWatch(self._broker, self._join_timeout_s, said_at)
        while not (self._session.ready and self.background.wires.uplink_open):
            self._at_boundary(ev.BoundaryReached())
            self.background.wait(0.1)
            now = time.monotonic()
            if (error := watch.look(self._data_path(), now)) is not None:
                raise self._session.not_admitted or error
            if now - said_at >= SAY_S:
                said_at = now
                _log.info("waiting for %s (%s)", self._session.waits_for, self._broker)

    def _data_path(self) -> DataConnections | None:
        """What is seen of the data connections; None without a session."""
        exchange, wires = self._exchange, self.background.wires
        with self.background.changed:
            if not self._session.online or exchange.settings is None:
                return None
            up_port, down_port = wires.ports
            sender, waits = exchange.sender, bool(self._session.links.fetching())
            came_bytes = exchange.counters.data_down_bytes
            return DataConnections(
                DataConnection(up_port, wires.uplink_open, not sender.is_idle, sender.told_bytes),
                DataConnection(down_port, wires.downlink_open, waits, came_bytes),
                4 * chunk_elements(exchange.settings, STATE_CODEC),
            )

    def boundary(self, tokens: int, loss: float | None) -> None:
        """Call after each inner step: adopts and snapshots what is due. Never waits for the
        network, except in the lockstep modes or after `max_offline`.

        Raises Refused, and what the parameters raise when they are copied, but for a lack of
        memory: what could not be copied is copied at a later boundary, or its round declined."""
        self._copy(*self.background.step(tokens, loss))
        if self._session.must_wait(time.monotonic()):
            self._wait()

    def skipped(self, tokens: int) -> None:
        """Tokens whose optimizer step never happened."""
        self._at_boundary(ev.StepSkipped(tokens))

    def pause(self, reason: str) -> None:
        """No boundary will come for a while (an evaluation): rounds are declined with `reason`."""
        self._at_boundary(ev.Paused(reason[:200]))

    def resume(self) -> None:
        self._at_boundary(ev.Continued())

    def finish(self, timeout_s: float | None = None) -> None:
        """Answers what is in flight, adopts the final versions at the end of a run, says Bye.

        Waits for the broker as long as `learner.leaving` says, at most `timeout_s`. Raises Refused
        if the broker does not want this learner any more, Unfinished if the run has reached its
        goal and the learner does not get the final model."""
        said_at, session = time.monotonic(), self._session
        self._at_boundary(ev.LoopEnded(math.inf if timeout_s is None else timeout_s))
        while session.connection not in (Connection.LEFT, Connection.REFUSED):
            if time.monotonic() - said_at >= SAY_S:
                said_at = time.monotonic()
                here = session.farewell.waits_for(session.phase, session.links)
                _log.info("leaving waits for %s", here if session.online else session.waits_for)
            self._at_boundary(ev.BoundaryReached())
            self.background.wait(0.05)
        self.abort()
        if self.background.error is not None:
            raise self.background.error
        if session.should_stop and not session.farewell.final:
            lacks = session.farewell.lacks
            raise Unfinished(f"left without {lacks}", got=f"versions {self._versions()}")
        if self.settings.goal_tokens and not session.should_stop:
            _log.warning(
                "left at %.0f%% of the run's goal: this is not its final model", 100 * self.progress
            )

    def abort(self) -> None:
        """Leaves at once; control messages that were sent already get the linger time."""
        self.background.close()

    @property
    def should_stop(self) -> bool:
        return self._session.should_stop

    @property
    def settings(self) -> msg.RunSettings:
        assert self._session.settings is not None, "start() first"
        return self._session.settings

    @property
    def run_tokens(self) -> float:
        """The run's clock now."""
        return self._session.run_tokens(time.monotonic())

    @property
    def run_step(self) -> float:
        """The run's clock in steps, never falling; without a setting, in inner steps of this
        learner's size, 0 before its first."""
        session = self._session
        own = session.tokens / session.steps if session.steps else 0.0
        tokens_per_step = self.settings.tokens_per_run_step or own
        if tokens_per_step:
            self._run_step = max(self._run_step, self.run_tokens / tokens_per_step)
        return self._run_step

    @property
    def progress(self) -> float:
        """Share of the goal, 0 to 1; 0 if the run has no goal."""
        goal = self.settings.goal_tokens
        return min(self.run_tokens / goal, 1.0) if goal else 0.0

    @property
    def health(self) -> str:
        return str(self._session.connection)

    def standing(self) -> dict[str, str]:
        """What a file with the parameters says of them: are they the final model of which run?

        Compared bit by bit with what the broker has published: a step too many, or weights that
        were put in their place, are not the run's.
        """
        session, settings = self._session, self._session.settings
        is_final = session.farewell.final and all(map(self._holds, self._exchange.table))
        return {
            "narrows.final": str(is_final).lower(),
            "narrows.run": session.run_id,
            "narrows.versions": json.dumps(session.links.adopted),
            "narrows.run_tokens": str(int(self.run_tokens)),
            "narrows.goal_tokens": str(settings.goal_tokens if settings else 0),
        }

    def _holds(self, part: Fragment) -> bool:
        local = empty_f32(part.elements)
        self._host.snapshot(part, local)
        layout = self._session.identity.layout
        published = rounded_base(part, self._exchange.published[part.index], layout)
        return bool(np.array_equal(local.view(np.uint32), published.view(np.uint32)))

    def stats(self) -> dict[str, Any]:
        """Counters: bytes both ways, seconds of the training thread, the token ledger."""
        counters = self._exchange.counters
        with self.background.changed:
            ledger = self._session.ledger.total()
        return {
            **asdict(counters),
            **asdict(self._times),
            "up_bytes": counters.data_up_bytes + self.background.wires.control_up_bytes,
            "down_bytes": counters.data_down_bytes + self.background.wires.control_down_bytes,
            "ledger": structs.asdict(ledger),
        }

    def _at_boundary(self, event: ev.Event) -> None:
        """Hands an event of the training thread over and does its copies."""
        self._copy(*self.background.hand_over(event))

    def _copy(self, copies: Sequence[ev.Copy], published: dict[int, F32]) -> None:
        """The session takes all copies as made: what is not, it must hear before anything else."""
        for place, copy in enumerate(copies):
            try:
                self._make(copy, published)
            except BaseException as error:
                passes = isinstance(error, OUT_OF_MEMORY) and self._joined
                for undone in copies[place : place + 1] if passes else copies[place:]:
                    self.background.hand_over(ev.CopyFailed(undone, reason_of(error)))
                if not passes or self._leaves_quietly:
                    raise

    @property
    def _leaves_quietly(self) -> bool:
        """No boundary comes at which a copy that failed is made, nor does `finish` raise."""
        session = self._session
        over = session.connection in (Connection.LEFT, Connection.REFUSED)
        return over and (session.farewell.final or not session.should_stop)

    def _make(self, copy: ev.Copy, published: dict[int, F32]) -> None:
        match copy:
            case ev.Snapshot(fragment):
                self._snapshot(copy, published[fragment])
            case ev.Adopt(fragment, version):
                self._adopt(fragment, version, published[fragment])
            case ev.SendFounding(fragment, ranges):
                self._found(fragment, ranges)

    def _adopt(self, fragment: int, version: int, values: F32) -> None:
        started = time.perf_counter()
        self._host.adopt(self._session.links[fragment].fragment, values)
        self._times.adopt_s += time.perf_counter() - started
        self._times.versions_adopted += version > 0

    def _snapshot(self, effect: ev.Snapshot, base: F32) -> None:
        started = time.perf_counter()
        part = self._session.links[effect.fragment].fragment
        local: F32 | DeviceSnapshot
        if isinstance(self._host, DeviceParameters):
            local = self._host.capture(part)
        else:
            local = empty_f32(part.elements)
            self._host.snapshot(part, local)
        self._times.snapshot_s += time.perf_counter() - started
        self.background.start_push(effect, local, base)

    def _found(self, fragment: int, ranges: Ranges) -> None:
        part = self._session.links[fragment].fragment
        values = empty_f32(part.elements)
        self._host.snapshot(part, values)
        self.background.later(lambda: self._exchange.found(fragment, values, ranges))

    def _wait(self) -> None:
        """Blocks while the session says so, answering rounds and adopting meanwhile."""
        started = said_at = time.monotonic()
        while self._session.must_wait(time.monotonic()):
            self.background.wait(0.05)
            self._at_boundary(ev.BoundaryReached())
            if time.monotonic() - said_at >= SAY_S:
                said_at = time.monotonic()
                _log.info("training waits for %s", self._session.waits_for)
        self._times.waited_s += time.monotonic() - started
