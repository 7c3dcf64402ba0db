"""Connects a training thread to the broker, through a background thread that has the sockets.

The training thread only copies (snapshot, adopt). It hands events over and reads the background's
view; encoding, decoding, sending and waiting happen behind its back. One lock guards the session;
nobody copies while holding it.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from msgspec import structs

from narrows.learner.module import DeviceParameters, DeviceSnapshot
from narrows.learner.session import JoinWatch, SessionView
from narrows.learner.session import events as ev
from narrows.learner.transport.datapath import OUT_OF_MEMORY, reason_of
from narrows.learner.transport.options import ClientOptions
from narrows.learner.transport.push import rounded_base
from narrows.learner.transport.thread import Background
from narrows.proto.codec import F32, empty_f32
from narrows.proto.errors import Unfinished
from narrows.proto.fragments import Fragment
from narrows.proto.terms import Ranges

_log = logging.getLogger("narrows.learner")

SAY_S = 5.0
"""A learner that waits logs so often what it waits for."""


@dataclass
class _Times:
    """Seconds that the training thread spent here, and the versions that it adopted."""

    adopt_s: float = 0.0
    snapshot_s: float = 0.0
    waited_s: float = 0.0
    versions_adopted: int = 0


class Client:
    """Connects one process to the broker. Make it, `start`, `boundary` per step, `finish`."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self.background = Background(options)
        self._times = _Times()
        #: Sum of the versions adopted when the learner joined: 0 if the run began with it.
        self.joined_version_sum = 0
        self._run_step = self._run_tokens = self._progress = 0.0
        self._joined = False

    def start(self) -> None:
        """Blocks until every fragment is adopted, and says meanwhile what it waits for.

        Raises Refused if the broker refuses this learner, or has not admitted it or its key within
        `join_timeout_s`; BrokerUnreachable after that time without a sign of a broker, or with
        data due and a data port, which it names, that lets nothing through.
        """
        try:
            self.background.start()
            self._join()
        # Also at a KeyboardInterrupt: the broker would wait for a learner that never trains.
        except BaseException:
            self.abort()
            raise
        view = self._view
        self.joined_version_sum = sum(view.adopted)
        self._joined = True
        _log.info("joined run %s at versions %s", view.run_id, _span(view.adopted))

    def _join(self) -> None:
        said_at = time.monotonic()
        watch = JoinWatch(self._options.broker, self._options.join_timeout_s, said_at)
        while not self.background.view.joined:
            # A thread that waits is at a boundary: it adopts each fragment as soon as it is there.
            self._at_boundary(ev.BoundaryReached())
            self.background.wait(0.1)
            now, view = time.monotonic(), self.background.view
            data = view.data if view.session.online else None
            if (error := watch.look(data, now)) is not None:
                # A broker that has said why it does not admit us is there, and knows better.
                raise view.session.not_admitted or view.obstacle or error
            if now - said_at >= SAY_S:
                said_at = now
                _log.info("waiting for %s (%s)", view.session.waits_for, self._options.broker)

    def boundary(self, tokens: int, loss: float | None) -> None:
        """Call after each inner step: adopts and snapshots what is due. Never waits for the
        network, except in the lockstep modes or after `max_offline`.

        Raises Refused, and what the parameters raise when they are copied, but for a lack of
        memory: what could not be copied is copied at a later boundary, or its round declined."""
        self._copy(*self.background.step(tokens, loss))
        if self._view.must_wait(time.monotonic()):
            self._wait()

    def skipped(self, tokens: int) -> None:
        """Counts tokens whose optimizer step never happened."""
        self._at_boundary(ev.StepSkipped(tokens))

    def pause(self, reason: str) -> None:
        """No boundary will come for a while: rounds are declined with `reason`, "evaluating"."""
        # Messages have a limit, and the reason may be any text of the user's.
        self._at_boundary(ev.Paused(reason[:200]))

    def resume(self) -> None:
        """Boundaries come again after a `pause`."""
        self._at_boundary(ev.Continued())

    def finish(self, timeout_s: float | None = None) -> None:
        """Answers what is in flight, adopts the final versions at the end of a run, says Bye.

        Waits for the broker as long as `learner.leaving` says, at most `timeout_s`. Raises Refused
        if the broker does not want this learner any more, Unfinished if the run has reached its
        goal and the learner does not get the final model."""
        said_at = time.monotonic()
        self._at_boundary(ev.LoopEnded(math.inf if timeout_s is None else timeout_s))
        while not (view := self._view).closed:
            if time.monotonic() - said_at >= SAY_S:
                said_at = time.monotonic()
                _log.info("leaving waits for %s", view.waits_for)
            self._at_boundary(ev.BoundaryReached())
            self.background.wait(0.05)
        # The thread ends first: nothing changes any more while the outcome is judged.
        self.abort()
        view = self._view
        if self.background.view.error is not None:
            raise self.background.view.error
        if view.should_stop and not view.final:
            raise Unfinished(f"left without {view.lacks}", got=f"versions {_span(view.adopted)}")
        if view.goal_tokens and not view.should_stop:
            _log.warning(
                "left at %.0f%% of the run's goal: this is not its final model", 100 * self.progress
            )

    def abort(self) -> None:
        """Leaves at once; control messages that were sent already get the linger time."""
        self.background.close()

    @property
    def should_stop(self) -> bool:
        """The goal is reached: no further inner step counts."""
        return self._view.should_stop

    @property
    def run_tokens(self) -> float:
        """The run's clock in tokens, never falling: after a restart of the broker it stands until
        the broker's clock is there again."""
        self._run_tokens = max(self._run_tokens, self._view.run_tokens(time.monotonic()))
        return self._run_tokens

    @property
    def run_step(self) -> float:
        """The run's clock in steps, never falling; see SessionView.run_step."""
        self._run_step = max(self._run_step, self._view.run_step(time.monotonic()))
        return self._run_step

    @property
    def progress(self) -> float:
        """Fraction of the goal, 0 to 1, never falling; 0 if the run has no goal."""
        self._progress = max(self._progress, self._view.progress(time.monotonic()))
        return self._progress

    @property
    def health(self) -> str:
        """State of the session with the broker, in one word."""
        return str(self._view.connection)

    @property
    def _view(self) -> SessionView:
        return self.background.view.session

    def standing(self) -> dict[str, str]:
        """Metadata for a file with the parameters: of which run, and whether the final model.

        The parameters are compared bit by bit with the published copies: after one step too many,
        or with other weights in their place, they are not the run's.
        """
        view, published = self._view, self.background.published()
        is_final = view.final and all(self._holds(each, published) for each in view.table)
        return {
            "narrows.final": str(is_final).lower(),
            "narrows.run": view.run_id,
            "narrows.versions": json.dumps(view.adopted),
            "narrows.run_tokens": str(int(self.run_tokens)),
            "narrows.goal_tokens": str(view.goal_tokens),
        }

    def _holds(self, fragment: Fragment, published: Mapping[int, F32]) -> bool:
        local = empty_f32(fragment.elements)
        self._options.host.snapshot(fragment, local)
        rounded = rounded_base(fragment, published[fragment.index], self._options.layout)
        # As integers: two NaNs with the same bits are the same parameter.
        return bool(np.array_equal(local.view(np.uint32), rounded.view(np.uint32)))

    def stats(self) -> dict[str, Any]:
        """Counters: bytes both ways, seconds of the training thread, the token ledger."""
        counters = self.background.data_path.counters
        return {
            **asdict(counters),
            **asdict(self._times),
            "up_bytes": counters.data_up_bytes + self.background.wires.control_up_bytes,
            "down_bytes": counters.data_down_bytes + self.background.wires.control_down_bytes,
            "ledger": structs.asdict(self.background.ledger()),
        }

    def _at_boundary(self, event: ev.Event) -> None:
        """Hands an event of the training thread over and does its copies."""
        self._copy(*self.background.hand_over(event))

    def _copy(self, copies: Sequence[ev.Copy], published: dict[int, F32]) -> None:
        """Makes copies. The session took them as made when it asked for them: it must hear of one
        that failed before anything else."""
        for place, copy in enumerate(copies):
            try:
                self._make(copy, published)
            except BaseException as error:
                passes = isinstance(error, OUT_OF_MEMORY) and self._joined
                # After an error that is raised no later copy is made: they are all due again.
                for undone in copies[place : place + 1] if passes else copies[place:]:
                    self.background.hand_over(ev.CopyFailed(undone, reason_of(error)))
                if not passes or self._leaves_quietly:
                    raise

    @property
    def _leaves_quietly(self) -> bool:
        """No boundary comes at which a copy that failed is made, nor does `finish` raise."""
        view = self._view
        return view.closed and (view.final or not view.should_stop)

    def _make(self, copy: ev.Copy, published: dict[int, F32]) -> None:
        match copy:
            case ev.Snapshot(fragment):
                self._snapshot(copy, published[fragment])
            case ev.Adopt(fragment, version):
                self._adopt(fragment, version, published[fragment])
            case ev.SendFounding(fragment, ranges):
                self._send_founding(fragment, ranges)

    def _adopt(self, fragment: int, version: int, values: F32) -> None:
        started = time.perf_counter()
        target = self._view.table[fragment]
        assert values.shape == (target.elements,), (values.shape, target)
        self._options.host.adopt(target, values)
        self._times.adopt_s += time.perf_counter() - started
        # Version 0 is where everybody starts; nobody has learned it.
        self._times.versions_adopted += version > 0

    def _snapshot(self, effect: ev.Snapshot, base: F32) -> None:
        started = time.perf_counter()
        fragment, host = self._view.table[effect.fragment], self._options.host
        assert base.shape == (fragment.elements,), (base.shape, fragment)
        local: F32 | DeviceSnapshot
        if isinstance(host, DeviceParameters):
            # On a device the copy is only queued: training does not wait for it.
            local = host.capture(fragment)
        else:
            local = empty_f32(fragment.elements)
            host.snapshot(fragment, local)
        self._times.snapshot_s += time.perf_counter() - started
        self.background.start_push(effect, local, base)

    def _send_founding(self, index: int, ranges: Ranges) -> None:
        fragment = self._view.table[index]
        values = empty_f32(fragment.elements)
        self._options.host.snapshot(fragment, values)
        self.background.start_founding(fragment, values, ranges)

    def _wait(self) -> None:
        """Blocks while the session says so; answers rounds and adopts meanwhile."""
        started = said_at = time.monotonic()
        while self._view.must_wait(time.monotonic()):
            self.background.wait(0.05)
            self._at_boundary(ev.BoundaryReached())
            if time.monotonic() - said_at >= SAY_S:
                said_at = time.monotonic()
                _log.info("training waits for %s", self._view.waits_for)
        self._times.waited_s += time.monotonic() - started


def _span(versions: Sequence[int]) -> str:
    return f"{min(versions)}..{max(versions)}"
