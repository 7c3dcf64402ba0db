"""All attacks by name, with the throughput that the run must keep during each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from narrows.bench.attack import insiders, outsiders
from narrows.bench.attack.target import AttackTarget

Run = Callable[[AttackTarget], Iterator[int]]


@dataclass(frozen=True)
class Attack:
    """One attack. `run` never ends by itself and yields the number of attempts since."""

    run: Run
    floor: float
    """Least versions per second during the attack, relative to before."""

    @property
    def description(self) -> str:
        """First line of the attack's docstring."""
        return (self.run.__doc__ or "").splitlines()[0]


_OUTSIDERS: Final[Mapping[Run, float]] = {
    outsiders.null_client: 0.95,
    outsiders.unknown_key: 0.95,
    outsiders.wrong_server_key: 0.95,
    outsiders.random_bytes: 0.95,
    outsiders.idle_connections: 0.95,
    outsiders.half_handshakes: 0.90,
    outsiders.handshakes: 0.70,
}
_INSIDERS: Final[Mapping[Run, float]] = {
    insiders.status_flood: 0.80,
    insiders.refused_pushes: 0.80,
    insiders.founding_chunks: 0.80,
    insiders.fetches: 0.80,
    insiders.subscriptions: 0.80,
    insiders.heavy_control: 0.80,
    insiders.endless_multipart: 0.80,
    insiders.many_parts: 0.80,
    insiders.foreign_subscriptions: 0.80,
    insiders.joins: 0.80,
    insiders.connections: 0.80,
    insiders.names: 0.95,
    insiders.epochs: 0.95,
    insiders.wild_reports: 0.95,
    insiders.wild_pushes: 0.80,
    insiders.silent_member: 0.80,
}

ATTACKS: Final[Mapping[str, Attack]] = {
    run.__name__: Attack(run, floor) for run, floor in {**_OUTSIDERS, **_INSIDERS}.items()
}
