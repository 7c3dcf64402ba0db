"""The benches of real processes: bandwidth, loop, chaos, fairness, wan, peers. Their arithmetic on
made-up input, and each of them once with tiny runs."""

import sys
from pathlib import Path
from typing import Any

import pytest

from narrows.bench import bandwidth, chaos, fairness, loop, peers, wan
from narrows.bench.kit import rows
from narrows.bench.kit.line import available
from narrows.bench.kit.run import TENSORS, WIDTH

PARAMS = 4 * TENSORS * WIDTH


def test_bits_are_counted_per_learner_and_exchange() -> None:
    """Holds `bandwidth.bits`."""
    alone = {"elements": 1000, "contributors": "a", "pushed_bytes": 400, "published_bytes": 350}
    merge = alone | {"contributors": "ab", "pushed_bytes": 800}
    before = {"line": {"up_bytes": 5000, "down_bytes": 9000}}
    after = {"line": {"up_bytes": 5000 + 1500, "down_bytes": 9000 + 1600}}
    row = bandwidth.bits([merge, alone], before, after, line_bytes=(1800, 2000))
    assert row == {
        "exchanges": 2,
        "payload_up_bits_per_param": 8 * 1200 / 3000,
        "wire_up_bits_per_param": 8 * 1500 / 3000,
        "line_up_bits_per_param": 8 * 1800 / 3000,
        "payload_down_bits_per_param": 8 * 2 * 700 / 4000,
        "wire_down_bits_per_param": 8 * 1600 / 4000,
        "line_down_bits_per_param": 8 * 2000 / 4000,
    }


def test_published_figures_come_out_of_the_arithmetic() -> None:
    """Holds `bandwidth.site_gbps`."""
    assert bandwidth.data_parallel_gbps() == pytest.approx(198, rel=0.02)
    assert bandwidth.site_gbps(4.0) == pytest.approx(0.84 * 1514 / 1448, rel=0.02)


@pytest.mark.real
def test_the_loop_is_measured_by_stage() -> None:
    row = loop.measure(loop.LoopCell("decoupled", "0", PARAMS, 0.5))
    assert row["rounds_per_s"] > 0 and row["pushes_per_round"] == loop.LEARNERS
    assert row["exchange_s"] == pytest.approx(loop.FRAGMENTS / row["rounds_per_s"])
    assert row["learner_training_ns"] > 0 and row["broker_loop_ns"] >= 0
    assert "free running" in "".join(
        loop.headline([{"mode": "decoupled", "params": PARAMS, **row}])
    )


@pytest.mark.real
def test_bandwidth_counts_frames_and_the_line() -> None:
    row = bandwidth.measure(bandwidth.BandwidthCell(0.5), steps=40)
    assert 2 < row["payload_up_bits_per_param"] < 4 and 2 < row["payload_down_bits_per_param"] < 4
    assert row["wire_up_bits_per_param"] > 2
    assert (row["line_up_bits_per_param"] is not None) == available()
    assert "Narrows, rho 0.5" in "".join(bandwidth.headline([{"rho": 0.5, **row}]))


@pytest.mark.real
def test_kills_lose_nothing_and_what_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds `chaos.compare`."""
    compare = chaos.compare

    def also_spoilt(state: Path, seen: dict[str, list[dict[str, Any]]]) -> rows.Row:
        made_up = {"fragment": 0, "version": 1, "digest": "0" * 16}
        spoilt = compare(state, {**seen, "liar": [made_up], "nobody": []})
        assert spoilt["copies_lost"] == 1 and spoilt["problem_count"] == 2, spoilt["problems"]
        return compare(state, seen)

    monkeypatch.setattr(chaos, "compare", also_spoilt)
    row = chaos.measure(chaos.ChaosCell(kills=3, seed=1))
    assert row["problems"] == [] and row["copies_seen"] > 0
    assert row["kills_at_places"] == 1 and row["rounds_replayed"] == row["rounds"] > 0


@pytest.mark.real
def test_shares_are_measured_while_a_learner_is_away() -> None:
    """Holds `fairness.measure`."""
    row = fairness.measure(fairness.FairnessCell((0.005, 0.02), minutes=0.06))
    for name in ("calm", "rough"):
        # Facts of a toy may be some steps old.
        assert all(0 < share < 1.05 for share in row[f"{name}_shares"]), row
        assert row[f"{name}_clock_off_tokens"] == 0, row
    assert row["rough_logged_tokens"][1] < row["calm_logged_tokens"][1], "it was not away"
    equal = {"step_s": (0.1, 0.1), **row}
    assert "the clock is exact" in "".join(fairness.headline([equal]))
    spoilt = "".join(fairness.headline([{**equal, "calm_clock_off_tokens": 4000}]))
    assert "wrong at [(0.1, 0.1)]" in spoilt


@pytest.mark.real
def test_promises_of_a_line_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds `wan.measure`."""
    monkeypatch.setattr(wan, "TRANSFER_S", 0.02)  # Else first copies would take a while.
    frozen = wan.measure(wan.WanCell("frozen", seconds=4.0))
    assert max(frozen["rounds_per_s"]) > 0 and frozen["longest_pause_s"] > 0, frozen
    revoked = wan.measure(wan.WanCell("revoke", 2, seconds=1.0))
    assert revoked["copies_after"] == 0 and 0 < revoked["pause_s"] < wan.LOOKED_S, revoked
    assert revoked["behind_periods"] < 2, revoked
    broken = {"promise": "far", "rate": "0", "learners": 1, **frozen, "held": "NO"}
    assert wan.headline([broken])[0] == "0 of 1 held"
    if available():
        row = wan.measure(wan.WanCell("budget", 2, "20Mbit/s", seconds=1.5))
        assert 0 < max(row["mean_shares"]) <= 1.05, row


def test_a_system_that_is_not_there_has_a_row_that_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `peers.measure`."""
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    cell = peers.PeersCell("exchange", "torchft", "1Mbit/s", PARAMS, 1.0)
    row = peers.measure(cell)
    assert row["exchange_s"] is None and "bin/pip install torch torchft==" in row["note"], row
    assert "torchft -" in peers.headline([{**vars(cell), **row}])[0]


@pytest.mark.real
@pytest.mark.skipif(not available(), reason="root alone can build a line")
@pytest.mark.parametrize("system", ["decoupled", "lockstep"])
def test_learners_compute_and_exchange(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds `peers.measure`."""
    monkeypatch.setattr(peers, "PUBLISHED_STEP_S", 0.004)
    row = peers.measure(peers.PeersCell("computing", system, "200Mbit/s", PARAMS, 0.5, 32))
    assert row["computing_percent"] > 0 and row["published_percent"] is None, row
    assert row["steps_per_exchange"] > 16 and row["exchange_s"] > 0, row


@pytest.mark.real
@pytest.mark.skipif(not available(), reason="root alone can build a line")
def test_other_systems_are_timed_on_a_shaped_line() -> None:
    """Holds `peers.averaged`."""
    cell = peers.PeersCell("exchange", "gloo", "20Mbit/s", 1 << 18, 1.0)
    row = peers.averaged(cell, Path(sys.executable))
    assert row["exchange_s"] >= 0.9 * 16 * cell.params / 20e6, row  # All bits cross the line.
