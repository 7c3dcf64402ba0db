"""The broker's settings: each with its unit, its range and its reason. [pure]

The file is TOML with one table per section, and a section's docstring is the caption of its table.
Flags win over the file, the file over the mode's preset, the preset over the defaults below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal, cast

from narrows.broker.merge_config import MergeSection as MergeSection
from narrows.proto.address import parse_listen
from narrows.proto.codec import setting_names
from narrows.proto.config import Choice, Range, Section, check_choice, override, read_table
from narrows.proto.errors import ConfigError
from narrows.proto.limits import (
    CHUNK_ELEMENTS_MAX,
    FRAGMENTS_MAX,
    LEARNERS_MAX,
    RATE_MAX,
    RATE_MIN,
    STREAMS_MAX,
    TOKENS_MAX,
)
from narrows.proto.messages import Mode
from narrows.proto.timing import BEAT_S, FORGET_S, LATE_S, LOST_S, PROBE_S, QUIET_S
from narrows.proto.units import Amount, BitRate, Duration, Size, written

OUTER_OPTIMIZERS: Final = ("nesterov", "sgd")
"""Names of the outer optimizers."""


@dataclass(frozen=True)
class BrokerSection(Section):
    """[broker] The process: its addresses and its files."""

    listen: str = "tcp://127.0.0.1:7070"
    """Address of the control port, tcp://HOST:PORT. Port 0: any free one, for tests."""
    uplink_port: Annotated[int, Range(0, 65535)] = 0
    """Port that takes outer gradients. 0: control port + 1, or a free one if that is 0."""
    downlink_port: Annotated[int, Range(0, 65535)] = 0
    """Port that sends publications. 0: control port + 2, or a free one if that is 0."""
    state_dir: str = "runs/broker"
    """Directory of run.json, checkpoints and journal; one broker at a time. A checkpoint is about
    three float32 copies of the model, and there are two or three."""
    insecure: bool = False
    """Allow a broker to listen beyond loopback without encryption and keys."""
    init: str = ""
    """Safetensors file that becomes version 0. Empty: the first learner's parameters do."""
    checkpoint_versions: Annotated[int, Range(1, 1_000_000)] = 50
    """Versions, summed over the fragments, between two checkpoints. A restart replays the journal
    since the last one; without a journal those versions are gone."""
    journal: Literal["full", "merged", "off"] = "full"
    """Record that is durable before a version is published. full: the contributions and the
    publication as they travelled, so that a run can be replayed under other settings. merged: the
    outer gradient, rounded to bfloat16; its size does not grow with the learners. off: checkpoints
    only."""
    journal_errors: Literal["stop", "serve"] = "stop"
    """Choice when the journal cannot be written. stop: nothing is published until it can; learners
    train on. serve: versions are published although a crash would undo them."""
    journal_keep: bool = False
    """Keep the whole journal and the first checkpoint, for `narrows journal replay`. Otherwise the
    journal is cut back to the older of the two checkpoints that are kept."""
    journal_segment: Annotated[Size, Range(1 << 12, 1 << 40)] = 64 << 20
    """Size of one file of the journal; a broker takes the room of one at its start."""
    rollback_to: Annotated[int, Range(-1, TOKENS_MAX)] = -1
    """Version, summed over the fragments, to which this start takes the run back. -1: none."""
    beat: Annotated[Duration, Range(0.01, 60)] = BEAT_S
    """Time between two beats to each learner. They repeat the state: a lost one is a delay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        listen = parse_listen(self.listen)
        ports = [port for port in (listen.port, self.uplink_port, self.downlink_port) if port]
        if len(set(ports)) < len(ports):
            raise ConfigError(
                "uplink_port: one port twice", expected="three different ports", got=str(ports)
            )
        if not self.state_dir:
            raise ConfigError("state_dir: empty", expected="a directory")
        if self.beat >= QUIET_S:
            what = "beat: learners that hear nothing for so long take the broker for lost"
            raise ConfigError(what, expected=f"less than {QUIET_S:g}s", got=f"{self.beat:g}s")


@dataclass(frozen=True)
class RunSection(Section):
    """[run] The mode of the run, its clock, and its end."""

    mode: Mode = Mode.DECOUPLED
    """decoupled: quorum and grace, nobody waits. streaming: all live learners, overlapped.
    diloco: one fragment, all live learners, plain mean, learners wait. Sets other defaults too."""
    goal_tokens: Annotated[Amount, Range(0, TOKENS_MAX)] = 0
    """Tokens of all learners together after which the run ends, such as "12e9". 0: never."""
    tokens_per_run_step: Annotated[Amount, Range(0, TOKENS_MAX)] = 0
    """Tokens that make one step of the run's clock, which learning-rate schedules follow: set it to
    the tokens of one inner step of all planned learners together. 0: each learner takes those of
    one inner step of its own."""
    learners_at_start: Annotated[int, Range(1, LEARNERS_MAX)] = 1
    """Learners that must have joined before the first version is handed out, so that they all
    start together. Later ones join at any time."""
    founder: str = ""
    """Learner whose model becomes the run's; others wait for it. Empty: the first that joins."""
    max_offline: Duration = 3600.0
    """A learner that is cut off for longer pauses: its work would be thrown away. 0: never."""


