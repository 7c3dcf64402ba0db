"""Runs on limited lines, without other faults; and errors in the pacing that must be found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from checkers import check_progress, check_safety
from line_checkers import (
    LineLog,
    check_credit,
    check_lines,
    check_rates,
    check_total_down,
    check_total_up,
)

from narrows.bench.sim.learner import LearnerSpec
from narrows.bench.sim.line import Acknowledged, Crossing, LineRoute, LineSpec
from narrows.bench.sim.simulation import Simulation
from narrows.bench.sim.virtual import Faults
from narrows.broker.config import BrokerConfig
from narrows.proto.config import override
from narrows.proto.flow.budget import Budget
from narrows.proto.flow.outbox import Outbox
from narrows.proto.messages import LayoutEntry

LAYOUT = tuple(LayoutEntry(f"weight {i}", (100, 200), "float32", "rda") for i in range(4))
WINDOW_BYTES = 40_000
RATE = 400e3


class LimitedRun:
    """Three learners, the last of which joins late, with what has crossed their lines."""

    def __init__(self, line: LineSpec, **wan: object) -> None:
        self.log: list[Crossing | Acknowledged] = []
        settings = {
            "fragments.count": 2,
            "fragments.sync_period_steps": 8,
            "wan.streams": 2,
            "run.learners_at_start": 2,
            **{f"wan.{name}": value for name, value in wan.items()},
        }
        specs = [LearnerSpec(name, line=line) for name in "ab"]
        specs.append(LearnerSpec("c", joins_at_s=12.0, line=line))
        self.simulation = Simulation(
            override(BrokerConfig(), settings),
            5,
            Faults(),
            specs,
            layout=LAYOUT,
            window_bytes=WINDOW_BYTES,
            on_line=self.log.append,
        )

    def run(self) -> LineLog:
        self.simulation.run(60.0)
        return self.log

    def busiest_second_bits(self, *, up: bool) -> float:
        """Most bits that crossed one learner's line within a second."""
        sums: dict[tuple[str, int], int] = {}
        for each in self.log:
            if isinstance(each, Crossing) and each.route.up is up:
                key = each.route.learner, int(each.at_s)
                sums[key] = sums.get(key, 0) + 8 * each.wire_bytes
        return max(sums.values())


@pytest.mark.parametrize(
    ("line", "wan"),
    [
        (LineSpec(), {"up": "400kbit/s", "down": "900kbit/s"}),
        (LineSpec(), {"total_up": "1Mbit/s", "total_down": "2Mbit/s"}),
        (LineSpec(300e3, 600e3, 0.1), {"up": "400kbit/s", "down": "900kbit/s"}),
        (LineSpec(300e3, 600e3, 0.1), {}),
    ],
    ids=["rates", "totals", "lines slower than the rates", "slow lines"],
)
def test_a_run_on_limited_lines_goes_on_and_keeps_to_them(
    line: LineSpec, wan: dict[str, object]
) -> None:
    limited = LimitedRun(line, **wan)
    log = limited.run()
    check_lines(log, WINDOW_BYTES)
    check_safety(limited.simulation)
    check_progress(limited.simulation, 40.0)
    if "down" in wan:
        assert limited.busiest_second_bits(up=False) > 0.8 * 900e3, "the rate limits something"


@pytest.mark.parametrize(
    ("check", "limit"),
    [
        (check_rates, "up"),
        (check_rates, "down"),
        (check_total_up, "total_up"),
        (check_total_down, "total_down"),
    ],
    ids=["up", "down", "total_up", "total_down"],
)
def test_a_budget_whose_charge_is_forgotten_is_found(
    check: Callable[[LineLog], None], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge = Budget.charge

    def forget(budget: Budget, size_bytes: float, now: float) -> None:
        """While version 0 goes up, and while c gets its states, nothing is paid."""
        if 1.0 <= now < 12.0 or now >= 13.0:
            charge(budget, size_bytes, now)

    check(LimitedRun(LineSpec(), **{limit: "400kbit/s"}).run())
    monkeypatch.setattr(Budget, "charge", forget)
    with pytest.raises(AssertionError, match=r"bytes .* in the second before"):
        check(LimitedRun(LineSpec(), **{limit: "400kbit/s"}).run())


def test_a_stream_without_credit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(outbox: Outbox[object], size_bytes: int, now: float) -> int:
        return 0

    monkeypatch.setattr(Outbox, "_choose", choose)
    with pytest.raises(AssertionError, match="bytes are unacknowledged on stream 0"):
        check_credit(LimitedRun(LineSpec(300e3, 300e3)).run(), WINDOW_BYTES)


def stalled(*tries_s: float) -> LineLog:
    """A stream whose window is full from 0 s on, and on which a message is tried at these times."""
    route = LineRoute(1, "a", "0", up=True)
    times = [0.0] * 4 + list(tries_s)
    return [Crossing(at_s, route, 10_100, 0.0, 0.0, 0, WINDOW_BYTES // 4) for at_s in times]


def test_a_stream_that_stands_still_is_tried_with_a_message_at_a_time() -> None:
    check_credit(stalled(1.0, 2.0, 4.0), WINDOW_BYTES)
    for tries_s in ((0.9,), (1.0, 1.0), (1.0, 1.9), (1.0, 2.0, 2.5)):
        with pytest.raises(AssertionError, match="after it moved or was tried"):
            check_credit(stalled(*tries_s), WINDOW_BYTES)
