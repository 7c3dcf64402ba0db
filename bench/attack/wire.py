"""`narrows bench attack wire`: throughput and memory of a broker under each attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from narrows.bench.attack.catalogue import ATTACKS
from narrows.bench.attack.stage import Scene, Stage
from narrows.bench.kit import machine
from narrows.bench.kit.processes import Processes, work_folder
from narrows.broker.cli.tables import Table, show, terminal
from narrows.proto.config import check_choice

SETTLE_S: Final = 5.0
"""Time after an attack in which the run may still be slower."""
BEFORE_SHARE: Final = 1 / 3
AFTER_SHARE: Final = 1 / 4
"""Times that are measured before and after an attack, in units of its own."""
RSS_GROWTH_BYTES_MAX: Final = 200_000_000
RECORDS_BYTES_PER_S_MAX: Final = 10_000.0
MB: Final = 1e6


@dataclass(frozen=True)
class AttackRow:
    """One attack. Rates are relative to the time before it."""

    attack: str
    attempts: int
    versions_per_s_before: float
    during_ratio: float
    after_ratio: float
    """From SETTLE_S after the end of the attack on."""
    floor: float
    rss_growth_bytes: int
    """Peak during the attack and after it, less the peak before."""
    records_bytes_per_s: float
    """Growth of log and journal, less what the merged pushes of that time account for: an attacker
    that trains has its own journalled."""
    run_tokens_per_s_ratio: float
    breach: str
    """A deed of the attacker that should not be possible; empty: there was none."""

    @property
    def holds(self) -> bool:
        """True if the run lost no more than it may."""
        return (
            not self.breach
            and self.during_ratio >= self.floor
            and self.rss_growth_bytes <= RSS_GROWTH_BYTES_MAX
            and self.records_bytes_per_s <= RECORDS_BYTES_PER_S_MAX
        )


def run_wire(
    names: Sequence[str], *, seconds: float, scene: Scene, keep: Path | None, json_file: Path | None
) -> bool:
    """Runs the attacks one after the other on one run. False if one of them got too far."""
    for name in names:
        check_choice("--attack", name, tuple(ATTACKS))
    rows: list[AttackRow] = []
    console = terminal()
    with work_folder(keep, "attack") as folder, Processes(folder) as processes:
        stage = Stage.open(processes, scene)
        stage.watch(SETTLE_S)
        for name in names or tuple(ATTACKS):
            console.print(f"{name}: {ATTACKS[name].description}", markup=False)
            row = _under(stage, name, seconds)
            rows.append(row)
            console.print(
                f"  {row.during_ratio:.0%} of {row.versions_per_s_before:.1f} versions/s,"
                f" {row.after_ratio:.0%} after, {row.rss_growth_bytes / MB:+.0f} MB,"
                f" {row.records_bytes_per_s / 1e3:+.1f} kB/s {row.breach}",
                markup=False,
            )
            machine.write_result(json_file, "attack", {"rows": [asdict(each) for each in rows]})
    show(console, _table(rows))
    return all(row.holds for row in rows)


def _under(stage: Stage, name: str, seconds: float) -> AttackRow:
    before = stage.watch(BEFORE_SHARE * seconds)
    stage.attack(name)
    during = stage.watch(seconds)
    attempts, breach = stage.end_attack()
    stage.watch(SETTLE_S)
    after = stage.watch(AFTER_SHARE * seconds)
    usual = (before.log_bytes_per_s + before.disk_bytes_per_s) / before.contributions_per_s
    records = during.log_bytes_per_s + during.disk_bytes_per_s - usual * during.contributions_per_s
    peak = max(during.rss_peak_bytes, after.rss_peak_bytes)
    return AttackRow(
        name,
        attempts,
        before.versions_per_s,
        during.versions_per_s / before.versions_per_s,
        after.versions_per_s / before.versions_per_s,
        ATTACKS[name].floor,
        peak - before.rss_peak_bytes,
        records,
        during.run_tokens_per_s / before.run_tokens_per_s,
        breach,
    )


def _table(rows: Sequence[AttackRow]) -> Table:
    table = Table(
        (
            "attack",
            "attempts",
            "versions/s",
            "floor",
            "after",
            "memory",
            "records",
            "clock",
            "holds",
        ),
        left=("holds",),
    )
    for row in rows:
        table.add(
            row.attack,
            f"{row.attempts:,}",
            f"{row.during_ratio:.0%}",
            f"{row.floor:.0%}",
            f"{row.after_ratio:.0%}",
            f"{row.rss_growth_bytes / MB:+.0f} MB",
            f"{row.records_bytes_per_s / 1e3:+.1f} kB/s",
            f"{row.run_tokens_per_s_ratio:.2f}",
            row.breach or ("yes" if row.holds else "no"),
        )
    return table
