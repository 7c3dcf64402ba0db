"""The arithmetic of the chaos bench, on lives and rounds made by hand."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from running import wait_until

from narrows.bench.chaos.bench import run_chaos_bench
from narrows.bench.chaos.learner import TOKENS_PER_STEP
from narrows.bench.chaos.results import (
    ChaosStory,
    Outage,
    Records,
    Window,
    ledger_problems,
    participation,
    rejoins,
    throughput,
)
from narrows.bench.chaos.run import HOST, ChaosOptions, Run
from narrows.bench.chaos.tape import BROKER, Fault, Kind
from narrows.bench.kit.evidence import Evidence
from narrows.bench.kit.nursery import Nursery
from narrows.bench.kit.processes import Processes, free_ports
from narrows.bench.kit.proxy import Proxy
from narrows.broker.merging.policy import Policy
from narrows.broker.storage.audit import Audit
from narrows.broker.storage.records import ContributorRecord, RoundRecord, VectorRecord
from narrows.proto.errors import ConfigError, NarrowsError
from narrows.proto.messages import Phase

T = TOKENS_PER_STEP


def life(incarnation: str, joined: float, *steps: float) -> Records:
    return [
        {"time_s": joined - 1, "event": "started"},
        {"time_s": joined, "event": "joined", "incarnation": incarnation},
        *({"time_s": at, "event": "step"} for at in steps),
    ]


def merged(at: float, **incarnations: str) -> RoundRecord:
    contributors = tuple(
        ContributorRecord(name, incarnation, 1, T, 1, 1 / len(incarnations), T)
        for name, incarnation in incarnations.items()
    )
    return RoundRecord(
        epoch=(0, 1),
        fragment=0,
        version=1,
        reason="",
        contributors=contributors,
        policy=Policy("tokens", "mean", 0.0, 1.0, "sgd", 1.0, 0.0, False),
        phase=Phase.RUNNING,
        run_tokens=0,
        publication=VectorRecord("raw32", 0.0, ()),
        contributions=(),
        error_ratio=0.0,
        digests=(0, 0, 0),
        at=at,
    )


def story(*outages: Outage) -> ChaosStory:
    return ChaosStory(("a", "b"), Window(0, 10), Window(10, 30), list(outages))


def outage(kind: Kind, victim: str, began: float, ended: float) -> Outage:
    return Outage(Fault(began - 10, kind, victim, ended - began), began, ended)


def test_throughput_is_relative_to_the_quiet_time() -> None:
    lives = {"a": life("a1", 0, *range(30)), "b": life("b1", 0, *range(20))}
    rounds = [merged(at + 0.5, a="a1", b="b1") for at in range(10)]
    rounds += [merged(at + 0.5, a="a1") for at in range(10, 30)]
    row = throughput(story(outage(Kind.STOP, "b", 20, 35)), lives, rounds, 1)
    # Quiet: two steps a second. Faults: 30 steps in 20 s. One of two is stopped half of the time.
    assert row["throughput_kept_percent"] == pytest.approx(75)
    assert row["merged_kept_percent"] == pytest.approx(50)
    assert row["available_percent"] == pytest.approx(75)
    assert row["throughput_of_available_percent"] == pytest.approx(100)


def test_a_cut_line_takes_nobody_s_time() -> None:
    lives = {"a": life("a1", 0, *range(30)), "b": life("b1", 0, *range(30))}
    rounds = [merged(5, a="a1", b="b1"), merged(15, a="a1")]
    row = throughput(story(outage(Kind.CUT, "b", 12, 18)), lives, rounds, 1)
    assert row["available_percent"] == row["throughput_kept_percent"] == 100


def test_participation_counts_the_dead_as_well() -> None:
    rounds = [merged(5, a="a1", b="b1"), merged(12, a="a1", b="b1"), merged(20, a="a1")]
    row = participation(story(), rounds)
    assert row["participation_percent"] == pytest.approx(75)
    assert row["participation_quiet_percent"] == 100
    assert (row["participation_min"], row["merges"]) == (1, 2)
    assert row["longest_merge_gap_s"] == pytest.approx(10)
    assert row["merges_by_contributors"] == {"1": 1, "2": 1}


def test_a_killed_learner_is_back_when_its_new_process_is_merged() -> None:
    lives = {"a": life("a1", 0) + life("a2", 17), "b": life("b1", 0)}
    # A push of the process that was killed is merged after its death.
    rounds = [
        merged(12, a="a1"),
        merged(16, a="a1", b="b1"),
        merged(18, b="b1"),
        merged(19, a="a2"),
    ]
    row = rejoins(story(outage(Kind.KILL, "a", 11, 15)), lives, rounds)
    assert row["rejoin_median_s"] == row["rejoin_kill_median_s"] == pytest.approx(4)
    assert row["adopt_kill_median_s"] == pytest.approx(2)
    assert row["rejoin_stop_median_s"] is None


def test_one_that_fails_again_before_is_not_timed() -> None:
    lives = {"a": life("a1", 0), "b": life("b1", 0)}
    outages = (outage(Kind.STOP, "a", 11, 13), outage(Kind.CUT, "a", 14, 20))
    row = rejoins(story(*outages), lives, [merged(12, b="b1"), merged(21, a="a1")])
    assert row["rejoins_interrupted"] == 1
    assert row["rejoin_stop_median_s"] is None
    assert row["rejoin_cut_median_s"] == pytest.approx(1)


def left(records: Records, **ledger: int) -> Records:
    zeros = dict.fromkeys(("pending", "overwritten", "refused", "rolled_back", "skipped"), 0)
    return [*records, {"time_s": 99, "event": "left", "ledger": {**zeros, **ledger}}]


def problems(lives: dict[str, Records], tokens: dict[tuple[str, str, int], int]) -> list[str]:
    audit = Audit()
    audit.tokens = tokens
    return list(ledger_problems(lives, Evidence(audit, (), {}, True), fragments=2))


KILLED = life("a1", 0, 1, 2)
BALANCED: list[tuple[Records, dict[str, Any]]] = [
    (left(life("a1", 0, 1), logged=T, merged=T, overwritten=T), {"tokens": T}),
    (left(life("a1", 0, 1), logged=T, merged=0, pending=T, overwritten=T), {"tokens": T}),
    (KILLED, {"tokens": 4 * T}),
]
UNBALANCED: list[tuple[Records, dict[str, Any], str]] = [
    (KILLED, {"tokens": 4 * T + 1}, "tokens merged, but"),
    (left(life("a1", 0, 1), logged=T, merged=T, overwritten=0), {"tokens": T}, "one fate"),
    (left(life("a1", 0, 1), logged=2 * T, merged=T, pending=3 * T), {"tokens": T}, "one fate"),
    (left(life("a1", 0, 1), logged=T, merged=T, overwritten=T), {"tokens": 0}, "its ledger says"),
    (life("a2", 0, 1), {"tokens": T}, "no such process"),
]


@pytest.mark.parametrize(("records", "journal"), BALANCED)
def test_a_balanced_ledger_is_accepted(records: Records, journal: dict[str, int]) -> None:
    assert problems({"a": records}, {("a", "a1", 0): journal["tokens"]}) == []


@pytest.mark.parametrize(("records", "journal", "text"), UNBALANCED)
def test_an_unbalanced_ledger_is_told(records: Records, journal: dict[str, int], text: str) -> None:
    told = problems({"a": records}, {("a", "a1", 0): journal["tokens"]})
    assert len(told) == 1 and text in told[0]


@pytest.mark.parametrize(
    "options",
    [
        ChaosOptions(learners=0),
        ChaosOptions(learners=255),
        ChaosOptions(params=1000),
        ChaosOptions(fault_every_s=0),
        ChaosOptions(step_s=0),
        ChaosOptions(seconds=0),
        ChaosOptions(down_max_s=0),
        ChaosOptions(broker_kills=-1),
    ],
)
def test_what_cannot_be_run_is_refused(options: ChaosOptions) -> None:
    with pytest.raises(ConfigError, match="expected"):
        run_chaos_bench(options)


class Names(Nursery):
    """Children are names; one that gets a signal is dead when somebody looks."""

    dying = ""

    def start(self, name: str, argument: str) -> None:
        assert name not in self.running
        self.running.add(name)

    def signal(self, name: str, number: int) -> None:
        self.dying = name

    def look(self, timeout_s: float = 0.0) -> None:
        if self.dying:
            self.running.discard(self.dying)
            self.ended.append((self.dying, -signal.SIGKILL))
            self.dying = ""


def test_a_kill_that_ends_at_once_is_no_death_of_its_own(tmp_path: Path) -> None:
    """As the last one of a tape, when everybody comes back right after it."""
    nursery, options = Names(tmp_path, ""), ChaosOptions(seconds=1.0, fault_every_s=1.0)
    console = Console(file=io.StringIO())
    nursery.running.add("a")
    with Processes(tmp_path) as processes, Proxy(HOST, HOST, [free_ports()]) as line:
        processes.start_command(BROKER, sys.executable, "-c", "import signal; signal.pause()")
        run = Run(options, tmp_path, console, processes, {"a": line}, nursery, 1)
        for _, act in run.tape():
            act()
        run.watch("faults", 0.01)
    assert [outage.fault.kind for outage in run.story.outages] == [Kind.KILL]
    assert nursery.running == {"a"} and nursery.ended == [("a", -signal.SIGKILL)]
    assert run.story.problems == []


def test_a_nursery_that_has_ended_is_told_in_one_line(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.write_text('{"ready": true}')
    # It says that it is ready and ends.
    with Nursery(tmp_path, "json.tool", "--no-indent", str(ready)) as nursery:
        stat = Path(f"/proc/{nursery.pid}/stat")
        # Its memory goes before its pipes are closed: only a zombie has closed them.
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "its end")
        with pytest.raises(NarrowsError, match=r"has ended.*nursery\.log"):
            nursery.start("a", "")
