"""A run goes back to an earlier version, or is merged again without one of its learners."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import Killed
from e2e.test_journal import run_to_its_goal
from process_run import Run
from running import HANG_S, broker_config, live_broker, vector, wait_until
from safetensors.numpy import load_file

from narrows.bench.kit.processes import Processes
from narrows.broker.cli.journal_report import audit, replay, show
from narrows.broker.process.service import Service
from narrows.broker.storage import (
    DirectoryFiles,
    Journal,
    StateDir,
    begin_epoch,
    memory_digest,
    model_digest,
    new_seal_key,
    recover,
)
from narrows.broker.storage.history import Changes
from narrows.proto.errors import ConfigError
from narrows.proto.messages import Phase


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A sealed run of two learners that has ended, and the seal key."""
    folder = tmp_path_factory.mktemp("ended")
    new_seal_key(folder / "seal.key")
    state = run_to_its_goal(
        folder, security__seal_key=str(folder / "seal.key"), broker__journal_keep=True
    )
    return state, folder / "seal.key"


@pytest.fixture
def copied(ended: tuple[Path, Path], tmp_path: Path) -> Path:
    shutil.copytree(ended[0], tmp_path / "state")
    shutil.copy2(ended[1], tmp_path / "seal.key")
    return tmp_path / "state"


def versions_of(folder: Path, **flags: object) -> tuple[int, ...]:
    """The versions with which a broker starts, and ends at once."""
    config = broker_config(folder, security__seal_key=str(folder / "seal.key"), **flags)
    with live_broker(config) as service:
        return service.syncer.state.versions


