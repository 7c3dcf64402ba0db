"""What a run will need: rates, memory, disk and brokers, before anything is started. [pure]

Rates are those of a steady run; the first copies of the model come on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from narrows.broker import costs
from narrows.broker.config import BrokerConfig
from narrows.proto.errors import ConfigError
from narrows.proto.limits import ELEMENTS_MAX, FRAGMENTS_MAX, LEARNERS_MAX, PUBLICATIONS_KEPT

USABLE: Final = 0.8
"""Share of every resource that a plan may fill: repairs, joiners and bursts take the rest."""

CHECKPOINT_DISK_SHARE: Final = 0.25
"""Of the disk's rate that checkpoints may take."""

CHECKPOINT_VERSIONS_MAX: Final = 1_000_000

FRAGMENT_PARAMS_MAX: Final = 1 << 30
"""Larger fragments need more memory to merge than is reasonable: 20 bytes each."""

LATE_STEPS_MAX: Final = 5
"""tau up to which staleness costs next to nothing (Streaming DiLoCo, arXiv 2501.18512)."""

SYNC_PERIODS: Final = (10, 15, 20, 24, 30, 40, 50, 75, 100, 150, 200, 300, 500)
"""H that a plan may choose. 10 is the best that was measured here; papers use 24 to 100."""


@dataclass(frozen=True)
class Site:
    """What is asked: the model, the learners, and what the machines have.

    Raises ConfigError for values that no run can have.
    """

    params: int
    step_s: float
    learners: int
    line_bits_per_s: float
    """Of one learner, in each direction."""
    broker_line_bits_per_s: float
    broker_memory_bytes: int
    broker_cores: int
    disk_bytes_per_s: float
    fragments: int = 0
    """0: the plan chooses."""
    sync_period_steps: int = 0
    """0: the plan chooses."""

    def __post_init__(self) -> None:
        _within("params", self.params, 1, ELEMENTS_MAX)
        _within("learners", self.learners, 1, LEARNERS_MAX)
        _within("fragments", self.fragments, 0, min(FRAGMENTS_MAX, self.params))
        _within("sync period", self.sync_period_steps, 0, 1_000_000)
        _within("step (seconds)", self.step_s, 1e-6, 1e6)
        _within("line (bit/s)", self.line_bits_per_s, 1.0, 1e18)
        _within("broker line (bit/s)", self.broker_line_bits_per_s, 1.0, 1e18)
        _within("broker memory (bytes)", self.broker_memory_bytes, 1, 1 << 60)
        _within("broker cores", self.broker_cores, 1, 10_000)
        _within("disk (bytes/s)", self.disk_bytes_per_s, 1.0, 1e15)


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


