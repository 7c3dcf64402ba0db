"""`narrows plan`: what a run needs, from model, step and line."""

import json

import pytest

from narrows.broker.cli.plan import payload_bits, plan


def test_a_plan_follows_from_model_step_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["fragments.count=4", "fragments.sync_period_steps=10", "codec.push=f32-blosc2"]
    code = plan(params="100M", step="1s", learners=2, wan="10Gbit/s", setting=chosen, json_=True)
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["fits"]
    assert (found["fragments"], found["sync_period_steps"]) == (4, 10)
    # 32 bits a parameter and 4.6% of headers, once in ten seconds.
    assert found["learner_up_bits_per_s"] == pytest.approx(100e6 * 32 * 1.046 / 10, rel=0.005)
    assert found["broker_in_bits_per_s"] == 2 * found["learner_up_bits_per_s"]
    shares = found["shares"]
    assert shares[found["fullest"]] == max(shares.values())
    # Payloads of both learners, as they travelled.
    assert found["journal_per_hour_bytes"] == pytest.approx(
        found["broker_in_bits_per_s"] / 8 * 3600
    )


def test_the_sync_period_grows_until_the_run_fits(capsys: pytest.CaptureFixture[str]) -> None:
    periods = []
    for line in ("10Gbit/s", "1Gbit/s", "100Mbit/s"):
        code = plan(params="7B", step="1.5s", learners=4, wan=line, json_=True)
        found = json.loads(capsys.readouterr().out)
        periods.append(found["sync_period_steps"])
        assert found["fits"] is (code == 0)
    assert periods[0] < periods[1] < periods[2] == 500
    assert code == 1
    assert plan(params="7B", step="1.5s", learners=4, wan="100Mbit/s") == 1
    assert "It does not fit" in capsys.readouterr().out


def test_coarser_steps_take_fewer_bits() -> None:
    """Holds `payload_bits`."""
    # The entropy of a rounded Gaussian is 8.69 bits in steps of 0.01 deviations, 3.06 in steps of
    # half a deviation and 2.10 in whole ones.
    for rho, bits in [(0.01, 8.69), (0.5, 3.06), (1.0, 2.10)]:
        assert payload_bits("int4-zstd", rho) == pytest.approx(bits, abs=0.06)
