"""Twelve things that must hold in every run; each is proven by a planted bug (planted.py).

equal bytes     whoever holds a version holds the same bits, in every life of the broker
durable         nothing leaves the broker before its row is committed
replay          a start has what the last life had, bit for bit, or one durable round more
merged once     a learner believes of its push what the rows say, and no push counts twice
clock           the run's clock is the sum of the tokens in the rows
whole           whatever comes out of a call, parameters stand on the version that is pushed from
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from narrows.broker.process.host import Host
from narrows.learner import effects as do
from narrows.learner.fragment import Pushed, Standing
from narrows.learner.session import Session
from narrows.proto.codec import F32, digest_of
from narrows.proto.flow.budget import wire_bytes
from narrows.proto.messages import DataKind, Header
from narrows.proto.wire import decode_header

if TYPE_CHECKING:
    from narrows.bench.sim.run import Run, Site

SHARE_MIN: Final = 0.9
RATE_MAX: Final = 1.02


class Standings(NamedTuple):
    """Something here changes whenever a fragment is adopted or copied at a boundary."""

    base: int
    standing: Standing
    push_id: int


def standings(session: Session) -> list[Standings]:
    """How the fragments stand now."""
    return [Standings(part.base, part.standing, part.push_id) for part in session.parts]


class Wrong(Exception):
    """A checker found something."""


class Checkers:
    """Watches one run from outside, through what hosts send and what the store holds."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._copies: dict[tuple[int, int, int], int] = {}
        """(history, fragment, version) -> digest."""
        self._histories: dict[str, int] = {}
        """Epoch -> history: putting an older state back begins another one."""
        self._history = 0
        """From 1 on learners have seen versions that the broker no longer has."""
        self._left: list[tuple[int, Any]] = []
        """(version, digests) per fragment of the last life."""
        self._db: sqlite3.Connection
        """Reads the rows of this life of the broker, as `sqlite3 -readonly` would."""
        self._second: deque[tuple[float, int]] = deque()
        """(time, bytes) of what has left in the last second."""
        self._second_bytes = self._busiest_bytes = 0

    # -- while it runs

    def saw(self, header: Header, published: F32) -> None:
        """A learner has made a published copy."""
        self._equal(header.epoch, header.fragment, header.version, digest_of(published))

    def _equal(self, epoch: str, fragment: int, version: int, digest: int) -> None:
        key = (self._histories[epoch], fragment, version)
        if self._copies.setdefault(key, digest) != digest:
            raise Wrong(f"equal bytes: two different copies of version {version} of {fragment}")

    def sent(self, frames: list[bytes]) -> None:
        """A data message leaves the broker."""
        run, header = self._run, decode_header(frames[1])
        live = header.kind is DataKind.PUBLICATION and not header.incarnation
        copies = sum(site.line.subscribed for site in run.sites) if live else 1
        size = copies * wire_bytes([len(frame) for frame in frames], curve=False)
        self._second.append((run.world.now, size))
        self._second_bytes += size
        while self._second[0][0] <= run.world.now - 1.0:
            self._second_bytes -= self._second.popleft()[1]
        self._busiest_bytes = max(self._busiest_bytes, self._second_bytes)
        rows = "SELECT 1 FROM rounds WHERE fragment = ? AND version = ?"
        if header.version > 0 and not self._rows(rows, header.fragment, header.version):
            what = f"{header.kind.name} {header.version} of {header.fragment}"
            raise Wrong(f"durable: {what} left too early")

    def adopting(self, site: Site, effect: do.Adopt) -> None:
        """A learner is about to adopt: it must know what became of its push."""
        if self._run.host is None or not effect.push_id:
            return
        merged = self._rows(
            "SELECT 1 FROM contributions JOIN rounds USING (seq) WHERE incarnation = ?"
            " AND rounds.fragment = ? AND version <= ? AND push_id = ?",
            *(site.host.session.incarnation, effect.fragment, effect.version, effect.push_id),
        )
        if not self._history and bool(merged) != effect.merged:
            raise Wrong(f"merged once: {site.name} {effect}; in the rows: {bool(merged)}")

    def came_back(self, site: Site) -> None:
        """A training thread is in its loop again, with or without an exception."""
        for part in site.host.session.parts:
            version = site.island.versions.get(part.index)
            if part.standing is not Standing.ADRIFT and part.base != version:
                what = f"fragment {part.index} of {site.name} is taken to stand on {part.base}"
                raise Wrong(f"whole: {what}, and stands on {version} (None: on no version)")

    def stepped(self, site: Site, before: list[Standings]) -> None:
        """A boundary is over; `before` is how the fragments stood."""
        session = site.host.session
        exchanged = standings(session) != before
        if (exchanged or session.must_wait(self._run.world.now)) and not site.foretold:
            did = "exchanges" if exchanged else "waits"
            raise Wrong(f"foretold: {site.name} {did} at a boundary that was not due")

    # -- lives of the broker

    def killed(self, host: Host) -> None:
        """Remembers what a life had installed."""
        self._db.close()
        model = host.pipeline.model
        self._left = [(s.version, s.digests) for s in model.states] if model else []

    def restored(self) -> None:
        """An older state takes the place of the last one: its history is another from now on."""
        self._left = []
        self._history += 1

    def booted(self, host: Host) -> None:
        """A new life must have what the last one had."""
        self._db = sqlite3.connect(f"file:{self._run.path / 'run.db'}?mode=ro", uri=True)
        model, epoch = host.pipeline.model, host.syncer.state.epoch
        self._histories[epoch] = self._history
        states = model.states if model else []
        if self._left and len(states) != len(self._left):
            raise Wrong("replay: the run is gone after a start")
        for (version, digests), state in zip(self._left, states, strict=False):
            if not version <= state.version <= version + 1:
                raise Wrong(f"replay: {version} of {state.fragment} became {state.version}")
            if state.version == version and digests != state.digests:
                raise Wrong(f"replay: other bits in version {version} of {state.fragment}")
        for state in states:
            self._equal(epoch, state.fragment, state.version, state.digests.published)

    # -- at the end

    def finish(self) -> None:
        """Judges the run at rest."""
        run = self._run
        if run.host is None:
            raise Wrong("progress: the broker is down at the end")
        ((total,),) = self._rows("SELECT coalesce(sum(tokens), 0) FROM contributions")
        ((clock,),) = self._rows("SELECT clock FROM run")
        known = run.host.syncer.state.clock.tokens
        if not total == clock == known:
            raise Wrong(f"clock: {known}, stored {clock}, in rows {total}")
        rate, bits = float(run.config.wan.total_down), 8 * self._busiest_bytes
        if rate and bits > RATE_MAX * rate:
            raise Wrong(f"rate: {bits:,.0f} bits in a second of {rate:,.0f}")
        self._progress(run.host)
        for site in run.sites:
            self._share(site, run.host)
        self._leaks(run.host)
        self._db.close()

    def _progress(self, host: Host) -> None:
        run, heads = self._run, tuple(host.syncer.state.heads)
        if not heads or min(heads) < 1:
            raise Wrong(f"progress: only versions {heads}")
        ended = bool(run.config.run.goal_tokens) and host.finished is not None
        for site in run.sites:
            session = site.host.session
            versions = tuple(part.base if ended else part.tip for part in session.parts)
            if versions != heads and not (ended and site.left and not session.final):
                raise Wrong(f"progress: {site.name} has {versions}, the heads are {heads}")
            if ended and not session.final:
                raise Wrong(f"progress: {site.name} left without the final model")
        missing = host.finished.missing if host.finished else ()
        if ended and (lacking := [each for each in missing if each.startswith("site-")]):
            raise Wrong(f"progress: without the final model: {lacking}")

    def _share(self, site: Site, host: Host) -> None:
        """Everything that was trained is merged, is waiting, or is on the learner's account."""
        session, config = site.host.session, self._run.config
        parts, who = session.parts, "WHERE incarnation = ? GROUP BY fragment"
        query = f"SELECT fragment, sum(tokens) FROM contributions {who}"
        merged = dict(self._rows(query, session.incarnation))
        for part in parts:
            waiting = part.push.tokens if part.push and part.pushed.name != "MERGED" else 0
            known = merged.get(part.index, 0) + waiting + part.tokens + part.lost_tokens
            if not self._history and known < session.tokens:
                raise Wrong(f"share: {site.name} has lost {session.tokens - known} tokens")
        if self._history or site.lives > 1 or config.run.mode.value != "decoupled":
            return
        period_s = host.syncer.state.xi_s * config.fragments.sync_period_steps
        # Two periods and two repairs may be on their way, and at an absence work is given up.
        slack = 32 * (2 * period_s + 4.0) / site.step_s
        lost = sum(part.lost_tokens for part in parts) / len(parts)
        share = sum(merged.values()) / len(parts)
        if share < SHARE_MIN * (session.tokens - slack - lost):
            raise Wrong(f"share: {site.name}: {share:.0f} of {session.tokens} tokens merged")

    def _leaks(self, host: Host) -> None:
        kept = set(host.pipeline.pushes)
        waiting = {
            (each.incarnation, each.fragment, each.push_id)
            for round_ in host.syncer.state.rounds
            for each in round_.inbox.values()
        } | {
            (each.incarnation, index, each.push_id)
            for index, round_ in enumerate(host.syncer.state.rounds)
            for each in round_.taken
        }
        if stray := kept - waiting:
            raise Wrong(f"no leak: payloads of pushes that nobody waits for: {sorted(stray)[:3]}")
        for site in self._run.sites:
            parts = site.host.session.parts
            arriving = {(part.index, *key) for part in parts for key in part.arriving}
            if coding := [part.index for part in parts if part.pushed is Pushed.ENCODING]:
                raise Wrong(f"no leak: pushes of {site.name} are coded for ever: {coding}")
            if strange := site.host.payloads.keys() - arriving:
                raise Wrong(f"no leak: {site.name} keeps payloads of {sorted(strange)[:3]}")

    def _rows(self, sql: str, *arguments: object) -> list[Any]:
        return self._db.execute(sql, arguments).fetchall()
