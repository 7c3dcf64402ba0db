"""Fourteen bugs. A checker that finds none of those that are planted for it checks nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from narrows.bench.sim.checkers import Wrong
from narrows.bench.sim.run import Draw, Simulation
from narrows.broker.process.host import Host
from narrows.broker.store import Store
from narrows.broker.syncer.events import Commit
from narrows.broker.syncer.state import Stage
from narrows.learner.effects import Move
from narrows.learner.host import LearnerHost
from narrows.learner.session import Session
from narrows.proto.errors import NarrowsError
from narrows.proto.messages import Fetch, Header, Phase, Push

# Each of them changes a store or host, given as Any: it reaches into places that no type describes.


def copies_with_a_wrong_element(host: Any) -> None:
    """One element of a copy is wrong, and nobody compares the digest."""
    copy = host.island.copy
    assembled = host.session.assembled

    def wrong(fragment: Any, values: Any) -> Any:
        values[0] += 1
        return copy(fragment, values)

    host.island.copy = wrong
    host.session.assembled = lambda header, now, *, agrees: assembled(header, now, agrees=True)


def publishes_before_commit(host: Any) -> None:
    """A version is installed and published while it is on its way to the disk."""
    pipeline = host.pipeline

    def commit(order: Commit) -> None:
        version = pipeline._undurable[order.fragment]
        host.run(lambda: pipeline._store.commit(version), lambda result, now: None)
        # The loop hears at once what the disk has not done.
        host.run(lambda: None, lambda result, now: pipeline.durable(order, now))

    pipeline.commit = commit


def forgets_the_newest(store: Any) -> None:
    """A start loses the newest round of a fragment, if no snapshot holds it."""
    store._db.execute(
        "DELETE FROM rounds WHERE seq = (SELECT max(seq) FROM rounds WHERE"
        " (fragment, version) NOT IN (SELECT fragment, version FROM snapshots))"
    )
    store._db.commit()


def says_nobody(host: Any) -> None:
    """Publications do not tell whose pushes they hold."""
    put = host.downlink.sender.put

    def nobody(topic: str, header: Header, payload: bytes, *, requester: str) -> bool:
        silent = structs.replace(header, contributors=())
        return bool(put(topic, silent, payload, requester=requester))

    host.downlink.sender.put = nobody


def counts_twice(host: Any) -> None:
    """The clock takes the tokens of every seventh round twice."""
    clock = host.syncer.state.clock
    once = clock.count
    factors = cycle([1, 1, 1, 1, 1, 1, 2])
    clock.count = lambda tokens, now: once(tokens * next(factors), now)


def drops_late(host: Any) -> None:
    """A push counts against the newest version only; what comes late is dropped."""
    control = host.syncer.control

    def newest_only(peer: str, site: str | None, message: Any, now: float) -> None:
        heads = host.syncer.state.heads
        known = isinstance(message, Push) and message.fragment < len(heads)
        if not known or message.base >= heads[message.fragment]:
            control(peer, site, message, now)

    host.syncer.control = newest_only


def sends_too_fast(host: Any) -> None:
    """The budget is ten per cent too wide."""
    host.downlink.sender.total.bits_per_s *= 1.1


def answers_once(host: Any) -> None:
    """The broker answers each learner once for each fragment and no more."""
    serve = host.downlink.serve
    served = set[tuple[str, int]]()

    def once(incarnation: str, fetch: Fetch, now: float) -> None:
        key = (incarnation, fetch.fragment)
        if key not in served:
            served.add(key)
            serve(incarnation, fetch, now)

    host.downlink.serve = once


def keeps_for_ever(host: Any) -> None:
    """Payloads of transfers that are over are kept."""
    host._drop_payloads = lambda: None


def launches_all(host: Any) -> None:
    """Any number of rounds is on its way at once."""
    rounds = host.syncer.state.rounds
    host.syncer._rounds._has_room = lambda fragment: rounds[fragment].stage is Stage.IDLE


def forgets_the_end(host: Any) -> None:
    """A life begins as if the goal were not reached, and no learner remembers that it was."""
    if isinstance(host, LearnerHost):
        forgets = {"heard_ending": property(lambda session: False, lambda session, heard: None)}
        host.session.__class__ = type("Forgetful", (Session,), forgets)
    elif host.syncer.state.phase is Phase.ENDING:
        host.syncer.state.phase = Phase.RUNNING


def overlooks_adoptions(host: Any) -> None:
    """A boundary with nothing but an adoption is not due."""
    session = host.session
    due = session.due
    session.due = lambda now: due(now) and not any(part.can_adopt for part in session.parts)


def adopts_what_is_prepared(host: Any) -> None:
    """An adoption that a worker has prepared is taken, although its terms have changed."""
    tasks = host.tasks

    def stale() -> list[Any]:
        prepared = {index: ahead.prepared for index, ahead in host.ahead.items()}
        return [
            task._replace(prepared=prepared.get(task.fragment.index))
            if isinstance(task, Move)
            else task
            for task in tasks()
        ]

    host.tasks = stale


def ignores_an_interruption(host: Any) -> None:
    """An exchange that an exception broke off is taken for done."""
    host.session.broken_off = lambda reason, *, decided: None


@dataclass(frozen=True)
class Planted:
    """A bug, and the words that its checker begins with."""

    checker: str
    part: type[Store | Host | LearnerHost] | tuple[type[Host], type[LearnerHost]]
    plant: Callable[[Any], None]
    first_seed: int = 0
    """The search begins here: not every seed has what a bug needs."""

    def __call__(self, part: object) -> None:
        """Plants it, if this is the part that it belongs into."""
        if isinstance(part, self.part):
            self.plant(part)


PLANTED: Final = (
    Planted("equal bytes", LearnerHost, copies_with_a_wrong_element),
    Planted("durable", Host, publishes_before_commit),
    Planted("replay", Store, forgets_the_newest),
    Planted("merged once", Host, says_nobody),
    Planted("clock", Host, counts_twice),
    Planted("whole", LearnerHost, ignores_an_interruption),
    Planted("prepared", LearnerHost, adopts_what_is_prepared, first_seed=110),
    Planted("foretold", LearnerHost, overlooks_adoptions),
    Planted("share", Host, drops_late),
    Planted("rate", Host, sends_too_fast),
    Planted("progress", Host, answers_once),
    Planted("progress", (Host, LearnerHost), forgets_the_end, first_seed=13),
    Planted("no leak", LearnerHost, keeps_for_ever),
    Planted("invariants", Host, launches_all),
)


def judge(seed: int, spoil: Callable[[object], None] = lambda part: None) -> str | None:
    """The verdict of the checkers on one seed; None: nothing is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            Simulation(Draw(seed), Path(folder) / "state", spoil).finish()
        except Wrong as wrong:
            return str(wrong)
        except (AssertionError, NarrowsError, LookupError) as error:
            return f"invariants: {type(error).__name__}: {error}"
    return None
