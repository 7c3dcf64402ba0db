"""Whether a run fits its machines, and the settings with which it does. [pure]"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from narrows.broker.config import BrokerConfig
from narrows.broker.planning import costs
from narrows.broker.planning.demand import RunPlan, Site

USABLE: Final = 0.8
"""Share of every resource that a plan may fill: repairs, joiners and bursts take the rest."""

LATE_STEPS_MAX: Final = 5
"""tau up to which staleness costs next to nothing (Streaming DiLoCo, arXiv 2501.18512)."""

SYNC_PERIODS: Final = (10, 15, 20, 24, 30, 40, 50, 75, 100, 150, 200, 300, 500)
"""H that a plan may choose. 10 is the best that was measured here; papers use 24 to 100."""


@dataclass(frozen=True)
class Load:
    """What of one resource is needed; `unit` is bit/s, bytes, bytes/s, cores, steps or rounds."""

    name: str
    needed: float
    available: float
    unit: str
    remedy: str
    is_shared: bool = True
    """More brokers make it smaller."""

    @property
    def share(self) -> float:
        return self.needed / self.available

    @property
    def fits(self) -> bool:
        return self.share <= USABLE


def loads_of(plan: RunPlan) -> tuple[Load, ...]:
    """Every resource, of one learner or of one broker."""
    return (*_line_loads(plan), *_broker_loads(plan), *_time_loads(plan))


def fits(plan: RunPlan) -> bool:
    """Whether no resource is filled beyond USABLE."""
    return all(load.fits for load in loads_of(plan))


def bottleneck(plan: RunPlan) -> Load:
    """What is fullest."""
    return max(loads_of(plan), key=lambda load: load.share)


def make_plan(site: Site, config: BrokerConfig) -> RunPlan:
    """As few brokers as hold the model in memory, and the shortest sync period at which all else
    suffices; if none is long enough the longest, with more brokers."""
    periods = (site.sync_period_steps,) if site.sync_period_steps else SYNC_PERIODS
    plans = [_enough_memory(RunPlan(site, config, period)) for period in periods]
    plan = next((plan for plan in plans if fits(plan)), plans[-1])
    return _enough_brokers(plan)


def _enough_brokers(plan: RunPlan) -> RunPlan:
    """The same with more brokers if that helps where they share; unchanged if it does not."""
    brokers = plan.brokers
    while True:
        several = replace(plan, brokers=brokers)
        fullest = max(load.share for load in loads_of(several) if load.is_shared)
        if fullest <= USABLE:
            return several
        if brokers >= plan.fragments:
            return plan
        # Nearly all loads fall as one over the number.
        wanted = math.ceil(min(brokers * fullest / USABLE, plan.fragments))
        brokers = min(max(brokers + 1, wanted), plan.fragments)


def _enough_memory(plan: RunPlan) -> RunPlan:
    """The same with the smallest number of brokers whose memory suffices; 1 if none does: each
    owns whole fragments, so that a fragment too large to be merged stays too large."""
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
    """What is sent falls as one over the sync period."""
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
