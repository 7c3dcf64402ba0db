"""Results of `narrows bench chaos`: from the files of a run to one row and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from rich.console import Console
from rich.text import Text

from narrows.bench.chaos.learner import TOKENS_PER_STEP
from narrows.bench.chaos.tape import Fault, Kind
from narrows.bench.kit.evidence import Evidence, compare_digests, read_evidence
from narrows.bench.kit.rows import read_rows
from narrows.broker.cli import tables
from narrows.broker.cli.tables import Facts
from narrows.broker.storage import RoundRecord
from narrows.proto.errors import ErrorCode, NarrowsError

Row: TypeAlias = dict[str, Any]
Record: TypeAlias = dict[str, Any]
Records: TypeAlias = list[Record]

CUTS: Final = (Kind.CUT, Kind.RESET)


@dataclass(frozen=True)
class Window:
    """A span of time, in seconds of the system's clock."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def holds(self, at: float) -> bool:
        return self.begin <= at < self.end


@dataclass
class Outage:
    """A fault as it was applied; times of the system's clock."""

    fault: Fault
    began: float
    ended: float = 0.0


@dataclass
class ChaosStory:
    """Record of the faults, and of what must not happen."""

    names: tuple[str, ...]
    quiet: Window = field(default=Window(0, 0))
    chaos: Window = field(default=Window(0, 0))
    outages: list[Outage] = field(default_factory=list[Outage])
    problems: list[str] = field(default_factory=list[str])
    """Things that must not happen: a learner that ends by itself, or does not come back."""


def collect(folder: Path, story: ChaosStory, *, fragments: int) -> Row:
    """The row of a run that has ended. Raises NarrowsError if there was nothing to measure."""
    evidence = read_evidence(folder / "state", fragments=fragments)
    for window in (story.quiet, story.chaos):
        if not any(window.holds(r.at) for r in evidence.rounds):
            raise NarrowsError(
                ErrorCode.MISUSE,
                f"nothing was merged within {window.seconds:.0f} s",
                remedy="give it more --seconds, or a shorter --step",
            )
    lives = {name: read_rows(folder / f"{name}.life") for name in story.names}
    digests = compare_digests(evidence.digests, [folder / f"{name}.jsonl" for name in story.names])
    unbalanced = [*evidence.audit.problems, *ledger_problems(lives, evidence, fragments)]
    kinds = Counter(outage.fault.kind for outage in story.outages)
    return {
        "learners": len(story.names),
        "seconds": story.chaos.seconds,
        "quiet_seconds": story.quiet.seconds,
        "faults": len(story.outages),
        "kills": kinds[Kind.KILL],
        "stops": kinds[Kind.STOP],
        "cuts": sum(kinds[kind] for kind in CUTS),
        "resets_among_cuts": kinds[Kind.RESET],
        "broker_kills": kinds[Kind.BROKER],
        **throughput(story, lives, evidence.rounds, fragments),
        **participation(story, evidence.rounds),
        **rejoins(story, lives, evidence.rounds),
        "digests_compared": digests.compared,
        "digests_different": digests.different,
        "versions_lost": digests.unknown,
        "replay_equal": evidence.replay_equal,
        "ledger_ok": not unbalanced,
        "problems": story.problems + unbalanced,
    }


def throughput(
    story: ChaosStory, lives: Mapping[str, Records], rounds: Sequence[RoundRecord], fragments: int
) -> Row:
    """Steps made and tokens merged per second under faults, relative to the quiet minutes before.

    A token is merged once per fragment; the rates count tokens that were merged into all fragments.
    `available_percent` is the share of the learners' time in which their processes were neither
    dead nor stopped. Nobody can exceed it.
    """
    steps = [line["time_s"] for life in lives.values() for line in life if line["event"] == "step"]
    rates: dict[str, tuple[float, float]] = {}
    for name, window in (("quiet", story.quiet), ("chaos", story.chaos)):
        made = sum(map(window.holds, steps)) * TOKENS_PER_STEP
        within = [r for r in rounds if window.holds(r.at)]
        merged = sum(each.tokens for r in within for each in r.contributors) / fragments
        rates[name] = made / window.seconds, merged / window.seconds
    (quiet_made, quiet_merged), (made_per_s, merged_per_s) = rates["quiet"], rates["chaos"]
    dead_s = _seconds_within(story, Kind.KILL, Kind.STOP)
    available = 1 - dead_s / (len(story.names) * story.chaos.seconds)
    return {
        "throughput_kept_percent": 100 * made_per_s / quiet_made,
        "merged_kept_percent": 100 * merged_per_s / quiet_merged,
        "available_percent": 100 * available,
        "throughput_of_available_percent": 100 * made_per_s / quiet_made / available,
        "tokens_made_per_s": made_per_s,
        "tokens_merged_per_s": merged_per_s,
        "quiet_tokens_made_per_s": quiet_made,
        "quiet_tokens_merged_per_s": quiet_merged,
    }


