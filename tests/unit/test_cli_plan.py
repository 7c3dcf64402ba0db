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


def test_settings_have_the_names_that_set_takes_and_advice_is_for_what_is_full(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Holds `as_text`."""
    assert plan(params="7B", step="1.5s", learners=4, wan="1Gbit/s") == 0
    fits = capsys.readouterr().out
    (count,) = [line.split()[1] for line in fits.splitlines() if line.startswith("fragments.count")]
    named = [
        "fragments.sync_period_steps=75",
        "fragments.overlap_steps=3",
        f"fragments.count={count}",
    ]
    again = plan(params="7B", step="1.5s", learners=4, wan="1Gbit/s", setting=named)
    assert again == 0 and capsys.readouterr().out == fits
    assert "What helps" not in fits and "ranks move" not in fits
    plan(params="7B", step="1.5s", learners=4, wan="10Mbit/s", broker_wan="1Tbit/s")
    lines = capsys.readouterr().out
    assert "What helps: a longer fragments.sync_period_steps" in lines and "relay" not in lines
    out = ["codec.publish=f32-blosc2", *named]
    plan(params="7B", step="1.5s", learners=40, wan="9Gbit/s", setting=out)
    assert "narrows relay" in capsys.readouterr().out


def test_the_leaders_host_holds_copies_whatever_the_number_of_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Holds `figures`."""
    made = []
    for ranks in (1, 2, 8):
        plan(params="8B", step="2s", learners=2, wan="10Gbit/s", ranks=ranks, json_=True)
        made.append(json.loads(capsys.readouterr().out))
    memory = {each["learner_memory_bytes"] for each in made}
    assert len(memory) == 1 and 5 < memory.pop() / 8e9 < 7
    moves = [each["ranks_move_per_step_bytes"] for each in made]
    assert moves[0] == 0 and moves[2] == pytest.approx(moves[1] * 7 / 4)
    # To rank 0 and back, float32, once in a period; half of the model is there already.
    assert moves[1] == pytest.approx(2 * 4 * 8e9 / 2 / made[1]["sync_period_steps"])


def test_coarser_steps_take_fewer_bits() -> None:
    """Holds `payload_bits`."""
    # The entropy of a rounded Gaussian is 8.69 bits in steps of 0.01 deviations, 3.06 in steps of
    # half a deviation and 2.10 in whole ones.
    for rho, bits in [(0.01, 8.69), (0.5, 3.06), (1.0, 2.10)]:
        assert payload_bits("int4-zstd", rho) == pytest.approx(bits, abs=0.06)
