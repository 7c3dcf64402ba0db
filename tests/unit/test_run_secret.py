"""The run's secret: made once, read by its owner only, and never lost without a word."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from narrows.broker.cli.broker import BrokerCommand, renew_run_secret
from narrows.broker.storage.checkpoint import StateDir
from narrows.broker.storage.secret_file import SECRET_FILE
from narrows.broker.syncer.run_secret import SECRET_BYTES, RunSecret
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError

EPOCH = (1, 2, 3)


def begin(path: Path) -> bytes:
    """The secret of a life of the broker."""
    with StateDir.open(path) as state_dir:
        state_dir.begin_epoch("0" * 16, "0" * 16)
        return state_dir.secret


def refused(path: Path) -> NarrowsError:
    with pytest.raises(NarrowsError) as caught:
        begin(path)
    assert caught.value.code is ErrorCode.RUN_SECRET
    assert str(path / SECRET_FILE) in caught.value.message
    return caught.value


def test_it_is_made_with_the_run_and_stays(tmp_path: Path) -> None:
    secret = begin(tmp_path)
    assert len(secret) == SECRET_BYTES and len(set(secret)) > 1
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600
    assert begin(tmp_path) == secret == (tmp_path / SECRET_FILE).read_bytes()
    assert begin(tmp_path / "another") != secret


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o602, 0o666, 0o610, 0o601])
def test_others_must_not_reach_it(tmp_path: Path, mode: int) -> None:
    begin(tmp_path)
    (tmp_path / SECRET_FILE).chmod(mode)
    error = refused(tmp_path)
    assert error.got == f"mode {mode:04o}"
    assert error.remedy.startswith(f"chmod 600 {tmp_path / SECRET_FILE}")
    (tmp_path / SECRET_FILE).chmod(0o600)
    begin(tmp_path)


def test_a_run_that_has_lost_it_names_the_command(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / SECRET_FILE).unlink()
    error = refused(tmp_path)
    assert f"narrows broker --new-run-secret --state-dir {tmp_path}" in error.remedy
    assert not (tmp_path / SECRET_FILE).exists()


@pytest.mark.parametrize("content", [b"", bytes(31), bytes(33), bytes(1 << 20)])
def test_another_length_is_no_secret(tmp_path: Path, content: bytes) -> None:
    begin(tmp_path)
    (tmp_path / SECRET_FILE).write_bytes(content)
    assert refused(tmp_path).got == f"{len(content)} bytes"


def test_it_is_no_link_and_no_pipe(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / SECRET_FILE).rename(tmp_path / "elsewhere")
    (tmp_path / SECRET_FILE).symlink_to(tmp_path / "elsewhere")
    refused(tmp_path)
    (tmp_path / SECRET_FILE).unlink()
    os.mkfifo(tmp_path / SECRET_FILE, 0o600)
    refused(tmp_path)


def test_a_start_that_was_cut_off_keeps_the_secret_that_it_made(tmp_path: Path) -> None:
    secret = begin(tmp_path)
    for name in ("run.json", "run.copy.json"):
        (tmp_path / name).unlink()
    (tmp_path / f".new-{SECRET_FILE}").write_bytes(b"half")
    assert begin(tmp_path) == secret


def test_a_new_one_is_made_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = begin(tmp_path)
    (tmp_path / SECRET_FILE).unlink()
    command = BrokerCommand(None, {"broker.state_dir": str(tmp_path)}, [], None, None)
    renew_run_secret(command)
    told = capsys.readouterr().out
    assert str(tmp_path / SECRET_FILE) in told and "wrong_epoch" in told and "standby" in told
    anew = begin(tmp_path)
    assert anew != secret and anew.hex() not in told
    renew_run_secret(command)
    assert begin(tmp_path) not in (secret, anew)


def test_there_is_none_to_renew_without_a_run(tmp_path: Path) -> None:
    command = BrokerCommand(None, {"broker.state_dir": str(tmp_path)}, [], None, None)
    with pytest.raises(ConfigError, match="no run"):
        renew_run_secret(command)
    assert not (tmp_path / SECRET_FILE).exists()


def test_a_proof_is_of_one_key_one_run_and_one_epoch() -> None:
    secret = RunSecret(bytes(range(32)))
    proof = secret.proof("run", EPOCH)
    assert len(proof) == 64 and secret.proves("run", EPOCH, proof)
    assert not secret.proves("run", EPOCH, "") and not secret.proves("run", EPOCH, "0" * 64)
    assert not secret.proves("other", EPOCH, proof)
    for epoch in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (12, 3, 0)):
        assert not secret.proves("run", epoch, proof)
    assert not RunSecret(bytes(32)).proves("run", EPOCH, proof)
    assert secret.key.hex() not in repr(secret)
