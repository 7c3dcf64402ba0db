"""The needs of a run: rates, times, memory and disk from its settings. [pure]

Rates are those of a steady run; the first copies of the model come on top. Every figure is a
property, so that a plan with one value changed is consistent in all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from narrows.broker.config import BrokerConfig
from narrows.broker.planning import costs
from narrows.proto.errors import ConfigError
from narrows.proto.limits import ELEMENTS_MAX, FRAGMENTS_MAX, LEARNERS_MAX, PUBLICATIONS_KEPT

CHECKPOINT_DISK_SHARE: Final = 0.25
"""Share of the disk's rate that checkpoints may take. The journal needs the rest: it holds up
rounds, a checkpoint does not."""

CHECKPOINT_VERSIONS_MAX: Final = 1_000_000

FRAGMENT_PARAMS_MAX: Final = 1 << 30
"""Parameters of the largest fragment that a plan makes. A merge takes 20 bytes for each of them."""

SITE_BOUNDS: Final = {
    "params": (1, ELEMENTS_MAX),
    "step_s": (1e-6, 1e6),
    "learners": (1, LEARNERS_MAX),
    "line_bits_per_s": (1, 1e18),
    "broker_line_bits_per_s": (1, 1e18),
    "broker_memory_bytes": (1, 1e18),
    "broker_cores": (1, 10_000),
    "disk_bytes_per_s": (1, 1e15),
    "fragments": (0, FRAGMENTS_MAX),
    "sync_period_steps": (0, 1_000_000),
}


@dataclass(frozen=True)
class Site:
    """The question: the model, the learners, and the resources of the machines.

    Raises ConfigError for values that no run can have.
    """

    params: int
    step_s: float
    learners: int
    line_bits_per_s: float
    """Line of one learner, in each direction."""
    broker_line_bits_per_s: float
    broker_memory_bytes: int
    broker_cores: int
    disk_bytes_per_s: float
    fragments: int = 0
    """0: the plan chooses."""
    sync_period_steps: int = 0
    """0: the plan chooses."""

    def __post_init__(self) -> None:
        for name, (low, high) in SITE_BOUNDS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(
                    f"{name}: out of range", expected=f"{low:g} to {high:g}", got=f"{value:g}"
                )
        if self.fragments > self.params:
            raise ConfigError("fragments: more than parameters", got=str(self.fragments))


@dataclass(frozen=True)
class RunPlan:
    """The answer for one sync period and number of brokers.

    Each broker has a machine and a line of its own. Rates are bit/s on the wire, with the headers
    of every layer.
    """

    site: Site
    config: BrokerConfig
    sync_period_steps: int
    brokers: int = 1

    @cached_property
    def fragments(self) -> int:
        """P, the number of fragments: one per step, as in the paper, unless they are then too large
        or too small."""
        if self.site.fragments:
            return self.site.fragments
        smallest = math.ceil(self.site.params / FRAGMENT_PARAMS_MAX)
        chunks = max(1, self.site.params // self.config.codec.chunk_elements)
        count = min(max(smallest, min(self.sync_period_steps, chunks)), FRAGMENTS_MAX)
        assert 1 <= count <= self.site.params, f"{count} fragments of {self.site.params} parameters"
        return count

    @property
    def fragment_params(self) -> float:
        """Parameters of a mean fragment."""
        return self.site.params / self.fragments

    @property
    def spacing_s(self) -> float:
        """Seconds from the launch of one round to that of the next."""
        spacing_s = self.sync_period_steps * self.site.step_s / self.fragments
        assert spacing_s > 0, "every rate is divided by it"
        return spacing_s

    @property
    def rounds_in_flight(self) -> int:
        """Rounds that may be open at once, one per fragment at most."""
        rounds = min(self.config.merge.rounds_in_flight, self.fragments)
        assert rounds >= 1, "no round could ever begin"
        return rounds

    @cached_property
    def push_bits(self) -> float:
        """Bits per parameter of a push on the wire."""
        codec = self.config.codec
        return self._wire(costs.payload_bits(codec.push, codec.push_rho, codec.push_bits))

    @cached_property
    def publish_bits(self) -> float:
        """Bits per parameter of a publication on the wire."""
        codec = self.config.codec
        return self._wire(costs.payload_bits(codec.publish, codec.publish_rho, codec.publish_bits))

    def _wire(self, bits: float) -> float:
        """Bits per parameter on the wire, for a payload of `bits` per parameter."""
        assert bits > 0, bits
        chunk_elements = self.config.codec.chunk_elements
        return costs.PACKET_FACTOR * costs.frame_bits(bits, self.fragment_params, chunk_elements)

    @property
    def up_bits_per_s(self) -> float:
        """Rate of one learner's pushes."""
        return self.push_bits * self.fragment_params / self.spacing_s

    @property
    def down_bits_per_s(self) -> float:
        """Rate of the publications to one learner."""
        return self.publish_bits * self.fragment_params / self.spacing_s

    @property
    def _merge_s(self) -> float:
        """Seconds of a merge on one core."""
        per_param_ns = costs.MERGE_NS * self.site.learners + costs.OUTER_STEP_NS
        return per_param_ns * 1e-9 * self.fragment_params

    @property
    def _transfer_bits_per_s(self) -> float:
        """Rate to or from one learner while all of them transfer."""
        shared = self.site.broker_line_bits_per_s / self.site.learners
        return min(self.site.line_bits_per_s, shared)

    @property
    def journal_bytes_per_round(self) -> float:
        """Bytes of a round's record: pushes and publication as they travelled, or the merge."""
        bits = {
            "full": self.site.learners * self.push_bits + self.publish_bits,
            "merged": costs.MERGED_BITS + self.publish_bits,
            "off": 0.0,
        }
        return bits[self.config.broker.journal] / 8 * self.fragment_params

    @property
    def round_s(self) -> float:
        """Seconds from the snapshots of a fragment until its next version is durable."""
        params, learners = self.fragment_params, self.site.learners
        # Encoding, transfer and decoding overlap chunk by chunk, so the slowest of them counts.
        arrive_s = max(
            params * costs.ENCODE_NS * 1e-9,
            params * self.push_bits / self._transfer_bits_per_s,
            params * costs.DECODE_NS * 1e-9 * learners / costs.DECODERS,
        )
        durable_s = self.journal_bytes_per_round / self.site.disk_bytes_per_s
        round_s = arrive_s + self._merge_s + durable_s
        assert math.isfinite(round_s) and round_s > 0, round_s
        return round_s

    @property
    def exchange_s(self) -> float:
        """Seconds from the snapshot of a fragment until a learner can adopt its next version."""
        params = self.fragment_params
        down_s = params * self.publish_bits / self._transfer_bits_per_s
        exchange_s = self.round_s + down_s + params * costs.DECODE_NS * 1e-9
        assert exchange_s > self.round_s, "a publication takes time"
        return exchange_s

    @property
    def join_s(self) -> float:
        """Seconds of a joiner's first copy, on the rate that the exchange leaves of the lines."""
        site = self.site
        spare = site.line_bits_per_s - self.down_bits_per_s
        hub = site.broker_line_bits_per_s * self.brokers - self.down_bits_per_s * site.learners
        rate = min(spare, hub)
        bits = 8 * costs.FIRST_COPY_BYTES * site.params
        join_s = bits / rate if rate > 0 else math.inf
        assert join_s > 0, join_s
        return join_s

    @property
    def overlap_steps(self) -> int:
        """tau: steps that an exchange takes, at least as many as the setting says."""
        steps = math.ceil(self.exchange_s / self.site.step_s)
        overlap = min(max(self.config.fragments.overlap_steps, steps), self.sync_period_steps - 1)
        # Paired with FragmentsSection: a broker refuses an overlap as long as the period.
        assert 0 <= overlap < self.sync_period_steps, overlap
        return overlap

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint, of all brokers together."""
        return costs.STATE_BYTES * self.site.params

    @cached_property
    def checkpoint_versions(self) -> int:
        """Versions between two checkpoints of a broker, enough of them that the journal keeps most
        of the disk's rate."""
        rate = CHECKPOINT_DISK_SHARE * self.site.disk_bytes_per_s
        pause_s = self.checkpoint_bytes / self.brokers / rate
        versions = math.ceil(pause_s / (self.spacing_s * self.brokers))
        enough = min(max(self.config.broker.checkpoint_versions, versions), CHECKPOINT_VERSIONS_MAX)
        assert enough >= 1, "a broker writes checkpoints"
        return enough

    @property
    def checkpoint_pause_s(self) -> float:
        """Seconds from one checkpoint of a broker to its next one."""
        return self.checkpoint_versions * self.spacing_s * self.brokers

    @property
    def replay_s(self) -> float:
        """Longest replay after a restart, in seconds: all of the journal since the last
        checkpoint."""
        decode_s = costs.DECODE_NS * 1e-9 * self.site.learners * self.fragment_params
        return self.checkpoint_versions * (self._merge_s + decode_s)

    @property
    def journal_bytes_per_s(self) -> float:
        """Rate at which the journals of all brokers grow."""
        return self.journal_bytes_per_round / self.spacing_s

    @property
    def disk_bytes(self) -> float:
        """Bytes on the disks at most: checkpoints, and the journal back to the older one."""
        journal = 2 * self.checkpoint_pause_s * self.journal_bytes_per_s
        assert journal >= 0, journal
        return costs.GENERATIONS_MAX * self.checkpoint_bytes + journal

    @property
    def disk_bytes_per_s(self) -> float:
        """Rate that all brokers write, journals and checkpoints."""
        return self.journal_bytes_per_s + self.checkpoint_bytes / self.checkpoint_pause_s

    @property
    def state_memory_bytes(self) -> float:
        """Bytes of all brokers: parameters, momentum, published copy, kept publications."""
        kept = PUBLICATIONS_KEPT * self.publish_bits / 8
        return (costs.STATE_BYTES + kept) * self.site.params

    @property
    def round_memory_bytes(self) -> float:
        """Bytes of each broker: one merge, and the contributions of the open rounds.

        More brokers do not make it smaller: each merges whole fragments.
        """
        held = costs.CODE_BYTES.get(self.config.codec.push, 1.0)
        if self.config.broker.journal == "full":
            held += self.push_bits / 8
        contributions = held * self.site.learners * self.rounds_in_flight
        return (costs.MERGE_BYTES + contributions) * self.fragment_params

    @property
    def broker_memory_bytes(self) -> float:
        """Bytes of one broker."""
        return self.state_memory_bytes / self.brokers + self.round_memory_bytes

    @property
    def learner_memory_bytes(self) -> float:
        """Bytes of one learner's host, beside the training: published copy, residuals, flight."""
        per_param = 8 if self.config.codec.error_feedback else 4
        in_flight = self.rounds_in_flight * self.fragment_params
        return per_param * self.site.params + costs.LEARNER_FLIGHT_BYTES * in_flight

    @property
    def learner_cores(self) -> float:
        """Cores of one learner's host that coding and sending take."""
        return (self.up_bits_per_s + self.down_bits_per_s) / costs.BITS_PER_CORE_S
