"""Thirteen things that must hold in every run; each is proven by a planted bug (planted.py).

equal bytes     whoever holds a version holds the same bits, in every life of the broker
durable         nothing leaves the broker before its row is committed
replay          a start has what the last life had, bit for bit, or one durable round more
merged once     a learner believes of its push what the rows say, and no push counts twice
clock           the run's clock is the sum of the tokens in the rows
whole           whatever comes out of a call, parameters stand on the version that is pushed from
prepared        what moves parameters was computed for the rule of this very boundary
foretold        no boundary exchanges or waits unless `due` has said so after the event before it
share           every learner's tokens are merged, whatever its speed
rate            no second carries more than 1.02 of the budget
progress        after the faults everybody is up to date; at the goal all have the final model
no leak         what is held belongs to something unfinished
invariants      `check()` of syncer and session, after every event
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from narrows.bench.sim.world import Line, World
from narrows.broker.config import BrokerConfig
from narrows.broker.process.host import Host
from narrows.broker.records import FragmentState
from narrows.learner import effects as do
from narrows.learner.fragment import Pushed, Standing
from narrows.learner.host import LearnerHost
from narrows.learner.session import Session
from narrows.proto.codec import F32, digest_of
from narrows.proto.flow.budget import wire_bytes
from narrows.proto.messages import DataKind, Header
from narrows.proto.ports import Prepared
from narrows.proto.wire import decode_header

SHARE_MIN: Final = 0.9
RATE_MAX: Final = 1.02


@dataclass(eq=False)
class Learner:
    """The parts of a simulated learner that the checkers look at."""

    name: str
    step_s: float
    """Mean seconds of its step."""
    line: Line
    host: LearnerHost = field(init=False)
    lives: int = 0
    """Processes so far."""
    left: bool = False
    """Its training loop is over."""
    adopting: do.Adopt = field(init=False, repr=False)
    """The adoption that its training thread is in, or was in last."""
    foretold: bool = False
    """The session's `due`, as it was after the newest event."""
    versions: dict[int, int] = field(default_factory=dict[int, int])
    """The version that every element of a fragment stands on, by fragment; one that was left half
    written has none."""


def standings(session: Session) -> list[object]:
    """Something here changes whenever a fragment is adopted or copied at a boundary."""
    return [(part.base, part.standing, part.push_id) for part in session.parts]


class Wrong(Exception):
    """A checker found something."""


class Sent(NamedTuple):
    """A data message of the broker."""

    at_s: float
    size_bytes: int