@dataclass(frozen=True)
class FragmentsSection(Section):
    """[fragments] The cut of the model, and how often each fragment is exchanged."""

    count: Annotated[int, Range(1, FRAGMENTS_MAX)] = 4
    """P, the number of fragments. More of them spread the traffic more evenly; each has at least
    one row of a tensor."""
    sync_period_steps: Annotated[int, Range(1, 1_000_000)] = 10
    """H, inner steps between two syncs of the same fragment. Traffic falls as 1/H; in short runs
    20 cost 1 to 2% of the loss more than 10 (docs/quality.md, "H and gain")."""
    overlap_steps: Annotated[int, Range(0, 1_000_000)] = 2
    """tau, inner steps that an exchange may take without holding anybody up; less than H. Above 5
    the staleness begins to cost quality (Streaming DiLoCo, arXiv 2501.18512)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap_steps >= self.sync_period_steps:
            raise ConfigError(
                "overlap_steps: as long as the sync period",
                expected=f"less than sync_period_steps = {self.sync_period_steps}",
                got=str(self.overlap_steps),
            )


@dataclass(frozen=True)
class OuterSection(Section):
    """[outer] The outer optimizer."""

    optimizer: Annotated[str, Choice(OUTER_OPTIMIZERS)] = "nesterov"
    """nesterov: momentum with a look-ahead. sgd: no momentum."""
    lr: Annotated[float, Range(1e-6, 10)] = 0.4
    """Outer learning rate. sgd at 1 with one learner is that learner's own training. With momentum
    0.6 and H = 10 the best of those tried (docs/quality.md, "outer": "H 10, 0.4/0.6")."""
    momentum: Annotated[float, Range(0, 0.999)] = 0.6
    """mu. The usual 0.9 over-drives when H is short: the gain of a steady direction is
    1 / (1 - mu)."""


@dataclass(frozen=True)
class CodecSection(Section):
    """[codec] How values become bits, both ways."""

    push: Annotated[str, Choice(setting_names())] = "int4-zstd"
    """Codec of outer gradients on their way to the broker; "auto": the one that suits a rate."""
    publish: Annotated[str, Choice(setting_names())] = "int4-zstd"
    """Codec of updates on their way to the learners."""
    push_rho: Annotated[float, Range(0.001, 100)] = 0.5
    """Quantisation step of pushes in units of the tensor piece's rms: 0.5 is about 3 bits per
    parameter, 1.0 about 2. With int4 a step below 0.4 clips values beyond 7 steps."""
    publish_rho: Annotated[float, Range(0.001, 100)] = 0.5
    """The same for publications. Their rounding error is in the next difference again."""
    push_bits: Annotated[float, Range(0.5, 8)] = 3.0
    """With push = "auto": bits per parameter to aim at; the step follows, fragment by fragment."""
    publish_bits: Annotated[float, Range(0.5, 8)] = 3.0
    """The same for publications."""
    chunk_elements: Annotated[int, Range(256, CHUNK_ELEMENTS_MAX)] = 262144
    """Elements per data message: small ones let control messages pass, large ones cost less."""
    error_feedback: bool = True
    """Learners add the rounding error of a push to the next push of the fragment."""


@dataclass(frozen=True)
class WanSection(Section):
    """[wan] The network between broker and learners. Rates are bits per second of all that crosses
    the line, overhead included, such as "2Gbit/s"; 0: no limit. They can be changed while the
    broker runs: edit the file, send SIGHUP."""

    up: Annotated[BitRate, Range(0, RATE_MAX)] = 0.0
    """From each learner to the broker."""
    down: Annotated[BitRate, Range(0, RATE_MAX)] = 0.0
    """From the broker to each learner."""
    total_up: Annotated[BitRate, Range(0, RATE_MAX)] = 0.0
    """From all learners to the broker. Those that have something to send share it equally."""
    total_down: Annotated[BitRate, Range(0, RATE_MAX)] = 0.0
    """From the broker to all learners, likewise. A publication is sent once per learner."""
    streams: Annotated[int, Range(1, STREAMS_MAX)] = 4
    """Data connections per learner and direction. One connection over a long line is slowed down
    by every lost packet; several share the damage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("up", "down", "total_up", "total_down"):
            if 0 < (rate := getattr(self, name)) < RATE_MIN:
                raise ConfigError(
                    f"{name}: too little for control messages alone",
                    expected=f"0 (no limit), or at least {written('bits_per_s', RATE_MIN)}",
                    got=written("bits_per_s", rate),
                )


