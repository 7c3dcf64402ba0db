"""`narrows bench wan`: five promises about a line, each with what is asked of it beside the figure.

budget: learners use the rate that they may use, and no second is above it. far: 100 ms of round
trip leave a line of 1 Gbit/s full. frozen: a learner that stands still costs the one beside it
nothing. relay: one copy of each publication crosses the line of a site. revoke: a key is taken back
while everybody pushes, and only its learner notices.

All but `frozen` and `revoke` need root, because they build network namespaces.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from statistics import median
from typing import Final

from narrows.bench.kit.line import FarLine, Line, Sample, available, peak_bits_per_s
from narrows.bench.kit.rows import Column, Json, Row, Short, bench
from narrows.bench.kit.run import HURRY, TENSORS, TOKENS, WIDTH, Deployment, Toy, numbered
from narrows.proto.keys import AllowList
from narrows.proto.units import BitRate

FRAGMENTS: Final = 4
PARAMS: Final = 1 << 20
PARAMS_MAX: Final = 1 << 24
TOY: Final = Toy("learner", PARAMS)
TRANSFER_S: Final = 0.4
"""Seconds that a fragment takes at the rate. With less, latencies would fill the time, and not the
budget."""
PLAIN: Final = {"codec.push": "f32-blosc2", "codec.publish": "f32-blosc2"}
"""Settings with ten times as many bits for the same work: with the default codecs two cores cannot
fill a fast line."""
PLAIN_FROM_BITS_PER_S: Final = 100e6

TRIP_S: Final = 0.1
FAR_RATE: Final = "1Gbit/s"
FAR_PARAMS: Final = 1 << 25
FAR_FRAGMENTS: Final = 2

NOTICED_S: Final = 5.0
"""By then the broker no longer waits for a learner that stands still."""
LOOKED_S: Final = 2.5
"""By then a running broker has read its changed allow list."""
ON_ITS_WAY_S: Final = 0.25
"""By then a learner that is cut off has received and installed what had left for it."""
REVOKED_PERIOD_STEPS: Final = 24

ASKED: Final = {
    "budget": "mean 0.95 to 1, second <= 1.02",
    "far": f"0.9 of {FAR_RATE} at {TRIP_S * 1e3:.0f} ms, each",
    "frozen": f"loses <= 0.05 after {NOTICED_S:.0f} s",
    "relay": "3.5 times fewer bytes down",
    "revoke": "pause <= 1 s, 0 copies, < 2 periods",
}

UNPRIVILEGED: Final = {"frozen", "revoke"}
"""Promises that need no network namespaces."""

COLUMNS: Final = tuple(
    Column(key, key) for key in ("promise", "rate", "learners", "asked", "found", "held")
)


@dataclass(frozen=True)
class WanCell:
    """One promise, and the run that tries it."""

    promise: str
    learners: int = 2
    rate: str = "0"
    """The rate of all learners together; "0": no limit."""
    streams: int = 0
    """Connections per learner and direction; 0: the broker chooses."""
    seconds: float = 12.0


RATES: Final = {
    "10Mbit/s": (1, 2, 4), "50Mbit/s": (2,), "100Mbit/s": (1, 2, 4), "500Mbit/s": (2, 4),
    "1Gbit/s": (1, 2), "2Gbit/s": (2,),
}  # fmt: skip
CELLS: Final = (
    *(WanCell("budget", count, rate) for rate, counts in RATES.items() for count in counts),
    *(WanCell("far", 1, streams=streams) for streams in (1, 4)),
    *(WanCell("frozen", 2, rate, seconds=60.0) for rate in ("0", "20Mbit/s")),
    WanCell("relay", 8),
    WanCell("revoke", 4),
)
SHORT: Final = (
    WanCell("budget", 2, "20Mbit/s", seconds=4.0),
    WanCell("frozen", seconds=8.0),
    WanCell("revoke", 3, seconds=4.0),
)


def wan(*, short: Short = False, json: Json = None, only: tuple[str, ...] = ()) -> None:
    """Measure what is promised of a line: its budget, a far one, frozen peers, relays, revocation.

    Parameters
    ----------
    only
        Names of promises (budget, far, frozen, relay, revoke); without it all. Repeatable.
    """
    cells = [each for each in (SHORT if short else CELLS) if each.promise in (only or ASKED)]
    if not available() and {each.promise for each in cells} - UNPRIVILEGED:
        print("budget, far and relay are left out: only root can build a line, and with `ip`")
        cells = [each for each in cells if each.promise in UNPRIVILEGED]
    bench("wan", cells, measure, COLUMNS, headline, json=json)


def measure(cell: WanCell) -> Row:
    """One cell: `held` says whether `found` is what is `asked`.

    Raises NarrowsError for a line that cannot be built.
    """
    promises = {
        "budget": _budget, "far": _far, "frozen": _frozen, "relay": _relay, "revoke": _revoke,
    }  # fmt: skip
    row = promises[cell.promise](cell)
    held = "yes" if row["held"] else "NO"
    return {"asked": ASKED[cell.promise], **row, "held": held}


def headline(rows: Sequence[Row]) -> list[str]:
    """How many promises held, and each that did not."""
    broken = [row for row in rows if row["held"] != "yes"]
    return [
        f"{len(rows) - len(broken)} of {len(rows)} held",
        *(f"{row['promise']} {row['rate']} {row['learners']}: {row['found']}" for row in broken),
    ]


# The promises. A row has the figures, says them in words as `found`, and whether they are what is
# asked as `held`.


def _budget(cell: WanCell) -> Row:
    rate = float(BitRate.parse(cell.rate))
    is_plain = rate >= PLAIN_FROM_BITS_PER_S
    codecs = PLAIN if is_plain else {}
    bits_per_param = 32 if is_plain else 3
    elements = TRANSFER_S * rate / cell.learners / bits_per_param
    unit = TENSORS * WIDTH
    params = min(PARAMS_MAX, unit * (1 + int(FRAGMENTS * elements / unit)))

    # One way at a time: with both limited a round crosses one line after the other, and neither is
    # full. With a quorum of all, every round has a push of each learner; with fewer pushes more
    # would be published than pushed.
    means = list[float]()
    peaks = list[float]()
    for way in ("up", "down"):
        settings = {f"wan.total_{way}": cell.rate, "merge.quorum": 0, **HURRY, **codecs}
        with Line() as line, Deployment(line=line) as run:
            _serve(run, cell, settings)
            _join(run, cell, replace(TOY, params=params))
            run.wait_merges(FRAGMENTS)
            first = line.read()
            run.wait(cell.seconds)
            last = line.read()
            up, down = peak_bits_per_s(line.samples)
        crossed_bits = 8 * (getattr(last, way) - getattr(first, way))
        means.append(crossed_bits / (last.at_s - first.at_s) / rate)
        peaks.append({"up": up, "down": down}[way] / rate)
    return {
        "found": "mean {:.3f} up {:.3f} down, second {:.3f} {:.3f}".format(*means, *peaks),
        "held": min(means) >= 0.95 and max(means) <= 1.0 and max(peaks) <= 1.02,
        "params": params,
        "mean_shares": means,
        "peak_shares": peaks,
    }


def _far(cell: WanCell) -> Row:
    """Publications to one learner; then a joiner's first copy, while nothing else crosses."""
    rate = float(BitRate.parse(FAR_RATE))
    settings = {"wan.streams": cell.streams, "fragments.count": FAR_FRAGMENTS, **HURRY, **PLAIN}
    toy = replace(TOY, params=FAR_PARAMS, moved=TENSORS)
    with FarLine(TRIP_S / 2, rate) as line, Deployment(line=line) as run:
        _serve(run, cell, settings)
        (name,) = _join(run, cell, toy)
        joined = len(line.samples)
        run.wait(cell.seconds)
        run.kill(name)
        killed = len(line.samples)
        _join(run, cell, replace(toy, name="joiner"))
        publications = _busy_share(line.samples[joined:killed], rate)
        copy = _busy_share(line.samples[killed:], rate)
    return {
        "found": f"{cell.streams} streams: publications {publications:.2f}, first copy {copy:.2f}",
        "held": min(publications, copy) >= 0.9,
        "publication_share": publications,
        "copy_share": copy,
    }


