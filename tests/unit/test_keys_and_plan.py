"""`narrows keys` and `narrows plan`: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrows.broker.cli import keys
from narrows.broker.cli.plan import payload_bits, plan
from narrows.proto.errors import ConfigError
from narrows.proto.keys import read_broker_key, read_site_key


def test_a_key_learns_whom_to_trust_and_is_admitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "keys", tmp_path / "site-a.key"
    keys.new(keys=folder)
    server = read_broker_key(folder)
    keys.new(file, name="site-a")
    before = read_site_key(file)
    keys.new(file, server=server.public, broker="tcp://broker.example.org:7070")
    after = read_site_key(file)
    # The key itself never changes, so what the operator has admitted stays right.
    assert after.pair == before.pair
    assert (after.servers, after.broker) == ((server.public,), "tcp://broker.example.org:7070")
    capsys.readouterr()
    keys.show(file)
    line = capsys.readouterr().out.splitlines()[0]
    keys.allow(*line.split(), keys=folder)
    capsys.readouterr()
    keys.list_(keys=folder, json_=True)
    assert json.loads(capsys.readouterr().out) == {"site-a": [after.pair.public]}


def test_no_key_is_overwritten_and_no_secret_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "keys", tmp_path / "site-a.key"
    keys.new(keys=folder)
    keys.new(file, name="site-a")
    secrets = {read_broker_key(folder).secret, read_site_key(file).pair.secret}
    capsys.readouterr()
    for path in (folder, folder / "broker.key"):
        keys.show(path)
        assert capsys.readouterr().out == f"{read_broker_key(folder).public}\n"
    keys.show(file)
    with pytest.raises(ConfigError, match=f"no allow list in {tmp_path}.*--keys FOLDER"):
        keys.allow("narrows-key", "site-a", read_broker_key(folder).public, keys=tmp_path)
    with pytest.raises(ConfigError, match="never overwritten"):
        keys.new(keys=folder)
    with pytest.raises(ConfigError, match="another site"):
        keys.new(file, name="site-b")
    with pytest.raises(ConfigError, match="a site's name"):
        keys.new(tmp_path / "other.key", name="../etc")
    with pytest.raises(ConfigError, match="no file"):
        keys.new(name="site-a")
    with pytest.raises(ConfigError, match="not a public line"):
        keys.allow("narrows-key", "site-a", keys=folder)
    printed = capsys.readouterr().out
    assert not any(secret in printed for secret in secrets)
    assert {read_broker_key(folder).secret, read_site_key(file).pair.secret} == secrets


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
    # The entropy of a rounded Gaussian is 8.69 bits in steps of 0.01 deviations, 3.06 in steps of
    # half a deviation and 2.10 in whole ones.
    for rho, bits in [(0.01, 8.69), (0.5, 3.06), (1.0, 2.10)]:
        assert payload_bits("int4-zstd", rho) == pytest.approx(bits, abs=0.06)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"params": "7X"}, "--params"),
        ({"step": "fast"}, "--step"),
        ({"wan": "1GB"}, "--wan"),
        ({"learners": 0}, "sizes above 0"),
        ({"wan": "0", "broker_wan": "1Gbit/s"}, "sizes above 0"),
        ({"setting": ["run.mode=diloco"]}, "without lockstep"),
        ({"setting": ["fragments.cuont=4"]}, "did you mean fragments.count?"),
    ],
)
def test_what_cannot_be_planned_is_named(arguments: dict[str, object], hint: str) -> None:
    given = {"params": "1B", "step": "1s", "learners": 2, "wan": "1Gbit/s"} | arguments
    with pytest.raises(ConfigError) as caught:
        plan(**given)  # type: ignore[arg-type]
    assert hint in str(caught.value)