def _seconds_within(story: ChaosStory, *kinds: Kind) -> float:
    """Learner-seconds of the run with faults that faults of these kinds took."""
    return sum(
        max(0.0, min(outage.ended, story.chaos.end) - outage.began)
        for outage in story.outages
        if outage.fault.kind in kinds
    )


def participation(story: ChaosStory, rounds: Sequence[RoundRecord]) -> Row:
    """Contributors per merge, as a share of all learners of the run, dead or alive."""
    learners = len(story.names)
    counts = [len(r.contributors) for r in rounds if story.chaos.holds(r.at)]
    quiet = [len(r.contributors) for r in rounds if story.quiet.holds(r.at)]
    times = sorted(r.at for r in rounds if story.chaos.holds(r.at))
    gaps = np.diff([story.chaos.begin, *times, story.chaos.end])
    return {
        "merges": len(counts),
        "merges_per_s": len(counts) / story.chaos.seconds,
        "longest_merge_gap_s": float(gaps.max()),
        "participation_percent": 100 * float(np.mean(counts)) / learners,
        "participation_min": min(counts),
        "participation_p5": float(np.percentile(counts, 5)),
        "participation_median": float(np.median(counts)),
        "participation_quiet_percent": 100 * float(np.mean(quiet)) / learners,
        "merges_by_contributors": {str(k): n for k, n in sorted(Counter(counts).items())},
    }


def rejoins(story: ChaosStory, lives: Mapping[str, Records], rounds: Sequence[RoundRecord]) -> Row:
    """Seconds from the end of each fault to the victim's next merged contribution.

    For a fault of the broker: to the next merge. For a kill also: to the adoption of all fragments.
    A victim that failed again before it contributed is counted, not timed.
    """
    by_kind: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    adopted: list[float] = []
    interrupted = 0
    for outage in story.outages:
        until = _next_outage(story, outage)
        joined = _joined(lives, outage, until)
        if joined is not None:
            adopted.append(joined["time_s"] - outage.ended)
        at = _contributed(outage, rounds, joined)
        if at is None or at > until:
            interrupted += 1
        else:
            by_kind[outage.fault.kind].append(at - outage.ended)
    learners = [s for kind, each in by_kind.items() if kind is not Kind.BROKER for s in each]
    return {
        **_spread("rejoin", learners),
        "rejoins_interrupted": interrupted,
        **_spread("rejoin_kill", by_kind[Kind.KILL]),
        **_spread("adopt_kill", adopted),
        **_spread("rejoin_stop", by_kind[Kind.STOP]),
        **_spread("rejoin_cut", [s for kind in CUTS for s in by_kind[kind]]),
        **_spread("rejoin_broker", by_kind[Kind.BROKER]),
    }


def _next_outage(story: ChaosStory, outage: Outage) -> float:
    victim = outage.fault.victim
    later = (o.began for o in story.outages if o.fault.victim == victim and o.began > outage.began)
    return min(later, default=float("inf"))


def _joined(lives: Mapping[str, Records], outage: Outage, until: float) -> Record | None:
    """The record of a killed learner's first process that adopted all fragments."""
    if outage.fault.kind is not Kind.KILL:
        return None
    for line in lives[outage.fault.victim]:
        if line["event"] == "joined" and outage.ended <= line["time_s"] < until:
            return line
    return None


def _contributed(
    outage: Outage, rounds: Sequence[RoundRecord], joined: Record | None
) -> float | None:
    kind, victim = outage.fault.kind, outage.fault.victim
    if kind is Kind.KILL and joined is None:
        return None
    incarnation = joined["incarnation"] if joined is not None else ""
    for r in rounds:
        who = ((each.learner, each.incarnation) for each in r.contributors)
        if r.at >= outage.ended and (
            kind is Kind.BROKER
            or any(name == victim and incarnation in ("", life) for name, life in who)
        ):
            return r.at
    return None


def _spread(name: str, values: Sequence[float]) -> Row:
    """Median and 95th percentile; None without values."""
    if not values:
        return {f"{name}_median_s": None, f"{name}_p95_s": None}
    median, p95 = np.percentile(values, (50, 95))
    return {f"{name}_median_s": float(median), f"{name}_p95_s": float(p95)}


