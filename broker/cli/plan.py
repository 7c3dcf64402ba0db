"""`narrows plan`: what a run needs before it starts, and what will be full first.

Bits follow from the formats; times are those of two virtual cores, and other machines differ by a
factor. A plan fills nothing beyond 80%: repairs, joiners and bursts need the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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
from narrows.proto.units import Amount, BitRate, Duration, Size

USABLE: Final = 0.8
SYNC_PERIODS: Final = (10, 15, 20, 24, 30, 40, 50, 75, 100, 150, 200, 300, 500)
"""H that a plan may choose. 10 is the best that was measured; papers use 24 to 100."""
LATE_STEPS_MAX: Final = 5.0
"""Steps of overlap that cost next to nothing (Streaming DiLoCo, arXiv 2501.18512)."""
FRAGMENT_PARAMS_MAX: Final = 1 << 30

# Seconds per parameter.
ENCODE_S: Final = 1.5e-9
"""A learner codes a push."""
DECODE_S: Final = 0.75e-9
"""A worker decodes a push, or a learner a publication."""
MERGE_S: Final = 0.5e-9
"""A worker adds one push to a round."""
STEP_S: Final = 5e-9
"""A worker takes the outer step and codes its publication."""

# Bytes per parameter.
STATE_BYTES: Final = 12
"""The broker's global, momentum and published copy, in memory and in a snapshot."""
MERGE_BYTES: Final = 20
"""A merge."""
FLIGHT_BYTES: Final = 16
"""A learner's fragment in flight."""
FIRST_COPY_BYTES: Final = 3.4
"""A joiner's first copy, on the line."""
COPY_BYTES: Final = 4
"""A learner's published copy. Where parameters are bfloat16 or float16 there are two."""

LINE_MIN: Final = 1000.0
"""Bits per second. Below it a unit was forgotten."""

SETTINGS: Final = {
    "fragments": "fragments.count",
    "sync_period_steps": "fragments.sync_period_steps",
    "overlap_steps": "fragments.overlap_steps",
}
"""Figures that are settings of the broker, as `--set` names them."""

UP, DOWN = "line of a learner, up (--wan)", "line of a learner, down (--wan)"
IN, OUT = "line of the broker, in (--broker-wan)", "line of the broker, out (--broker-wan)"
LATE, FLIGHT = "lateness of an update", "rounds in flight"

FEWER_BITS: Final = "a longer fragments.sync_period_steps, a larger codec.rho"
HELPS: Final = {
    UP: FEWER_BITS,
    DOWN: FEWER_BITS,
    IN: FEWER_BITS,
    OUT: f"{FEWER_BITS}; at a site of several learners a relay (`narrows relay`)",
    LATE: "faster lines, a larger fragments.count, a larger codec.rho",
    FLIGHT: "a longer fragments.sync_period_steps, faster lines",
}
"""By the fullest part, the changes that relieve it."""

GAUSSIAN_BITS: Final = 2.05
"""Differential entropy of a Gaussian value of deviation 1."""
FRAME_BYTES: Final = (22, 69)
"""Topic and header of a data message with long names and numbers."""


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
    return 8 * wire_bytes((*FRAME_BYTES, payload), curve=bool(config.broker.keys)) / chunk