class Checkers:
    """Watches one run from outside, through what hosts send and what the store holds."""

    def __init__(self, world: World, path: Path) -> None:
        self._world = world
        self._path = path
        """The broker's state directory."""
        self._host: Host | None = None
        """The broker's life, if it has one now."""
        self._copies: dict[tuple[int, int, int], int] = {}
        """(history, fragment, version) -> digest."""
        self._histories: dict[str, int] = {}
        """Epoch -> history: putting an older state back begins another one."""
        self._history = 0
        """From 1 on learners have seen versions that the broker no longer has."""
        self._left: list[FragmentState] = []
        """The fragments of the last life."""
        self._db: sqlite3.Connection
        """Reads the rows of this life of the broker, as `sqlite3 -readonly` would."""
        self._second: deque[Sent] = deque()
        """The messages that have left in the last second."""
        self._busiest_bytes = 0
        """The most that has left in a second."""

    # -- while it runs

    def saw(self, header: Header, published: F32) -> None:
        """A learner has made a published copy."""
        self._equal(header.epoch, header.fragment, header.version, digest_of(published))

    def _equal(self, epoch: str, fragment: int, version: int, digest: int) -> None:
        key = (self._histories[epoch], fragment, version)
        if self._copies.setdefault(key, digest) != digest:
            raise Wrong(f"equal bytes: two different copies of version {version} of {fragment}")

    def sent(self, frames: list[bytes], learners: Sequence[Learner]) -> None:
        """A data message leaves the broker."""
        header = decode_header(frames[1])
        copies = 1
        if header.kind is DataKind.PUBLICATION and not header.incarnation:
            copies = sum(each.line.subscribed for each in learners)
        size = copies * wire_bytes([len(frame) for frame in frames], curve=False)
        self._second.append(Sent(self._world.now, size))
        while self._second[0].at_s <= self._world.now - 1.0:
            self._second.popleft()
        second_bytes = sum(each.size_bytes for each in self._second)
        self._busiest_bytes = max(self._busiest_bytes, second_bytes)

        rows = "SELECT 1 FROM rounds WHERE fragment = ? AND version = ?"
        if header.version > 0 and not self._rows(rows, header.fragment, header.version):
            what = f"{header.kind.name} {header.version} of {header.fragment}"
            raise Wrong(f"durable: {what} left too early")

    def adopting(self, learner: Learner, effect: do.Adopt) -> None:
        """A learner is about to adopt: it must know what became of its push."""
        learner.adopting = effect
        if self._host is None or not effect.push_id:
            return
        merged = self._rows(
            "SELECT 1 FROM contributions JOIN rounds USING (seq) WHERE incarnation = ?"
            " AND rounds.fragment = ? AND version <= ? AND push_id = ?",
            learner.host.session.incarnation, effect.fragment, effect.version, effect.push_id,
        )  # fmt: skip
        if not self._history and bool(merged) != effect.merged:
            raise Wrong(f"merged once: {learner.name} {effect}; in the rows: {bool(merged)}")

    def prepared(self, learner: Learner, given: Prepared, due: Prepared) -> None:
        """A learner's parameters are about to move by the one, and should by the other."""
        if given.keep != due.keep or not np.array_equal(given.out, due.out):
            raise Wrong(f"prepared: {learner.name} {learner.adopting} moves by another rule")

    def came_back(self, learner: Learner) -> None:
        """A training thread is in its loop again, with or without an exception."""
        for part in learner.host.session.parts:
            version = learner.versions.get(part.index)
            if part.standing is not Standing.ADRIFT and part.base != version:
                what = f"fragment {part.index} of {learner.name} is taken to stand on {part.base}"
                raise Wrong(f"whole: {what}, and stands on {version} (None: on no version)")

    def stepped(self, learner: Learner, before: list[object]) -> None:
        """A boundary is over; `before` is how the fragments stood."""
        session = learner.host.session
        is_spent = standings(session) != before or session.must_wait(self._world.now)
        if is_spent and not learner.foretold:
            raise Wrong(f"foretold: {learner.name} exchanges or waits at a boundary not due")

    # -- lives of the broker

    def killed(self) -> None:
        """Remembers what a life had installed."""
        assert self._host is not None
        self._db.close()
        self._left = _installed(self._host)
        self._host = None

    def restored(self) -> None:
        """An older state takes the place of the last one: its history is another from now on."""
        self._left = []
        self._history += 1

    def booted(self, host: Host) -> None:
        """A new life must have what the last one had."""
        self._host = host
        self._db = sqlite3.connect(f"file:{self._path / 'run.db'}?mode=ro", uri=True)
        epoch = host.syncer.state.epoch
        self._histories[epoch] = self._history
        found = _installed(host)
        if self._left and len(found) != len(self._left):
            raise Wrong("replay: the run is gone after a start")
        for left, state in zip(self._left, found, strict=False):
            if not left.version <= state.version <= left.version + 1:
                raise Wrong(f"replay: {left.version} of {state.fragment} became {state.version}")
            if state.version == left.version and left.digests != state.digests:
                raise Wrong(f"replay: other bits in version {left.version} of {state.fragment}")
        for state in found:
            self._equal(epoch, state.fragment, state.version, state.digests.published)

    # -- at the end

    def finish(self, config: BrokerConfig, learners: Sequence[Learner]) -> None:
        """Judges the run at rest."""
        host = self._host
        if host is None:
            raise Wrong("progress: the broker is down at the end")
        ((stored, total),) = self._rows(
            "SELECT clock, (SELECT coalesce(sum(tokens), 0) FROM contributions) FROM run"
        )
        known = host.syncer.state.clock.tokens
        if not total == stored == known:
            raise Wrong(f"clock: {known}, stored {stored}, in rows {total}")
        rate = float(config.wan.total_down)
        bits = 8 * self._busiest_bytes
        if rate and bits > RATE_MAX * rate:
            raise Wrong(f"rate: {bits:,.0f} bits in a second of {rate:,.0f}")
        self._progress(host, config, learners)
        for learner in learners:
            self._share(learner, host, config)
        _leaks(host, learners)
        self._db.close()

    def _progress(self, host: Host, config: BrokerConfig, learners: Sequence[Learner]) -> None:
        heads = list(host.syncer.state.heads)
        if min(heads, default=0) < 1:
            raise Wrong(f"progress: only versions {heads}")
        ended = host.finished is not None and config.run.goal_tokens > 0
        for learner in learners:
            session = learner.host.session
            if ended and not session.final:
                raise Wrong(f"progress: {learner.name} left without the final model")
            versions = [part.base if ended else part.tip for part in session.parts]
            if versions != heads:
                raise Wrong(f"progress: {learner.name} has {versions}, the heads are {heads}")
        missing = () if host.finished is None else host.finished.missing
        if ended and any(each.startswith("site-") for each in missing):
            raise Wrong(f"progress: without the final model: {missing}")

    def _share(self, learner: Learner, host: Host, config: BrokerConfig) -> None:
        """Everything that was trained is merged, is waiting, or is on the learner's account."""
        if self._history:
            return
        session = learner.host.session
        parts = session.parts
        query = (
            "SELECT fragment, sum(tokens) FROM contributions"
            " WHERE incarnation = ? GROUP BY fragment"
        )
        merged = dict(self._rows(query, session.incarnation))
        for part in parts:
            known = merged.get(part.index, 0) + part.tokens + part.lost_tokens
            if part.push and part.pushed is not Pushed.MERGED:
                known += part.push.tokens
            if known < session.tokens:
                raise Wrong(f"share: {learner.name} has lost {session.tokens - known} tokens")
        if learner.lives > 1 or config.run.mode.value != "decoupled":
            return

        period_s = host.syncer.state.xi_s * config.fragments.sync_period_steps
        # Two periods and two repairs may be on their way, and at an absence work is given up.
        slack = 32 * (2 * period_s + 4.0) / learner.step_s
        lost = sum(part.lost_tokens for part in parts) / len(parts)
        share = sum(merged.values()) / len(parts)
        if share < SHARE_MIN * (session.tokens - slack - lost):
            raise Wrong(f"share: {learner.name}: {share:.0f} of {session.tokens} tokens merged")

    def _rows(self, sql: str, *arguments: object) -> list[Any]:
        return self._db.execute(sql, arguments).fetchall()


def _installed(host: Host) -> list[FragmentState]:
    """The fragments as they stand in this life of the broker."""
    model = host.pipeline.model
    return [] if model is None else list(model.states)


def _leaks(host: Host, learners: Sequence[Learner]) -> None:
    waiting = set[tuple[str, int, int]]()
    for index, slot in enumerate(host.syncer.state.rounds):
        waiting |= {(each.incarnation, index, each.push_id) for each in slot.inbox.values()}
        waiting |= {(each.incarnation, index, each.push_id) for each in slot.taken}
    if stray := sorted(host.pipeline.pushes.keys() - waiting):
        raise Wrong(f"no leak: payloads of pushes that nobody waits for: {stray[:3]}")

    for learner in learners:
        parts = learner.host.session.parts
        if coding := [part.index for part in parts if part.pushed is Pushed.ENCODING]:
            raise Wrong(f"no leak: pushes of {learner.name} are coded for ever: {coding}")
        arriving = {(part.index, *key) for part in parts for key in part.arriving}
        if strange := sorted(learner.host.payloads.keys() - arriving):
            raise Wrong(f"no leak: {learner.name} keeps payloads of {strange[:3]}")
