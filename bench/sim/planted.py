"""Ten bugs, one for each checker. A checker that does not find its bug checks nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from narrows.bench.sim.checkers import Wrong
from narrows.bench.sim.run import Run
from narrows.broker.process.host import Host
from narrows.broker.syncer.state import Stage
from narrows.learner.host import LearnerHost
from narrows.proto.errors import NarrowsError
from narrows.proto.messages import Header, Push


class WrongElement(LearnerHost):
    """One element of a copy is wrong, and nobody compares the digest."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        copy, assembled = self._island.copy, self.session.assembled

        def wrong(fragment: Any, values: Any) -> Any:
            values[0] += 1
            return copy(fragment, values)

        def trusting(header: Header, now: float, *, agrees: bool) -> bool:
            return assembled(header, now, agrees=True)

        self._island.copy = wrong  # type: ignore[method-assign]
        self.session.assembled = trusting  # type: ignore[method-assign]


class PublishesBeforeCommit(Host):
    """A version is installed and published while it is on its way to the disk."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        pipeline = self.pipeline

        def commit(fragment: int) -> None:
            version = pipeline._undurable[fragment]
            self.run(lambda: pipeline._store.commit(version), lambda result, now: None)
            # The loop hears at once what the disk has not done.
            self.run(lambda: None, lambda result, now: pipeline.durable(version, None, now))

        pipeline.commit = commit  # type: ignore[method-assign]


class ForgetsTheNewest(Host):
    """A start loses the newest round of a fragment, if no snapshot holds it."""

    def __init__(
        self, config: Any, wires: Any, pool: Any, store: Any, now: float, *a: Any, **o: Any
    ) -> None:
        store._db.execute(
            "DELETE FROM rounds WHERE seq = (SELECT max(seq) FROM rounds WHERE"
            " (fragment, version) NOT IN (SELECT fragment, version FROM snapshots))"
        )
        store._db.commit()
        super().__init__(config, wires, pool, store, now, *a, **o)


class SaysNobody(Host):
    """Publications do not tell whose pushes they hold."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        put = self.downlink.sender.put_live

        def nobody(topic: str, header: Header, payload: bytes) -> bool:
            empty = [getattr(header, name) for name in header.__struct_fields__[:-1]]
            return put(topic, Header(*empty), payload)

        self.downlink.sender.put_live = nobody  # type: ignore[method-assign]


class CountsTwice(Host):
    """The clock takes the tokens of a round twice when its learner is heard meanwhile."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        clock, calls = self.syncer.state.clock, iter(range(10**9))
        count = clock.count

        def twice(tokens: int, now: float) -> None:
            count(tokens * (2 if next(calls) % 7 == 6 else 1), now)

        clock.count = twice  # type: ignore[method-assign]


class DropsLate(Host):
    """A push counts against the newest version only; what comes late is dropped."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        control = self.syncer.control

        def newest_only(peer: str, site: str | None, message: Any, now: float) -> None:
            heads = self.syncer.state.heads
            known = isinstance(message, Push) and message.fragment < len(heads)
            if not known or message.base >= heads[message.fragment]:
                control(peer, site, message, now)

        self.syncer.control = newest_only  # type: ignore[method-assign]


class TooFast(Host):
    """The budget is ten per cent too wide."""

    def __init__(
        self, config: Any, wires: Any, pool: Any, store: Any, now: float, *a: Any, **o: Any
    ):
        super().__init__(config, wires, pool, store, now, *a, **o)
        if total := float(config.wan.total_down):
            self.downlink.sender.set_rate(now, total=1.1 * total)


class AnswersNothing(Host):
    """The broker answers each learner once and no more."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        serve, served = self.downlink.serve, set[tuple[str, int]]()

        def once(incarnation: str, fetch: Any, now: float) -> None:
            key = (incarnation, fetch.fragment)
            if key not in served:
                served.add(key)
                serve(incarnation, fetch, now)

        self.downlink.serve = once  # type: ignore[method-assign]


class KeepsForEver(LearnerHost):
    """Payloads of transfers that are over are kept."""

    def _drop_payloads(self) -> None:
        return


class LaunchesAll(Host):
    """Any number of rounds is on its way at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        rounds = self.syncer._rounds

        def idle(fragment: int) -> bool:
            return self.syncer.state.rounds[fragment].stage is Stage.IDLE

        rounds._has_room = idle  # type: ignore[method-assign]


@dataclass(frozen=True)
class Planted:
    """A bug and the word that its checker begins with."""

    checker: str
    host: type[Host] = Host
    learner: type[LearnerHost] = LearnerHost


PLANTED: Final = (
    Planted("equal bytes", learner=WrongElement),
    Planted("durable", PublishesBeforeCommit),
    Planted("replay", ForgetsTheNewest),
    Planted("merged once", SaysNobody),
    Planted("clock", CountsTwice),
    Planted("share", DropsLate),
    Planted("rate", TooFast),
    Planted("progress", AnswersNothing),
    Planted("no leak", learner=KeepsForEver),
    Planted("invariants", LaunchesAll),
)


def judge(seed: int, planted: Planted | None = None) -> str | None:
    """The verdict of the checkers on one seed; None: nothing is wrong."""
    plan = planted or Planted("")
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = Run(
                seed, Path(folder) / "state", host_class=plan.host, site_host_class=plan.learner
            )
            run.finish()
        except Wrong as wrong:
            return str(wrong)
        except (AssertionError, NarrowsError, LookupError) as error:
            return f"invariants: {type(error).__name__}: {error}"
    return None


def found_within(planted: Planted, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first seed in which the bug's own checker speaks, and its words; None: it never does."""
    for seed in seeds:
        said = judge(seed, planted)
        if said is not None and said.startswith(planted.checker):
            return seed, said
    return None
