"""The broker's settings: each with its unit, its range and its reason.

A file is TOML with one table per section. Flags win over the file, the file over the mode's preset,
the preset over the defaults here. What learners are told stands in `RunSettings` (proto/messages);
`BrokerConfig.shared` makes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct, field

from narrows.broker.records import Policy
from narrows.proto import messages as msg
from narrows.proto.config import load, parse_address
from narrows.proto.errors import ConfigError
from narrows.proto.messages import CodecName, Mode, RunSettings
from narrows.proto.units import Amount, BitRate, Duration

Learners: TypeAlias = Annotated[int, Meta(ge=1, le=msg.LEARNERS_MAX)]


class BrokerSection(Struct, frozen=True, forbid_unknown_fields=True):
    """[broker] The process: its address, its files, its keys."""

    listen: str = "tcp://127.0.0.1:7070"
    """Address of the control port, tcp://HOST:PORT; uplink and downlink are the next two ports.
    Port 0: any free ones."""
    state_dir: Annotated[str, Meta(min_length=1)] = "runs/broker"
    """Directory of the run: run.db, packs, fragments. One broker at a time."""
    init: str = ""
    """Safetensors file that becomes version 0. Empty: the first learner's parameters do."""
    keys: str = ""
    """Directory of the broker's key and its allow list. Empty: loopback only, unless insecure."""
    insecure: bool = False
    """Listen beyond loopback without keys."""
    keep_history: bool = False
    """Keep every payload and the first snapshots, for `narrows journal replay` and `rollback`."""


class RunSection(Struct, frozen=True, forbid_unknown_fields=True):
    """[run] The mode of the run, its clock, and its end."""

    mode: Mode = Mode.DECOUPLED
    """decoupled: quorum and grace, nobody waits. streaming: everybody contributes to each round.
    diloco: one fragment, everybody, plain mean, learners wait."""
    goal_tokens: Amount = Amount(0)
    """Tokens of all learners together after which the run ends, such as "12e9". 0: never."""
    tokens_per_run_step: Amount = Amount(0)
    """Tokens that make one step of the run's clock, which learning-rate schedules follow."""
    learners_at_start: Learners = 1
    """Learners that must have joined before the first version is handed out."""
    seeder: str = ""
    """Learner whose parameters become version 0. Empty: the first that joins."""
    max_offline: Duration = Duration(3600.0)
    """A learner that is cut off for longer pauses until it is back. 0: never."""


class FragmentsSection(Struct, frozen=True, forbid_unknown_fields=True):
    """[fragments] The cut of the model, and how often each fragment is exchanged."""

    count: Annotated[int, Meta(ge=1, le=msg.FRAGMENTS_MAX)] = 4
    """P. More fragments spread the traffic more evenly; each has at least one row of a tensor."""
    sync_period_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    """H, inner steps between two rounds of the same fragment. Traffic falls as 1/H."""
    overlap_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 2
    """tau, inner steps that an exchange may take without holding anybody up; less than H."""
    keep: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of the steps made since the snapshot that an adoption keeps (Streaming DiLoCo)."""
    handover: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of Adam's first moments that an adoption replaces by the published movement, for Adam
    and AdamW. 0: none. 0.5 seems to help short runs and unequal sites."""


class MergeSection(Struct, frozen=True, forbid_unknown_fields=True):
    """[merge] When a round is merged, how, and the outer optimizer."""

    quorum: Annotated[int, Meta(ge=0, le=msg.LEARNERS_MAX)] = 1
    """K, contributions without which a round is not merged. 0: those of all ready learners,
    and in the first round of those that are joining still."""
    weights: Literal["tokens", "equal"] = "tokens"
    """tokens: tokens**2 / steps. equal: every push the same."""
    outer_lr: Annotated[float, Meta(ge=1e-6, le=10)] = 0.4
    """Outer learning rate."""
    outer_momentum: Annotated[float, Meta(ge=0, le=0.999)] = 0.6
    """Nesterov momentum; 0 is plain SGD."""


class CodecSection(Struct, frozen=True, forbid_unknown_fields=True):
    """[codec] How values become bits, both ways."""

    push: CodecName = "int4-zstd"
    """Codec of outer gradients on their way to the broker."""
    publish: CodecName = "int4-zstd"
    """Codec of publications. Their rounding error is in the next difference again."""
    rho: Annotated[float, Meta(ge=0.001, le=100)] = 0.5
    """Quantisation step in units of the tensor piece's rms: 0.5 is about 3 bits a parameter."""


class WanSection(Struct, frozen=True, forbid_unknown_fields=True):
    """[wan] Rates of all that crosses the line, such as "2Gbit/s"; 0: no limit."""

    up: BitRate = BitRate(0.0)
    """From each learner to the broker."""
    down: BitRate = BitRate(0.0)
    """From the broker to each learner."""
    total_up: BitRate = BitRate(0.0)
    """From all learners to the broker, shared equally among those that are connected."""
    total_down: BitRate = BitRate(0.0)
    """From the broker to all learners; a publication counts once per learner or relay."""
    streams: Annotated[int, Meta(ge=0, le=msg.STREAMS_MAX)] = 0
    """Data connections per learner and direction. 0: 1 up to 100 Mbit/s a learner, else 4."""


MODE_PRESETS: Final[dict[Mode, dict[str, object]]] = {
    Mode.DECOUPLED: {},
    Mode.STREAMING: {"merge.quorum": 0},
    Mode.DILOCO: {
        "fragments.count": 1, "fragments.overlap_steps": 0, "fragments.keep": 0.0,
        "merge.quorum": 0, "merge.weights": "equal",
    },
}  # fmt: skip
"""Settings that a mode changes, by dotted key; they stand below the file and the flags."""