@dataclass(frozen=True)
class LivenessSection(Section):
    """[liveness] When a silent learner is no longer counted on. Durations."""

    late: Duration = LATE_S
    """Silence after which a learner is not waited for beyond the grace window."""
    lost: Duration = LOST_S
    """Silence after which a learner is dead, and "all live learners" are one less. Above `late`."""
    forget: Duration = FORGET_S
    """Time for which a learner that is gone is remembered, with its merged pushes. One that comes
    back later is new, and does not know whether its last push was merged. At least `lost`."""
    probe: Duration = PROBE_S
    """Time in which the holder of a name must answer when a newcomer claims it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.late < self.lost:
            raise ConfigError(
                "late: not before lost",
                expected=f"more than 0, less than lost = {written('duration', self.lost)}",
                got=written("duration", self.late),
            )
        if self.forget < self.lost:
            raise ConfigError(
                "forget: before the learner is lost",
                expected=f"at least lost = {self.lost:g} s",
                got=f"{self.forget:g} s",
            )
        if self.probe <= 0:
            raise ConfigError("probe: no time to answer", expected="more than 0", got="0")


@dataclass(frozen=True)
class SecuritySection(Section):
    """[security] Keys: who may connect, and what on the disk nobody alters unnoticed."""

    keys: str = ""
    """Directory that `narrows keys new` makes. Empty: the broker serves this machine alone."""
    seal_key: str = ""
    """File with the key that seals the state directory, outside of it. Empty: nothing is sealed."""


@dataclass(frozen=True)
class BrokerConfig(Section):
    """All settings of a broker."""

    broker: BrokerSection = field(default_factory=BrokerSection)
    run: RunSection = field(default_factory=RunSection)
    fragments: FragmentsSection = field(default_factory=FragmentsSection)
    merge: MergeSection = field(default_factory=MergeSection)
    outer: OuterSection = field(default_factory=OuterSection)
    codec: CodecSection = field(default_factory=CodecSection)
    wan: WanSection = field(default_factory=WanSection)
    liveness: LivenessSection = field(default_factory=LivenessSection)
    security: SecuritySection = field(default_factory=SecuritySection)


_PRESETS: Final[Mapping[Mode, Mapping[str, object]]] = {
    Mode.DECOUPLED: {},
    Mode.STREAMING: {},
    Mode.DILOCO: {
        "fragments.count": 1,
        "fragments.overlap_steps": 0,
        "merge.weights": "equal",
        "merge.rule": "mean",
        "merge.norm_limit": 0.0,
        "merge.clip_ratio": 0.0,
        "merge.rounds_in_flight": 1,
    },
}

assert _PRESETS.keys() == set(Mode), "each mode has a preset"


def preset(mode: Mode | str) -> dict[str, object]:
    """The settings that a mode changes, for `override`. Raises ConfigError."""
    check_choice("run.mode", mode, tuple(Mode))
    return {"run.mode": str(mode), **_PRESETS[Mode(mode)]}


def load_config(path: Path | None, flags: Mapping[str, object]) -> BrokerConfig:
    """Defaults, the mode's preset, the file if there is one, `flags` by dotted key, in this order.

    Raises ConfigError, naming the file or "flags" and the key.
    """
    table = read_table(path) if path else {}
    run = table.get("run")
    of_file = cast(Mapping[str, object], run).get("mode") if isinstance(run, dict) else None
    # The mode first: its preset stands below the file and the flags that name the mode.
    named = flags.get("run.mode") or of_file
    mode = named if isinstance(named, str) else Mode.DECOUPLED
    config = override(BrokerConfig(), preset(mode))
    return override(override(config, table, source=str(path)), flags, source="flags")