def test_a_run_goes_back_and_what_it_did_is_kept_aside(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = versions_of(tmp_path)
    target = sum(before) // 2
    show(copied)
    line = re.search(rf"\d+  .* version (\d+) \({target} in all\)", capsys.readouterr().out)
    assert line, "the operator cannot find the version"
    config = broker_config(
        tmp_path, security__seal_key=str(tmp_path / "seal.key"), broker__rollback_to=target,
        broker__journal_keep=True,
    )  # fmt: skip
    with live_broker(config) as service:
        state = service.syncer.state
        assert state.version_sum == target and state.phase.stored is Phase.RUNNING
        assert state.epoch[:2] == (1, 3)
        assert 0 < state.clock.run_tokens < 300
    assert sum(versions_of(tmp_path)) == target
    key, aside = tmp_path / "seal.key", copied / f"rolled-back-to-{target}"
    for each in (copied, aside):
        audit(each, key)
        replay(each, Changes())
    told = capsys.readouterr().out
    assert told.count("every seal of what is used is as it was") == 2
    shutil.copytree(aside, tmp_path / "again" / "state")
    shutil.copy2(key, tmp_path / "again")
    assert versions_of(tmp_path / "again") == before


def test_the_state_is_the_one_of_that_version_bit_for_bit(copied: Path, tmp_path: Path) -> None:
    """Straight to a version, or by way of a later one: the same bits, clock and memory."""
    total = sum(versions_of(tmp_path))
    with StateDir.open(copied) as state_dir:
        journal, config = DirectoryFiles(state_dir.journal_directory()), broker_config(tmp_path)
        oldest, run = state_dir.load_oldest(), state_dir.run
        assert oldest is not None and run is not None
        records = Journal.open(journal, run_id=run.run_id, segment_bytes=1 << 20)
        targets = (total - 5, total - 2)  # One of them is no checkpoint.
        expected = [recover(config, oldest, records, until=target) for target in targets]
    for target, history in zip(targets, expected, strict=True):
        other = tmp_path / f"{target}"
        shutil.copytree(copied, other / "state")
        key = str(tmp_path / "seal.key")
        flags = broker_config(other, security__seal_key=key, broker__rollback_to=target)
        with live_broker(flags) as service:
            model = service.jobs.model
            assert model is not None
            assert model_digest(model) == model_digest(history.model)
            assert memory_digest(model) == memory_digest(history.model)
            assert service.syncer.state.clock.units == history.token_units


@pytest.mark.usefixtures("copied")
def test_what_cannot_be_is_refused_with_what_can(tmp_path: Path) -> None:
    total = sum(versions_of(tmp_path))
    with pytest.raises(ConfigError, match=rf"no version {total + 1}.*up to {total}"):
        versions_of(tmp_path, broker__rollback_to=total + 1)
    assert sum(versions_of(tmp_path, broker__rollback_to=total - 2)) == total - 2
    with pytest.raises(ConfigError, match=r"already.*start without --rollback-to"):
        versions_of(tmp_path, broker__rollback_to=total - 2)
    with pytest.raises(ConfigError, match=rf"version 1 is not kept.*at least {total - 2}"):
        versions_of(tmp_path, broker__rollback_to=1)
    assert sum(versions_of(tmp_path)) == total - 2
    with pytest.raises(ConfigError, match="no checkpoint to go back to"):
        Service(broker_config(tmp_path / "new", broker__rollback_to=1))


@pytest.mark.parametrize("call", ["link", "rename", "unlink", "fsync"])
def test_a_rollback_that_is_cut_short_is_done_by_the_next_one(
    call: str, copied: Path, tmp_path: Path
) -> None:
    (copied / "seal.json").unlink()
    for each in copied.glob("checkpoint-*/seal.json"):
        each.unlink()
    target, real = 3, getattr(os, call)
    for at in range(400):
        state = tmp_path / f"{at}"
        shutil.copytree(copied, state / "state")
        count = 0

        def fake(*arguments: object, at: int = at, **named: object) -> object:
            nonlocal count
            count += 1
            if count == at + 1:
                raise Killed
            return real(*arguments, **named)

        config = broker_config(state, broker__rollback_to=target, broker__journal_keep=True)
        with pytest.MonkeyPatch.context() as patch, StateDir.open(state / "state") as state_dir:
            patch.setattr(os, call, fake)
            try:
                begin_epoch(config, state_dir, now=0.0).close()
            except Killed:
                pass
        if count <= at:
            break
        with StateDir.open(state / "state") as state_dir:
            try:
                begun = begin_epoch(config, state_dir, now=0.0)
            except ConfigError as error:  # It was done.
                assert "already" in str(error)
                config = broker_config(state, broker__journal_keep=True)
                begun = begin_epoch(config, state_dir, now=0.0)
            begun.close()
            assert begun.syncer.state.version_sum == target
        audit(state / "state")
        replay(state / "state", Changes())
        aside = state / "state" / f"rolled-back-to-{target}"
        audit(aside)
        replay(aside, Changes())
        shutil.rmtree(state)
    else:
        raise AssertionError("there is no end to it")
    assert at > 0


# Without a learner.


def test_a_history_without_one_learner_is_the_other_ones(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models: dict[str, np.ndarray] = {}
    for names in ((), ("a",), ("b",), ("a", "b")):
        target = tmp_path / f"{'-'.join(names) or 'all'}.safetensors"
        replay(copied, Changes(without=names), target)
        tensors = load_file(target)
        models[target.stem] = np.concatenate([tensors["weight"].ravel(), tensors["bias"].ravel()])
    told = capsys.readouterr().out
    assert "contributions of a" in told and "is still in this model" not in told
    # Each learner pulls to a point of its own; what is left of the run pulls to the other's.
    moved, apart = models["a"] - models["b"], vector(2) - vector(1)
    assert moved @ apart > 0.8 * np.linalg.norm(moved) * np.linalg.norm(apart)
    assert not models["a-b"].any(), "nobody has contributed: version 0"
    with pytest.raises(ConfigError, match=r"no contribution of that learner.*one of a, b"):
        replay(copied, Changes(without=("mallory",)))


def test_what_lies_before_the_oldest_checkpoint_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = run_to_its_goal(tmp_path)
    try:
        replay(state, Changes(without=("b",)), tmp_path / "model.safetensors")
        told = capsys.readouterr().out
    except ConfigError as error:  # The last round was followed by two checkpoints.
        told = str(error)
    assert re.search(r"up to version [1-9]\d*, the oldest checkpoint, (is still|stay) in", told)
    merged = run_to_its_goal(
        tmp_path / "merged", broker__journal="merged", broker__journal_keep=True
    )
    with pytest.raises(ConfigError, match='journal = "full"'):
        replay(merged, Changes(without=("b",)))


# Real processes.


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Generator[Run]:
    with Processes(tmp_path) as processes:
        yield Run(tmp_path, data, processes)


def both_merge(run: Run) -> None:
    wait_until(lambda: min(map(run.contributions, "ab")) >= 3, "contributions of both")


def stop_broker(run: Run) -> None:
    run.processes.kill("broker", signal.SIGTERM)
    assert run.processes.wait("broker", HANG_S) == 0, run.processes.tail("broker", 20)


def command(run: Run, name: str, *arguments: str) -> str:
    """The output of a command that must succeed."""
    run.processes.start(name, *arguments)
    assert run.processes.wait(name, HANG_S) == 0, run.processes.tail(name, 20)
    return run.log(name)


@pytest.mark.slow
def test_learners_go_back_with_the_run_and_the_rest_is_merged_again(run: Run) -> None:
    key, state = run.folder / "seal.key", run.folder / "state"
    command(run, "key", "journal", "new-seal-key", str(key))
    settings = ("--set", f"security.seal_key={key}", "--set", "broker.journal_keep=true")
    run.broker(*settings)
    run.learner("a")
    run.learner("b")
    both_merge(run)
    stop_broker(run)
    shown = command(run, "show", "journal", "show", str(state))
    totals = [int(each) for each in re.findall(r"\((\d+) in all\)", shown)]
    assert totals == list(range(1, len(totals) + 1))
    target = totals[-1] // 2

    run.broker(*settings, "--rollback-to", str(target))
    both_merge(run)
    status = run.status()
    assert status is not None and status.epoch[1] == 2
    run.leave("a", "b")
    run.check_digests("a", "b")
    told = run.log("broker")
    assert f"rolled back to version {target}" in told
    assert f"the run was rolled back to version {target} at this start" in told
    for name in "ab":
        ledger = run.summary(name)["stats"]["ledger"]
        assert ledger["rolled_back"] > 0
        assert "go back to the broker's versions" in run.log(name)
    assert "all weights sum to 1" in command(
        run, "audit", "journal", "audit", str(state), "--seal-key", str(key)
    )
    # The run without b, as the beginning of a new one.
    aside, model = state / f"rolled-back-to-{target}", run.folder / "model.safetensors"
    told = command(
        run, "replay", "journal", "replay", str(aside), "--without", "b", "--to", str(model)
    )
    assert re.search(r"without \d+ contributions? of b", told)
    run.processes.start_broker(
        "--listen", run.address, "--state-dir", str(run.folder / "new"), "--init", str(model),
        name="fresh",
    )  # fmt: skip
    run.learner("c")
    wait_until(lambda: run.contributions("c") >= 2, "a round of the new run")
    run.processes.kill("c", signal.SIGTERM)
    assert run.processes.wait("c", HANG_S) == 0, run.processes.tail("c", 20)


@pytest.mark.slow
def test_a_broker_that_is_killed_at_any_place_is_not_tampered_with(run: Run) -> None:
    """The torn end of a journal is recovered as without a seal."""
    key, state = run.folder / "seal.key", run.folder / "state"
    new_seal_key(key)
    run.broker("--set", f"security.seal_key={key}", "--set", "broker.checkpoint_versions=3")
    run.learner("a")
    for life in range(2, 6):
        wait_until(lambda: run.contributions("a") >= 3, "contributions")
        run.processes.kill("broker")
        segment = max((state / "journal").iterdir())
        content = segment.read_bytes().rstrip(b"\0")
        with segment.open("r+b") as file:
            file.truncate(len(content) - 7 * (life % 2))  # As a power cut may leave it.
        audit(state, key)
        run.broker("--set", f"security.seal_key={key}", "--set", "broker.checkpoint_versions=3")
        status = run.status()
        assert status is not None and status.epoch[1] == life
    run.leave("a")
    audit(state, key)