def _busy_share(samples: Sequence[Sample], rate: float) -> float:
    """Median share of the rate that is used down the line, at the times when it carries anything:
    in the rest of the time the processes work, which says nothing about the line."""
    shares = [8 * (b.down - a.down) / (b.at_s - a.at_s) / rate for a, b in pairwise(samples)]
    return median([each for each in shares if each > 0.1] or [0.0])


def _frozen(cell: WanCell) -> Row:
    """Rounds per second of a learner before, while and after another one stands still."""
    with Deployment() as run:
        _serve(run, cell, {"wan.total_up": cell.rate, "wan.total_down": cell.rate, **HURRY})
        fast, frozen = _join(run, cell)
        begun = time.time()
        run.wait(cell.seconds / 4)
        run.running[frozen].signal(signal.SIGSTOP)
        stopped = time.time()
        run.wait(cell.seconds)
        run.running[frozen].signal(signal.SIGCONT)
        woken = time.time()
        run.wait(cell.seconds / 4)
        at = [each["time_s"] for each in run.installed(fast)]
        ended = time.time()

    noticed = stopped + min(NOTICED_S, cell.seconds / 2)
    spans = ((begun, stopped), (stopped, noticed), (noticed, woken), (woken, ended))
    rates = [sum(a <= each < b for each in at) / (b - a) for a, b in spans]
    before, noticing, beside, after = rates
    # A learner that made nothing before has nothing to keep: that counts as a loss of all.
    lost = 1.0
    if before > 0:
        lost = 1 - beside / before
    pause_s = max(gaps([stopped, *(each for each in at if stopped < each < woken)]))
    return {
        "found": f"rounds/s {before:.1f}, then {noticing:.1f}, {beside:.1f}, after {after:.1f};"
        f" longest pause {pause_s:.1f} s",
        "held": lost <= 0.05,
        "rounds_per_s": rates,
        "lost": lost,
        "longest_pause_s": pause_s,
    }