def ledger_problems(
    lives: Mapping[str, Records], evidence: Evidence, fragments: int
) -> Iterator[str]:
    """Processes of learners whose ledger does not agree with the journal.

    A process that left in order has told its ledger. Every token has one fate per fragment. Its
    merged tokens are those of the journal, except for pushes whose outcome it had not heard: these
    are pending in the ledger. For a process that was killed, the journal holds no more tokens than
    it made.
    """
    merged = Counter[tuple[str, str]]()
    for (name, incarnation, _), tokens in evidence.audit.tokens.items():
        merged[name, incarnation] += tokens
    for name, incarnation, steps, ledger in _processes(lives):
        process = f"{name} ({incarnation[:8]})"
        in_journal = merged.pop((name, incarnation), 0)
        made = steps * TOKENS_PER_STEP
        if in_journal > made * fragments:
            counts = f"{in_journal} tokens merged, but {made} made"
            yield f"{process}: {counts} for {fragments} fragments"
        if ledger is None:
            continue
        fates = sum(value for key, value in ledger.items() if key != "logged")
        if ledger["logged"] != made or fates != fragments * made:
            yield f"{process}: {made} tokens made, not every one has one fate: {ledger}"
        if not ledger["merged"] <= in_journal <= ledger["merged"] + ledger["pending"]:
            yield f"{process}: {in_journal} tokens merged in the journal, its ledger says {ledger}"
    for name, incarnation in merged:
        yield f"{name} ({incarnation[:8]}): merged, but no such process has joined"


def _processes(
    lives: Mapping[str, Records],
) -> Iterator[tuple[str, str, int, dict[str, int] | None]]:
    """Name, incarnation, steps and ledger of each process that joined; ledger None: killed."""
    for name, life in lives.items():
        incarnation, steps = "", 0
        ledger: dict[str, int] | None = None
        after: Record = {"event": "started"}
        for line in [*life, after]:
            if line["event"] == "started":
                if incarnation:
                    yield name, incarnation, steps, ledger
                incarnation, steps, ledger = "", 0, None
            elif line["event"] == "joined":
                incarnation = line["incarnation"]
            elif line["event"] == "step":
                steps += 1
            elif line["event"] == "left":
                ledger = line["ledger"]


def show(console: Console, row: Row) -> None:
    """Prints the row as a table."""
    tables.show(console, facts(row))
    for problem in row["problems"]:
        console.print(Text(problem, "bold red"), soft_wrap=True)


def facts(row: Row) -> Facts:
    """The findings of one run."""
    shown = Facts("What the faults cost")
    for label, text in _lines(row):
        shown.add(label, text, "bold red" if text.isupper() or "DIFFERS" in text else "")
    return shown


def _lines(row: Row) -> Iterable[tuple[str, str]]:
    learners = row["learners"]
    yield (
        "faults",
        f"{row['faults']} in {row['seconds']:.0f} s: {row['kills']} kills, {row['stops']} stops, "
        f"{row['cuts']} cut lines, {row['broker_kills']} kills of the broker",
    )
    yield (
        "throughput kept: steps made",
        f"{row['throughput_kept_percent']:.1f}% of the quiet rate; "
        f"{row['available_percent']:.1f}% was available",
    )
    yield "throughput kept: tokens merged", f"{row['merged_kept_percent']:.1f}%"
    yield (
        "participation",
        f"{row['participation_percent']:.1f}% of {learners} learners, at least "
        f"{row['participation_min']}; quiet {row['participation_quiet_percent']:.1f}%",
    )
    yield (
        "merges",
        f"{row['merges']}, {row['merges_per_s']:.2f} per second, longest pause "
        f"{row['longest_merge_gap_s']:.1f} s",
    )
    if row["rejoins_interrupted"]:
        yield "failed again before they were merged", str(row["rejoins_interrupted"])
    for key, label in (
        ("rejoin", "from the end of a fault to merged again"),
        ("rejoin_kill", "  killed"),
        ("adopt_kill", "  killed, until it holds the model"),
        ("rejoin_stop", "  stopped"),
        ("rejoin_cut", "  cut off"),
        ("rejoin_broker", "broker killed, until the next merge"),
    ):
        if row[f"{key}_median_s"] is not None:
            median, p95 = row[f"{key}_median_s"], row[f"{key}_p95_s"]
            yield label, f"{median:.1f} s median, {p95:.1f} s at the 95th percentile"
    yield (
        "digests",
        f"{row['digests_compared']} compared, {row['digests_different']} different, "
        f"{row['versions_lost']} lost; replay {'equal' if row['replay_equal'] else 'DIFFERS'}",
    )
    yield "token ledger", "balanced" if row["ledger_ok"] else "NOT BALANCED"
