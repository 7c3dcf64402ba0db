"""A state directory of format 1 is readable for ever: checkpoints, journal, and both together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from chaos.bit_flips import config_of

from narrows.broker.cli.journal_report import audit, replay
from narrows.broker.merging.watch import UNWATCHED
from narrows.broker.storage.checkpoint import StateDir, StateError
from narrows.broker.storage.history import Changes, model_digest
from narrows.broker.storage.recovery import begin_epoch
from narrows.proto.messages import Epoch

STORED = Path(__file__).with_name("state-format-1")
DIGEST = "3901b13112cdce72311fbc4a04bf14fa"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    shutil.copytree(STORED, path)
    return path


def test_a_broker_resumes_from_it(state: Path) -> None:
    with StateDir.open(state) as state_dir:
        begun = begin_epoch(config_of(state), state_dir, now=0.0)
        begun.close()
    assert begun.model is not None
    assert [fragment.version for fragment in begun.model.fragments] == [6]
    assert model_digest(begun.model) == DIGEST
    assert begun.syncer.state.epoch[:2] == (1, 2)


def test_the_history_begins_with_its_first_rounds(state: Path) -> None:
    """Nobody kept the norms before; the journal's contributions give those since."""
    with StateDir.open(state) as state_dir:
        oldest, newest = state_dir.load_oldest(), state_dir.load()
        begun = begin_epoch(config_of(state), state_dir, now=0.0)
        begun.close()
    assert oldest is not None and newest is not None and begun.model is not None
    assert [each.history.rounds for each in (*oldest.fragments, *newest.fragments)] == [(), ()]
    assert newest.watch == UNWATCHED
    (fragment,) = begun.model.fragments
    replayed = range(newest.fragments[0].version + 1, fragment.version + 1)
    assert [each.version for each in fragment.history.rounds] == list(replayed)


def test_it_can_be_audited_and_replayed(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit(state)
    replay(state, Changes())
    assert f"6 rounds replayed, every digest as it was\nmodel {DIGEST}" in capsys.readouterr().out


def test_two_copies_begin_lives_of_one_number_that_are_told_apart(tmp_path: Path) -> None:
    epochs: list[Epoch] = []
    for name in ("copy", "another"):
        shutil.copytree(STORED, tmp_path / name)
        with StateDir.open(tmp_path / name) as state_dir:
            begun = begin_epoch(config_of(tmp_path / name), state_dir, now=0.0)
            begun.close()
        epochs.append(begun.syncer.state.epoch)
    assert epochs[0][:2] == epochs[1][:2] == (1, 2)
    assert epochs[0] != epochs[1]


def test_it_gets_a_secret_which_later_lives_need(state: Path) -> None:
    assert not (state / "run.secret").exists()
    with StateDir.open(state) as state_dir:
        begin_epoch(config_of(state), state_dir, now=0.0).close()
    secret = (state / "run.secret").read_bytes()
    with StateDir.open(state) as state_dir:
        begin_epoch(config_of(state), state_dir, now=0.0).close()
    assert (state / "run.secret").read_bytes() == secret
    (state / "run.secret").unlink()
    with StateDir.open(state) as state_dir, pytest.raises(StateError, match=r"run\.secret"):
        begin_epoch(config_of(state), state_dir, now=0.0)
