"""The training thread's waits: it joins, passes boundaries, leaves, and waits where it must.

Whatever it waits for comes from the background loop of its link. It holds the link's lock while it
calls the host and moves parameters, and gives the lock away while it waits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from narrows.learner.boundary import Boundary
from narrows.learner.island import warm_up
from narrows.learner.link import Link, Stall
from narrows.learner.session import Session, View
from narrows.proto.codec import uncached_advice
from narrows.proto.errors import BrokerUnreachable, NarrowsError, Unfinished, printable
from narrows.proto.timing import HEARD_S

LOOK_S: Final = 0.02
"""A training thread that waits looks so often."""

Batch = TypeVar("Batch")
_log = logging.getLogger("narrows.learner")


class Exchange:
    """A learner's side of a run, as its training thread calls it."""

    leads = True
    """This process has the session and the sockets."""

    def __init__(self, link: Link, *, join_timeout_s: float, adopting: Callable[[], None]) -> None:
        """`adopting` is called before parameters move; an exception may still keep them."""
        self.link = link
        self._session = link.host.session
        self._join_timeout_s = join_timeout_s
        self._boundary = Boundary(link.host)
        self._boundary.adopting = lambda effect: adopting()

    @contextmanager
    def session(self) -> Generator[tuple[Session, float]]:
        """The session, for reading, and the time; nothing changes in the block."""
        with self.link.lock:
            yield self._session, time.monotonic()

    def view(self) -> View:
        """Answers what the training loop asks."""
        with self.session() as (session, now):
            return session.view(now)

    def join(self, ramp_steps: int) -> None:
        """Returns once every fragment is adopted. In a run under way the optimizer warms up for
        `ramp_steps`. Raises BrokerUnreachable, Refused."""
        target = self.link.target
        _log.info("joining %s as %s", target.broker, target.name)
        advice = uncached_advice()
        if advice:
            _log.warning("%s", advice)
        warm_up()
        self.link.start()
        with self.link.lock:
            self._await_model()
            bases = [part.base for part in self._session.parts]
            _log.info("the model is here: versions %s", bases)
            if max(bases) > 0:
                self._session.set_ramp(ramp_steps)
                if ramp_steps:
                    _log.info(
                        "the optimizer is empty, so it warms up for %d steps: multiply its learning"
                        " rate by lr_scale. With its state, loaded before the block, it does not",
                        ramp_steps,
                    )

    def _await_model(self) -> None:
        """Adopts what comes until the parameters stand on the run, and tells what is missing."""
        session = self._session
        stall = Stall(self._join_timeout_s)
        told = (logging.NOTSET, "")
        tells_at = math.inf
        while True:
            now = time.monotonic()
            self._boundary.perform(self._session.exchange_without_step, now)
            if session.joined:
                return
            self.link.raise_error()
            level, text = self._missing()
            if (level, text) != told:
                told = (level, text)
                # What hinders a connection is told once it is certain, the rest may pass.
                tells_at = now + (HEARD_S if session.obstacle is None else 0.0)
            if now >= tells_at:
                _log.log(level, "%s", printable(text))
                tells_at = math.inf
            # Who waits for version 0 of another learner does so as long as the broker answers.
            awaits_seed = session.connected and not session.beat.heads
            is_due = not awaits_seed or len(self.link.host.sender) > 0
            if stall.look(is_due, self.link.sent + self.link.received, now):
                raise self._unreachable()
            self.link.lock.wait(LOOK_S)

    def _missing(self) -> tuple[int, str]:
        """Level and text of a line on what a learner that joins has not got yet."""
        session = self._session
        if not session.connected:
            # A warning: a program that has not set logging up shows it, too.
            nobody = f"no answer from {self.link.target.broker} yet"
            reason = session.obstacle or session.refusal or nobody
            return logging.WARNING, f"{reason}; trying for {self._join_timeout_s:g} s"
        if session.beat.heads:
            return logging.INFO, "waits for the model, which is on its way"
        if len(self.link.host.sender) or None in self.link.host.seeds.values():
            return logging.INFO, "sends version 0, with which the run begins"
        return logging.WARNING, "the run has not begun: `narrows status` says what it waits for"

    def _unreachable(self) -> NarrowsError:
        session = self._session
        broker = self.link.target.broker
        if not session.connected:
            text = f"no broker answered at {broker} within {self._join_timeout_s:g} s"
            remedy = "is it running, and may this machine reach the port? `narrows status` asks"
            return session.obstacle or session.refusal or BrokerUnreachable(text, remedy=remedy)
        return BrokerUnreachable(
            f"the broker at {broker} answers, but no data moved for {self._join_timeout_s:g} s on"
            f" {session.blocked or self.link.silent_ports()}",
            remedy="data needs the two ports after control: open them in the firewall",
        )

    def boundary(self, tokens: int, loss: float | None, *, exchanges: bool = True) -> None:
        """After an inner step; waits where the run's mode or a long outage asks for it. Raises
        Refused, and what ended the background thread. Not `exchanges`: it only counts the step."""
        session = self._session
        with self.link.lock:
            now = time.monotonic()
            if exchanges:
                self.link.raise_error()
            self._boundary.perform(
                lambda: session.boundary(tokens, loss, now, exchanges=exchanges),
                now, exchanges=exchanges, is_step=True,
            )  # fmt: skip
            while exchanges and session.must_wait(time.monotonic()):
                self._wait()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches until it ends, or the run does."""
        if self.view().stopping:
            return
        for batch in loader:
            if self.view().stopping:  # The run has ended while the loader waited for its data.
                return
            yield batch
            if self.view().stopping:  # Before it asks for a batch that may never come.
                return

    def set_paused(self, reason: str | None) -> None:
        """No steps are made for a while; None: they are made again."""
        session = self._session
        with self.link.lock:
            now = time.monotonic()
            self._boundary.perform(lambda: session.pause(reason), now, exchanges=False)

    # For an island of ranks, whose boundaries exchange something only where it was due before.

    def due(self) -> bool:
        """Whether the boundary after the coming step exchanges something, waits or raises."""
        with self.session() as (session, now):
            return self.link.error is not None or session.due(now)

    def count(self, tokens: int) -> None:
        """Tokens of the last step that its boundary has not counted."""
        with self.link.lock:
            self._session.count(tokens)

    @property
    def fragments(self) -> int:
        """Number of fragments of the run; 0 before the first Welcome."""
        return len(self._session.parts)

    def finish(self, timeout_s: float | None, *, disowned: bool = False) -> None:
        """Leaves: with the final model if the run has ended. `disowned`: others have changed the
        parameters, see `Session`. Raises Unfinished, Refused."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        session = self._session
        with self.link.lock:
            now = time.monotonic()
            if disowned:
                self._boundary.perform(session.disown, now)
            self._boundary.perform(lambda: session.leave(now), now)
            while not session.ended and time.monotonic() < until:
                self._wait()
        self.abort(linger_s=1.0)
        if session.heard_ending and not session.final:
            got = f"versions {[part.base for part in session.parts]}"
            raise Unfinished("the run has ended without this learner", got=got)

    def abort(self, linger_s: float = 0.1) -> None:
        """Leaves at once, whatever is on its way; what was sent has `linger_s` to leave. A second
        call is harmless."""
        with self.link.lock:
            self._session.abandon()
            self.link.host.turn(time.monotonic())
        self.link.close(linger_s)

    def stats(self) -> dict[str, Any]:
        """Counters of this incarnation; bytes are those on the line."""
        with self.session() as (session, _):
            sender = self.link.host.sender
            return {
                "incarnation": session.incarnation, "steps": session.steps,
                "logged_tokens": session.tokens, "merged_tokens": session.merged_tokens,
                "lost_tokens": session.lost_tokens,
                "versions": [part.base for part in session.parts],
                "versions_behind": max(
                    (part.head - part.base for part in session.parts), default=0
                ),
                "up_bytes": sender.sent_bytes, "down_bytes": sender.received_bytes,
            }  # fmt: skip

    def metadata(self) -> dict[str, str]:
        """The metadata of a saved model."""
        with self.session() as (session, _):
            return {
                "format": "pt",
                "narrows.final": str(session.final).lower(),
                "narrows.run": session.run_id,
                "narrows.versions": str([part.base for part in session.parts]),
            }

    def write_inputs(self) -> None:
        """Writes the session's last inputs into a file."""
        self.link.write_inputs()

    def _wait(self) -> None:
        """Lets the background thread go on, and adopts what has come."""
        self.link.lock.wait(LOOK_S)
        self.link.raise_error()
        self._boundary.perform(self._session.exchange_without_step, time.monotonic())