@dataclass(frozen=True)
class Plan:
    """The answer for one sync period and number of brokers, each with a machine and a line of its
    own. Rates in bit/s on the wire, headers of every layer included."""

    site: Site
    config: BrokerConfig
    sync_period_steps: int
    brokers: int = 1

    @cached_property
    def fragments(self) -> int:
        """P. One per step, as in the paper, unless that makes them too large or too small."""
        if self.site.fragments:
            return self.site.fragments
        smallest = math.ceil(self.site.params / FRAGMENT_PARAMS_MAX)
        chunks = max(1, self.site.params // self.config.codec.chunk_elements)
        return min(max(smallest, min(self.sync_period_steps, chunks)), FRAGMENTS_MAX)

    @property
    def fragment_params(self) -> float:
        return self.site.params / self.fragments

    @property
    def spacing_s(self) -> float:
        """From the launch of one round to that of the next."""
        return self.sync_period_steps * self.site.step_s / self.fragments

    @property
    def rounds_in_flight(self) -> int:
        return min(self.config.merge.rounds_in_flight, self.fragments)

    @cached_property
    def push_bits(self) -> float:
        """Per parameter on the wire."""
        codec = self.config.codec
        return self._wire(costs.payload_bits(codec.push, codec.push_rho, codec.push_bits))

    @cached_property
    def publish_bits(self) -> float:
        """Per parameter on the wire."""
        codec = self.config.codec
        return self._wire(costs.payload_bits(codec.publish, codec.publish_rho, codec.publish_bits))

    def _wire(self, bits: float) -> float:
        chunk_elements = self.config.codec.chunk_elements
        return costs.PACKET_FACTOR * costs.frame_bits(bits, self.fragment_params, chunk_elements)

    @property
    def up_bits_per_s(self) -> float:
        """Of one learner."""
        return self.push_bits * self.fragment_params / self.spacing_s

    @property
    def down_bits_per_s(self) -> float:
        """Of one learner."""
        return self.publish_bits * self.fragment_params / self.spacing_s

    @property
    def _merge_s(self) -> float:
        per_param_ns = costs.MERGE_NS * self.site.learners + costs.OUTER_STEP_NS
        return per_param_ns * 1e-9 * self.fragment_params

    @property
    def _transfer_bits_per_s(self) -> float:
        """To or from one learner while all of them transfer."""
        shared = self.site.broker_line_bits_per_s / self.site.learners
        return min(self.site.line_bits_per_s, shared)

    @property
    def journal_bytes_per_round(self) -> float:
        bits = {
            "full": self.site.learners * self.push_bits + self.publish_bits,
            "merged": costs.MERGED_BITS + self.publish_bits,
            "off": 0.0,
        }
        return bits[self.config.broker.journal] / 8 * self.fragment_params

    @property
    def round_s(self) -> float:
        """From the snapshots of a fragment until its next version is durable."""
        params, learners = self.fragment_params, self.site.learners
        arrive_s = max(
            params * costs.ENCODE_NS * 1e-9,
            params * self.push_bits / self._transfer_bits_per_s,
            params * costs.DECODE_NS * 1e-9 * learners / costs.DECODERS,
        )
        durable_s = self.journal_bytes_per_round / self.site.disk_bytes_per_s
        return arrive_s + self._merge_s + durable_s

    @property
    def exchange_s(self) -> float:
        """From the snapshot of a fragment until its next version is there."""
        params = self.fragment_params
        down_s = params * self.publish_bits / self._transfer_bits_per_s
        return self.round_s + down_s + params * costs.DECODE_NS * 1e-9

    @property
    def overlap_steps(self) -> int:
        """tau."""
        steps = math.ceil(self.exchange_s / self.site.step_s)
        return min(max(self.config.fragments.overlap_steps, steps), self.sync_period_steps - 1)

    @property
    def checkpoint_bytes(self) -> int:
        return costs.STATE_BYTES * self.site.params

    @cached_property
    def checkpoint_versions(self) -> int:
        """Versions between two checkpoints of a broker that leave most of its disk's rate to the
        journal."""
        rate = CHECKPOINT_DISK_SHARE * self.site.disk_bytes_per_s
        pause_s = self.checkpoint_bytes / self.brokers / rate
        versions = math.ceil(pause_s / (self.spacing_s * self.brokers))
        return min(max(self.config.broker.checkpoint_versions, versions), CHECKPOINT_VERSIONS_MAX)

    @property
    def checkpoint_pause_s(self) -> float:
        """From one checkpoint of a broker to its next one."""
        return self.checkpoint_versions * self.spacing_s * self.brokers

    @property
    def replay_s(self) -> float:
        """What the restart of a broker replays at most, the journal since its last checkpoint."""
        decode_s = costs.DECODE_NS * 1e-9 * self.site.learners * self.fragment_params
        return self.checkpoint_versions * (self._merge_s + decode_s)

    @property
    def journal_bytes_per_s(self) -> float:
        """Of all brokers."""
        return self.journal_bytes_per_round / self.spacing_s

    @property
    def disk_bytes(self) -> float:
        """At most on the disks: checkpoints, and the journal back to the older one."""
        journal = 2 * self.checkpoint_pause_s * self.journal_bytes_per_s
        return costs.GENERATIONS_MAX * self.checkpoint_bytes + journal

    @property
    def disk_bytes_per_s(self) -> float:
        """Of all brokers."""
        return self.journal_bytes_per_s + self.checkpoint_bytes / self.checkpoint_pause_s

    @property
    def state_memory_bytes(self) -> float:
        """Of all brokers: parameters, momentum, published copy, kept publications."""
        kept = PUBLICATIONS_KEPT * self.publish_bits / 8
        return (costs.STATE_BYTES + kept) * self.site.params

    @property
    def round_memory_bytes(self) -> float:
        """Of each broker: one merge, and the contributions of the open rounds."""
        held = costs.CODE_BYTES.get(self.config.codec.push, 1.0)
        if self.config.broker.journal == "full":
            held += self.push_bits / 8
        contributions = held * self.site.learners * self.rounds_in_flight
        return (costs.MERGE_BYTES + contributions) * self.fragment_params

    @property
    def broker_memory_bytes(self) -> float:
        """Of one broker."""
        return self.state_memory_bytes / self.brokers + self.round_memory_bytes

    @property
    def learner_memory_bytes(self) -> float:
        """Of one learner's host, beyond what training takes: published copy, remainders, flight."""
        per_param = 8 if self.config.codec.error_feedback else 4
        in_flight = self.rounds_in_flight * self.fragment_params
        return per_param * self.site.params + costs.LEARNER_FLIGHT_BYTES * in_flight

    @property
    def learner_cores(self) -> float:
        return (self.up_bits_per_s + self.down_bits_per_s) / costs.BITS_PER_CORE_S

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """Every resource, of one learner or of one broker."""
        return (*self._line_loads(), *self._broker_loads(), *self._time_loads())

    def _line_loads(self) -> tuple[Load, ...]:
        up, down = self.up_bits_per_s, self.down_bits_per_s
        line, hub = self.site.line_bits_per_s, self.site.broker_line_bits_per_s
        peers = self.site.learners / self.brokers
        own = "a longer sync period, coarser codes, or a faster line of the learners (--wan)"
        hubs = "a longer sync period, coarser codes, or a faster line (--broker-wan)"
        return (
            Load("line of a learner, out", up, line, "bit/s", own, is_shared=False),
            Load("line of a learner, in", down, line, "bit/s", own, is_shared=False),
            Load("line of the broker, in", peers * up, hub, "bit/s", hubs),
            Load("line of the broker, out", peers * down, hub, "bit/s", hubs),
        )

    def _broker_loads(self) -> tuple[Load, ...]:
        site, peers = self.site, self.site.learners / self.brokers
        cores = peers * (self.up_bits_per_s + self.down_bits_per_s) / costs.BITS_PER_CORE_S
        disk = self.disk_bytes_per_s / self.brokers
        return (
            Load(
                "cores of the broker", cores,
                min(site.broker_cores, costs.CORES_OF_A_BROKER), "cores",
                "a longer sync period or faster cores; one broker uses at most "
                f"{costs.CORES_OF_A_BROKER}",
            ),
            Load(
                "memory of the broker", self.broker_memory_bytes, site.broker_memory_bytes, "bytes",
                "more memory (--broker-memory) or more fragments",
            ),
            Load(
                "disk of the broker", disk, site.disk_bytes_per_s, "bytes/s",
                "a longer sync period, a faster disk (--disk), or from six learners on "
                'broker.journal = "merged"',
            ),
        )  # fmt: skip

    def _time_loads(self) -> tuple[Load, ...]:
        return (
            Load(
                "rounds in flight", self.round_s / self.spacing_s / self.brokers,
                self.rounds_in_flight, "rounds",
                "a larger merge.rounds_in_flight, or a faster line of the broker (--broker-wan)",
            ),
            Load(
                "lateness of an update", self.exchange_s / self.site.step_s, LATE_STEPS_MAX,
                "steps", "more fragments, or a faster line of the broker (--broker-wan)",
                is_shared=False,
            ),
        )  # fmt: skip

    @property
    def bottleneck(self) -> Load:
        """What is fullest."""
        return max(self.loads, key=lambda load: load.share)

    @property
    def fits(self) -> bool:
        return all(load.fits for load in self.loads)


def make_plan(site: Site, config: BrokerConfig) -> Plan:
    """As few brokers as hold the model in memory, and the shortest sync period at which all else
    suffices; if none is long enough the longest, with more brokers."""
    periods = (site.sync_period_steps,) if site.sync_period_steps else SYNC_PERIODS
    plans = [_enough_memory(Plan(site, config, period)) for period in periods]
    plan = next((plan for plan in plans if plan.fits), plans[-1])
    for brokers in range(plan.brokers, plan.fragments + 1):
        several = replace(plan, brokers=brokers)
        if all(load.fits for load in several.loads if load.is_shared):
            return several
    return plan


def _enough_memory(plan: Plan) -> Plan:
    """The same with the smallest number of brokers whose memory suffices; 1 if none does: each
    owns whole fragments, so that a fragment too large to be merged stays too large."""
    free = USABLE * plan.site.broker_memory_bytes - plan.round_memory_bytes
    brokers = math.ceil(plan.state_memory_bytes / free) if free > 0 else 1
    return replace(plan, brokers=brokers if brokers <= plan.fragments else 1)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(
            f"{name}: out of range", expected=f"{low:g} to {high:g}", got=f"{value:g}"
        )
