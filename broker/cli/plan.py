"""`narrows plan`: what a run needs before it starts, and what will be full first.

Bits follow from the formats; times are those of two virtual cores, and other machines differ by a
factor. A plan fills nothing beyond 80%: repairs, joiners and bursts need the rest.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from narrows.broker.config import BrokerConfig, assigned, load_broker
from narrows.broker.process.pipeline import SNAPSHOT_VERSIONS
from narrows.broker.syncer.state import IN_FLIGHT_MAX
from narrows.proto.codec import CODECS
from narrows.proto.config import given_keys
from narrows.proto.errors import ConfigError
from narrows.proto.flow.budget import wire_bytes
from narrows.proto.messages import FRAGMENTS_MAX, PUBLICATIONS_KEPT, CodecName, Mode
from narrows.proto.units import Amount, BitRate, Duration, Quantity, Size

USABLE: Final = 0.8
SYNC_PERIODS: Final = (10, 15, 20, 24, 30, 40, 50, 75, 100, 150, 200, 300, 500)
"""H that a plan may choose. 10 is the best that was measured; papers use 24 to 100."""
LATE_STEPS_MAX: Final = 5.0
"""Steps of overlap that cost next to nothing (Streaming DiLoCo, arXiv 2501.18512)."""
FRAGMENT_PARAMS_MAX: Final = 1 << 30

ENCODE_S, DECODE_S, MERGE_S, STEP_S = 1.5e-9, 0.75e-9, 0.5e-9, 5e-9
"""Seconds per parameter: code a push, decode one, add one, the outer step with its publication."""
STATE_BYTES: Final = 12
"""Per parameter at the broker, in memory and in a snapshot: global, momentum, published copy."""
GAUSSIAN_BITS: Final = 2.05
"""Differential entropy of a Gaussian value of deviation 1."""
TOPIC_BYTES, HEADER_BYTES = 22, 69
"""A data message with long names and numbers."""
MERGE_BYTES, FLIGHT_BYTES, FIRST_COPY_BYTES = 20, 16, 3.4
"""Per parameter: a merge; a learner's fragment in flight; a joiner's first copy on the line."""


@dataclass(frozen=True)
class Site:
    """The question. Lines are bit/s in each direction."""

    params: int
    step_s: float
    learners: int
    line: float
    broker_line: float


def payload_bits(codec: CodecName, rho: float) -> float:
    """Bits per parameter: about the entropy of Gaussian values in steps of rho, which zstd nearly
    reaches; without codes the width of a float."""
    if not CODECS[codec].coded:
        return float(CODECS[codec].bits)
    return max(0.5, GAUSSIAN_BITS - math.log2(rho))


def line_bits(config: BrokerConfig, codec: CodecName, params: int) -> float:
    """Bits per parameter on the line, with the headers of every layer, of a fragment."""
    chunk = min(config.shared.chunk_elements, params)
    payload = math.ceil(chunk * payload_bits(codec, config.codec.rho) / 8)
    frames = TOPIC_BYTES, HEADER_BYTES, payload
    return 8 * wire_bytes(frames, curve=bool(config.broker.keys)) / chunk


def figures(site: Site, config: BrokerConfig, fragments: int, period_steps: int) -> dict[str, Any]:
    """All that a run of P fragments and sync period H needs; units are in the names."""
    learners, params = site.learners, -(-site.params // fragments)
    push, publish = (
        line_bits(config, each, params) for each in (config.codec.push, config.codec.publish)
    )
    period_s = period_steps * site.step_s
    up, down = push * site.params / period_s, publish * site.params / period_s
    # From the snapshots of a fragment until its next version exists, then until it is adopted.
    # Coding, transfer and decoding overlap chunk by chunk: the slowest of them counts.
    rate = min(site.line, site.broker_line / learners)
    arrive_s = max(params * ENCODE_S, params * push / rate, params * DECODE_S * learners / 2)
    round_s = arrive_s + params * (MERGE_S * learners + STEP_S)
    exchange_s = round_s + params * (publish / rate + DECODE_S)
    tau = max(config.fragments.overlap_steps, math.ceil(exchange_s / site.step_s))
    spare = min(site.line - down, site.broker_line - learners * down)
    # Memory and disk, in bytes per parameter. On disk are two snapshots, a third one while it is
    # written, and the payloads since the older one.
    flight = min(IN_FLIGHT_MAX, fragments) / fragments
    waiting = learners * (CODECS[config.codec.push].bits / 8 + push / 8)
    memory = STATE_BYTES + FIRST_COPY_BYTES + PUBLICATIONS_KEPT * publish / 8
    written = learners * push / 8 / period_s if config.broker.journal == "on" else 0.0
    disk = 3 * STATE_BYTES + 2 * SNAPSHOT_VERSIONS * period_s * written
    shares = {
        "line of a learner, up (--wan)": up / site.line,
        "line of a learner, down (--wan)": down / site.line,
        "line of the broker, in (--broker-wan)": learners * up / site.broker_line,
        "line of the broker, out (--broker-wan)": learners * down / site.broker_line,
        "lateness of an update": exchange_s / site.step_s / LATE_STEPS_MAX,
        "rounds in flight": round_s * fragments / period_s / IN_FLIGHT_MAX,
    }
    return {
        "fragments": fragments,
        "sync_period_steps": period_steps,
        "overlap_steps": min(tau, period_steps - 1),
        "push_bits_per_param": round(push, 3),
        "publish_bits_per_param": round(publish, 3),
        "learner_up_bits_per_s": up,
        "learner_down_bits_per_s": down,
        "broker_in_bits_per_s": up * learners,
        "broker_out_bits_per_s": down * learners,
        "exchange_s": exchange_s,
        "join_s": 8 * FIRST_COPY_BYTES * site.params / spare if spare > 0 else None,
        "broker_memory_bytes": site.params * (memory + flight * (MERGE_BYTES + waiting)),
        "learner_memory_bytes": site.params * (4 + FLIGHT_BYTES * flight),
        "journal_per_hour_bytes": 3600 * site.params * written,
        "disk_bytes": site.params * disk,
        "shares": shares,
        "fullest": max(shares, key=lambda name: shares[name]),
        "fits": max(shares.values()) <= USABLE,
    }


def plan(
    *,
    params: str,
    step: str,
    learners: int,
    wan: str,
    broker_wan: str = "",
    config: Path | None = None,
    setting: Annotated[list[str], Parameter(name=["--set", "-s"])] | None = None,
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Say what a run needs before it starts, and what will be full first. Exit code 1: no fit.

    Args:
        params: Parameters of the model, such as 7B.
        step: Time of an inner step, such as 1.5s.
        learners: Number of learners.
        wan: Line of each learner, in each direction, such as 1Gbit/s.
        broker_wan: Line of the broker; as --wan if it is not given.
        config: TOML file of the broker. P and H in it stand, others are chosen.
        setting: KEY=VALUE, as for the broker.
        json_: Print JSON; units are in the names.
    """
    flags = assigned(setting or ())
    loaded = load_broker(config, flags)
    line = _parsed(BitRate, "--wan", wan)
    broker_line = _parsed(BitRate, "--broker-wan", broker_wan or wan)
    count = int(_parsed(Amount, "--params", params))
    site = Site(count, _parsed(Duration, "--step", step), learners, line, broker_line)
    if loaded.run.mode is Mode.DILOCO or min(count, learners, site.step_s, line, broker_line) <= 0:
        expected = "a mode without lockstep, and sizes above 0"
        raise ConfigError("no plan for this", expected=expected, got=f"{loaded.run.mode}, {site}")
    given, chosen = given_keys(BrokerConfig, config) | flags.keys(), loaded.fragments
    fixed_period = "fragments.sync_period_steps" in given
    made: dict[str, Any] = {}
    for steps in (chosen.sync_period_steps,) if fixed_period else SYNC_PERIODS:
        # One fragment per step, as in the paper, unless they are then too large or too small.
        most = max(1, count // loaded.shared.chunk_elements)
        fragments = min(max(-(-count // FRAGMENT_PARAMS_MAX), min(steps, most)), FRAGMENTS_MAX)
        fragments = chosen.count if "fragments.count" in given else fragments
        made = figures(site, loaded, fragments, steps)
        if made["fits"]:
            break
    print(json.dumps(made, indent=1) if json_ else as_text(made))
    return 0 if made["fits"] else 1


def as_text(plan: dict[str, Any]) -> str:
    """The figures for people: each in a fitting unit, shares in per cent."""
    facts = dict(plan)
    shares, fullest, fits = facts.pop("shares"), facts.pop("fullest"), facts.pop("fits")
    lines = []
    units = {"_bits_per_s": BitRate, "_bytes": Size, "_s": Duration}
    for name, value in facts.items():
        ending = next((ending for ending in units if name.endswith(ending)), "")
        text = units[ending](value).text() if ending and value is not None else str(value)
        if value is None:
            text = "never: no line is left for it"
        lines.append(f"{name.removesuffix(ending).replace('_', ' '):40} {text}")
    lines += ["", *(f"{name:40} {share:.0%}" for name, share in shares.items()), ""]
    verdict = "It fits" if fits else f"It does not fit, as more than {USABLE:.0%} cannot be used"
    lines.append(f"{verdict}. Fullest: {fullest}.")
    lines.append("What helps: a longer sync period, a larger codec.rho, a relay per site.")
    return "\n".join(lines)


def _parsed(kind: type[Quantity], flag: str, text: str) -> float:
    try:
        return kind.parse(text)
    except ConfigError as error:
        words = {"expected": error.expected, "got": error.got, "remedy": error.remedy}
        raise ConfigError(f"{flag}: {error.message}", **words) from error