class BrokerConfig(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """All settings of a broker. Its `__dict__` keeps `shared` and `policy`, which are made once."""

    broker: BrokerSection = field(default_factory=BrokerSection)
    run: RunSection = field(default_factory=RunSection)
    fragments: FragmentsSection = field(default_factory=FragmentsSection)
    merge: MergeSection = field(default_factory=MergeSection)
    codec: CodecSection = field(default_factory=CodecSection)
    wan: WanSection = field(default_factory=WanSection)

    @cached_property
    def shared(self) -> RunSettings:
        """The settings that every learner is told; the rates cut messages to 10 ms of a share."""
        # The slowest rate that one learner's data may have to live with.
        rate = _smallest_limit(self._share(self.wan.up, self.wan.total_up), self.down_rate)
        streams = self.wan.streams
        if streams == 0:
            streams = 4 if rate == 0.0 or rate > 100e6 else 1
        return RunSettings(
            mode=self.run.mode,
            fragments=self.fragments.count,
            sync_period_steps=self.fragments.sync_period_steps,
            overlap_steps=self.fragments.overlap_steps,
            keep=self.fragments.keep,
            handover=self.fragments.handover,
            push_codec=self.codec.push,
            push_rho=self.codec.rho,
            chunk_elements=chunk_elements(rate, bits_per_element=4),
            state_chunk_elements=chunk_elements(rate, bits_per_element=32),
            streams=streams,
            window_messages=32 if rate else 256,
            goal_tokens=int(self.run.goal_tokens),
            tokens_per_run_step=int(self.run.tokens_per_run_step),
            max_offline_s=float(self.run.max_offline),
        )

    @property
    def down_rate(self) -> float:
        """The slowest rate, in bit/s, at which one learner may receive; 0: none."""
        return self._share(self.wan.down, self.wan.total_down)

    def _share(self, each: BitRate, total: BitRate) -> float:
        """The rate of one learner, for sizes that are fixed before anybody comes."""
        expected = self.merge.quorum if self.merge.quorum > 1 else 4
        return _smallest_limit(each, total / expected)

    @cached_property
    def policy(self) -> Policy:
        """The rules by which rounds are merged."""
        return Policy(
            weights=self.merge.weights,
            rule="mean" if self.run.mode is Mode.DILOCO else "layout",
            outer_lr=self.merge.outer_lr,
            momentum=self.merge.outer_momentum,
            codec=self.codec.publish,
            rho=self.codec.rho,
            chunk_elements=self.shared.chunk_elements,
        )


def _smallest_limit(*rates: float) -> float:
    """The smallest of some rates; 0 is no limit."""
    return min((float(rate) for rate in rates if rate), default=0.0)


MESSAGE_S: Final = 0.01
"""Seconds of the slowest rate that one data message may hold."""


def chunk_elements(rate: float, *, bits_per_element: int) -> int:
    """The largest power of two, 1,024 to 262,144, whose message takes MESSAGE_S at `rate` bit/s."""
    elements = 1 << 18
    while rate and elements > 1024 and elements * bits_per_element > MESSAGE_S * rate:
        elements //= 2
    return elements


RATE_MIN: Final = 64e3
"""Bits per second that control messages alone need; also catches a rate without its unit."""


OUTER_GAIN_MAX: Final = 1.5
"""Lengths of the learners' mean movement that the published copies may go with a hand-over."""


def load_broker(path: Path | None, flags: Mapping[str, object]) -> BrokerConfig:
    """The broker's settings from a file and flags (dotted key -> value or text).

    Raises ConfigError for what one setting or several together cannot mean.
    """
    mode = load(BrokerConfig, path, flags).run.mode
    config = load(BrokerConfig, path, flags, MODE_PRESETS[mode])
    listen = parse_address(config.broker.listen, listen=True)
    _require(listen.port <= 65533, "broker.listen", "a port up to 65533: it takes three", listen)
    if config.run.seeder:
        named = re.match(msg.NAME_PATTERN, config.run.seeder)
        _require(named, "run.seeder", "a learner's name", config.run.seeder)
    cut = config.fragments
    _require(
        cut.overlap_steps < cut.sync_period_steps,
        "fragments.overlap_steps",
        f"less than fragments.sync_period_steps = {cut.sync_period_steps}",
        cut.overlap_steps,
    )
    if mode is Mode.DILOCO:
        # A learner waits for the version of each fragment: with several, two rounds in flight could
        # wait for learners that wait for a third.
        _require(cut.count == 1, "fragments.count", "1 in mode diloco", cut.count)
    outer_gain = config.merge.outer_lr / (1 - config.merge.outer_momentum)
    _require(
        cut.handover == 0 or outer_gain <= OUTER_GAIN_MAX,
        "fragments.handover",
        f"merge.outer_lr / (1 - merge.outer_momentum) of at most {OUTER_GAIN_MAX}, or 0: else the"
        " published copies move too far for Adam's moments. Lower merge.outer_lr or"
        " merge.outer_momentum, or set fragments.handover=0",
        f"{cut.handover} with {outer_gain:.3g}",
    )
    for name in ("up", "down", "total_up", "total_down"):
        rate: BitRate = getattr(config.wan, name)
        _require(
            not rate or rate >= RATE_MIN,
            f"wan.{name}",
            f"0 (no limit) or at least {BitRate(RATE_MIN).text()}, with its unit",
            rate.text(),
        )
    return config


def assigned(assignments: Sequence[str]) -> dict[str, str]:
    """The values of `--set`, by dotted key. Raises ConfigError."""
    values: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError("--set", expected="KEY=VALUE", got=repr(assignment[:200]))
        values[key.strip()] = value.strip()
    return values


def _require(condition: object, key: str, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(f"{key}: cannot be used", expected=expected, got=str(got)[:64])
