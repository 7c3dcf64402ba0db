"""Whether a run fits its machines, and the settings with which it does. [pure]

A plan leaves a fifth of every resource free. The figures behind it are measured on one machine, and
a run that just fits on paper would be late at the first lost packet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from narrows.broker.config import BrokerConfig
from narrows.broker.planning import costs
from narrows.broker.planning.demand import RunPlan, Site

USABLE: Final = 0.8
"""Share of every resource that a plan may fill. Repairs, joiners and bursts need the rest."""

LATE_STEPS_MAX: Final = 5
"""Steps (tau) up to which staleness costs next to nothing (Streaming DiLoCo, arXiv 2501.18512)."""

SYNC_PERIODS: Final = (10, 15, 20, 24, 30, 40, 50, 75, 100, 150, 200, 300, 500)
"""Sync periods (H, in steps) that a plan may choose. 10 is the best that was measured here; papers
use 24 to 100."""


@dataclass(frozen=True)
class Load:
    """The need for one resource; `unit` is bit/s, bytes, bytes/s, cores, steps or rounds."""

    name: str
    needed: float
    available: float
    unit: str
    remedy: str
    is_shared: bool = True
    """True if more brokers make it smaller."""

    @property
    def share(self) -> float:
        """The need as a share of what is available; above 1 it is not there at all."""
        assert self.needed >= 0 and self.available > 0, self
        return self.needed / self.available

    @property
    def fits(self) -> bool:
        return self.share <= USABLE


def loads_of(plan: RunPlan) -> tuple[Load, ...]:
    """Every resource, of one learner or of one broker."""
    loads = (*_line_loads(plan), *_broker_loads(plan), *_time_loads(plan))
    assert len({load.name for load in loads}) == len(loads), "names tell loads apart"
    return loads


def fits(plan: RunPlan) -> bool:
    """Whether no resource is filled beyond USABLE."""
    return all(load.fits for load in loads_of(plan))


def bottleneck(plan: RunPlan) -> Load:
    """The resource with the largest share."""
    return max(loads_of(plan), key=lambda load: load.share)


def make_plan(site: Site, config: BrokerConfig) -> RunPlan:
    """The plan with the fewest brokers and the shortest sync period that fit.

    Memory alone decides first how many brokers there are at least. Then the sync period grows until
    everything else fits, because more brokers cost machines and a longer period costs little. If
    none is long enough, the plan has the longest period and more brokers.
    """
    periods = (site.sync_period_steps,) if site.sync_period_steps else SYNC_PERIODS
    plans = [_enough_memory(RunPlan(site, config, period)) for period in periods]
    plan = _enough_brokers(next((plan for plan in plans if fits(plan)), plans[-1]))
    assert 1 <= plan.brokers <= plan.fragments, f"{plan.brokers} brokers"
    return plan


def _enough_brokers(plan: RunPlan) -> RunPlan:
    """The same plan with more brokers if that is enough; unchanged if no number of them is."""
    brokers = plan.brokers
    while True:
        several = replace(plan, brokers=brokers)
        fullest = max(load.share for load in loads_of(several) if load.is_shared)
        if fullest <= USABLE:
            return several
        if brokers >= plan.fragments:
            return plan
        # Nearly all loads fall as one over the number of brokers, so this guess is hardly ever low.
        wanted = math.ceil(min(brokers * fullest / USABLE, plan.fragments))
        brokers = min(max(brokers + 1, wanted), plan.fragments)
        assert several.brokers < brokers, "the search must end"


def _enough_memory(plan: RunPlan) -> RunPlan:
    """The same plan with the smallest number of brokers whose memory is enough; 1 if none is.

    A broker owns whole fragments, so a fragment that is too large to be merged stays too large.
    """
    # Memory of a round does not shrink with more brokers, so only the rest can hold the state.
    free = USABLE * plan.site.broker_memory_bytes - plan.round_memory_bytes
    brokers = max(1, math.ceil(plan.state_memory_bytes / free)) if free > 0 else 1
    return replace(plan, brokers=brokers if brokers <= plan.fragments else 1)


def _line_loads(plan: RunPlan) -> tuple[Load, ...]:
    up, down = plan.up_bits_per_s, plan.down_bits_per_s
    line, hub = plan.site.line_bits_per_s, plan.site.broker_line_bits_per_s
    peers = plan.site.learners / plan.brokers
    longer = _longer_period(plan, max(up, down) / line)
    own = f"{longer}, coarser codes, or a faster line of the learners (--wan)"
    longer = _longer_period(plan, peers * max(up, down) / hub)
    hubs = f"{longer}, coarser codes, or a faster line (--broker-wan)"
    return (
        Load("line of a learner, out", up, line, "bit/s", own, is_shared=False),
        Load("line of a learner, in", down, line, "bit/s", own, is_shared=False),
        Load("line of the broker, in", peers * up, hub, "bit/s", hubs),
        Load("line of the broker, out", peers * down, hub, "bit/s", hubs),
    )


def _longer_period(plan: RunPlan, share: float) -> str:
    """The remedy for a line: traffic falls as one over the sync period."""
    assert share >= 0, share
    if share <= USABLE:
        return "a longer sync period"
    return f"a sync period of {math.ceil(plan.sync_period_steps * share / USABLE)} steps"


def _broker_loads(plan: RunPlan) -> tuple[Load, ...]:
    site, peers = plan.site, plan.site.learners / plan.brokers
    cores = peers * (plan.up_bits_per_s + plan.down_bits_per_s) / costs.BITS_PER_CORE_S
    disk = plan.disk_bytes_per_s / plan.brokers
    return (
        Load(
            "cores of the broker", cores,
            min(site.broker_cores, costs.CORES_OF_A_BROKER), "cores",
            "a longer sync period or faster cores; one broker uses at most "
            f"{costs.CORES_OF_A_BROKER}",
        ),
        Load(
            "memory of the broker", plan.broker_memory_bytes, site.broker_memory_bytes, "bytes",
            "more memory (--broker-memory) or more fragments",
        ),
        Load(
            "disk of the broker", disk, site.disk_bytes_per_s, "bytes/s",
            "a longer sync period, a faster disk (--disk), or from six learners on "
            'broker.journal = "merged"',
        ),
    )  # fmt: skip


def _time_loads(plan: RunPlan) -> tuple[Load, ...]:
    return (
        Load(
            "rounds in flight", plan.round_s / plan.spacing_s / plan.brokers,
            plan.rounds_in_flight, "rounds",
            "a larger merge.rounds_in_flight, or a faster line of the broker (--broker-wan)",
        ),
        Load(
            "lateness of an update", plan.exchange_s / plan.site.step_s, LATE_STEPS_MAX,
            "steps", "more fragments (fragments.count) or faster lines (--wan, --broker-wan)",
            is_shared=False,
        ),
    )  # fmt: skip