def _relay(cell: WanCell) -> Row:
    """Bytes down a line, without relays and with one for each of two sites at its far end."""
    direct = _down_bytes(cell, relays=0)
    relayed = _down_bytes(cell, relays=2)
    fewer = direct / relayed
    return {
        "found": f"{direct:.2f} bytes per byte published, {relayed:.2f} with relays:"
        f" {fewer:.2f} times fewer",
        "held": fewer >= 3.5,
        "down_bytes_per_byte": [direct, relayed],
        "times_fewer": fewer,
    }


def _down_bytes(cell: WanCell, *, relays: int) -> float:
    """Bytes that cross the line to all learners together, for each byte that is published."""
    with Line() as line, Deployment(line=line) as run:
        _serve(run, cell, HURRY)
        vias = [f"tcp://127.0.0.1:{7080 + index}" for index in range(relays)]
        for index, via in enumerate(vias):
            # A learner that finds none yet dials again by itself.
            run.command(f"relay-{index}", "relay", "--listen", via, "--broker", run.address)
        for name, via in zip(numbered(TOY.name, cell.learners), cycle(vias), strict=False):
            run.environment[name] = {"NARROWS_RELAY": via}
        _join(run, cell)
        merges = len(run.merges())
        first = line.read()
        run.wait(cell.seconds)
        published = sum(each["published_bytes"] for each in run.merges()[merges:])
        return float((line.read().down - first.down) / published)


def _revoke(cell: WanCell) -> Row:
    """Pauses of the other learners around the revocation of one, and its copies after that."""
    with Deployment() as run:
        keys = run.make_keys(numbered(TOY.name, cell.learners))
        _serve(run, cell, {"fragments.sync_period_steps": REVOKED_PERIOD_STEPS})
        gone, *others = _join(run, cell, replace(TOY, step_s=0.01))
        run.wait(cell.seconds)
        AllowList.revoke(keys, gone)
        run.wait(max(LOOKED_S, cell.seconds))
        revoked = next(
            note["time_s"] for note in run.events("broker", "note") if note["kind"] == "revoked"
        )
        logged, merged = run.account(others)
        at = {n: [each["time_s"] for each in run.installed(n)] for n in (gone, *others)}

    pause_s = 0.0
    usual_s = 0.0
    for name in others:
        near = [each for each in at[name] if revoked - 1 < each < revoked + 1]
        pause_s = max(pause_s, *gaps(near))
        usual_s = max(usual_s, median(gaps(at[name])))
    # What was on its way when the connections ended may still arrive.
    late = sum(each > revoked + ON_ITS_WAY_S for each in at[gone])
    period_tokens = REVOKED_PERIOD_STEPS * TOKENS
    behind = max(
        (logged[name] - merged[name, fragment]) / period_tokens
        for name in others
        for fragment in range(FRAGMENTS)
    )
    return {
        "found": f"pause {1e3 * pause_s:.0f} ms (usually {1e3 * usual_s:.0f}), {late} copies,"
        f" {behind:.1f} periods",
        "held": pause_s <= 1.0 and late == 0 and behind < 2,
        "pause_s": pause_s,
        "copies_after": late,
        "behind_periods": behind,
    }


# What all promises share.


def gaps(times: Sequence[float]) -> list[float]:
    """The time from each to the next."""
    return [after - before for before, after in pairwise(times)]


def _serve(run: Deployment, cell: WanCell, settings: Mapping[str, object]) -> None:
    """Starts the broker; `settings` outdo those that all promises share."""
    run.broker({"run.learners_at_start": cell.learners, "fragments.count": FRAGMENTS, **settings})


def _join(run: Deployment, cell: WanCell, like: Toy = TOY) -> list[str]:
    """Starts the cell's number of toys; returns their names once all have joined."""
    names = run.toys(like, cell.learners)
    run.wait_joined(names)
    return names