def figures(
    config: BrokerConfig,
    *,
    params: int,
    step_s: float,
    learners: int,
    line: float,
    broker_line: float,
    fragments: int,
    period_steps: int,
    ranks: int = 1,
) -> dict[str, Any]:
    """All that a run of P fragments and sync period H needs; units are in the names.

    Lines are bit/s in each direction. Of an island of several ranks, rank 0 has the sockets, the
    copies and the codes; a fragment moves to it, and back, at each exchange.
    """
    largest = -(-params // fragments)
    push = line_bits(config, config.codec.push, largest)
    publish = line_bits(config, config.codec.publish, largest)
    period_s = period_steps * step_s
    up = push * params / period_s
    down = publish * params / period_s

    # From the snapshots of a fragment until its next version exists, then until it is adopted.
    # Coding, transfer and decoding overlap chunk by chunk: the slowest of them counts.
    rate = min(line, broker_line / learners)
    arrive_s = max(largest * ENCODE_S, largest * push / rate, largest * DECODE_S * learners / 2)
    round_s = arrive_s + largest * (MERGE_S * learners + STEP_S)
    exchange_s = round_s + largest * (publish / rate + DECODE_S)
    overlap_steps = max(config.fragments.overlap_steps, math.ceil(exchange_s / step_s))
    spare = min(line - down, broker_line - learners * down)

    # Memory and disk, in bytes per parameter. On disk are two snapshots, a third one while it is
    # written, and the payloads since the older one.
    flight = min(IN_FLIGHT_MAX, fragments) / fragments
    own_push = CODECS[config.codec.push].bits / 8 + push / 8
    copies = COPY_BYTES + own_push + FLIGHT_BYTES * flight
    elsewhere = 1 - 1 / ranks
    memory = STATE_BYTES + FIRST_COPY_BYTES + PUBLICATIONS_KEPT * publish / 8
    written = learners * push / 8 / period_s
    disk = 3 * STATE_BYTES + 2 * SNAPSHOT_VERSIONS * period_s * written
    shares = {
        UP: up / line,
        DOWN: down / line,
        IN: learners * up / broker_line,
        OUT: learners * down / broker_line,
        LATE: exchange_s / step_s / LATE_STEPS_MAX,
        FLIGHT: round_s * fragments / period_s / IN_FLIGHT_MAX,
    }
    return {
        "fragments": fragments,
        "sync_period_steps": period_steps,
        "overlap_steps": min(overlap_steps, period_steps - 1),
        "push_bits_per_param": round(push, 3),
        "publish_bits_per_param": round(publish, 3),
        "learner_up_bits_per_s": up,
        "learner_down_bits_per_s": down,
        "broker_in_bits_per_s": up * learners,
        "broker_out_bits_per_s": down * learners,
        "exchange_s": exchange_s,
        "join_s": 8 * FIRST_COPY_BYTES * params / spare if spare > 0 else None,
        "broker_memory_bytes": params * (memory + flight * (MERGE_BYTES + learners * own_push)),
        "learner_memory_bytes": params * copies,
        "ranks_move_per_step_bytes": 2 * 4 * params * elsewhere / period_steps,
        "journal_per_hour_bytes": 3600 * params * written,
        "disk_bytes": params * disk,
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
    ranks: int = 1,
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
        ranks: Processes of each learner, as torchrun starts them. Rank 0's host holds the copies:
            `learner memory`, besides the model itself.
        config: TOML file of the broker. P and H in it stand, others are chosen.
        setting: KEY=VALUE, as for the broker.
        json_: Print JSON; units are in the names.
    """
    flags = assigned(setting or ())
    loaded = load_broker(config, flags)
    line = _line(wan, "--wan")
    broker_line = _line(broker_wan or wan, "--broker-wan")
    count = int(Amount.parse(params, "--params: "))
    step_s = Duration.parse(step, "--step: ")
    if (
        loaded.run.mode is Mode.DILOCO
        or min(count, learners, ranks, step_s, line, broker_line) <= 0
    ):
        raise ConfigError(
            "no plan for this",
            expected="a mode without lockstep, and sizes above 0",
            got=f"{loaded.run.mode}, {count} parameters, {learners} learners of {ranks} ranks,"
            f" {step_s} s a step, {line} and {broker_line} bit/s",
        )
    given = given_keys(BrokerConfig, config) | flags.keys()
    periods: Sequence[int] = SYNC_PERIODS
    if "fragments.sync_period_steps" in given:
        periods = [loaded.fragments.sync_period_steps]
    made: dict[str, Any] = {}
    for steps in periods:
        fragments = loaded.fragments.count
        if "fragments.count" not in given:
            # One fragment per step, as in the paper, unless they are then too large or too small.
            most = max(1, count // loaded.shared.chunk_elements)
            fewest = -(-count // FRAGMENT_PARAMS_MAX)
            fragments = min(max(fewest, min(steps, most)), FRAGMENTS_MAX)
        made = figures(
            loaded,
            params=count,
            step_s=step_s,
            learners=learners,
            line=line,
            broker_line=broker_line,
            fragments=fragments,
            period_steps=steps,
            ranks=ranks,
        )
        if made["fits"]:
            break
    print(json.dumps(made, indent=1) if json_ else as_text(made))
    return int(not made["fits"])


def _line(text: str, flag: str) -> BitRate:
    """The bits per second of a line. Raises ConfigError, also where a unit was forgotten."""
    rate = BitRate.parse(text, f"{flag}: ")
    if 0 < rate < LINE_MIN:
        raise ConfigError(
            f"{flag}: a line of {rate:g} bit/s",
            expected="a number with its unit, such as 1Gbit/s",
            got=repr(text),
            remedy=f"write {flag} {rate:g}Gbit/s if that is meant",
        )
    return rate


def as_text(plan: dict[str, Any]) -> str:
    """The figures for people: each in a fitting unit, shares in per cent."""
    lines: list[str] = []
    units = {"_bits_per_s": BitRate, "_bytes": Size, "_s": Duration}
    verdicts = ("shares", "fullest", "fits")
    # Without ranks nothing moves between them.
    facts = {name: plan[name] for name in plan if name not in verdicts and plan[name] != 0}
    for name, value in facts.items():
        ending = next((ending for ending in units if name.endswith(ending)), "")
        if value is None:
            text = "never: no line is left for it"
        elif ending:
            text = units[ending](value).text()
        else:
            text = str(value)
        label = SETTINGS.get(name, name.removesuffix(ending).replace("_", " "))
        lines.append(f"{label:40} {text}")
    lines += ["", *(f"{name:40} {share:.0%}" for name, share in plan["shares"].items()), ""]
    verdict = "It fits"
    if not plan["fits"]:
        verdict = f"It does not fit, as more than {USABLE:.0%} cannot be used"
    lines.append(f"{verdict}. Fullest: {plan['fullest']}.")
    if not plan["fits"]:
        lines.append(f"What helps: {HELPS[plan['fullest']]}.")
    return "\n".join(lines)
