"""A backup of the state directory is put back while the learners of the lost future live."""

from __future__ import annotations

import logging
import shutil
import signal
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from process_run import Run
from running import HANG_S, ToyHost, broker_config, client, live_broker, vector, wait_until

from narrows.bench.kit.processes import Processes, free_ports
from narrows.broker.process.service import Service
from narrows.learner.transport.client import Client

pytestmark = pytest.mark.slow


@contextmanager
def training(service: Service, *names: str) -> Generator[list[Client]]:
    """Learners that train until the block ends, whatever becomes of the broker."""
    over, errors = threading.Event(), list[BaseException]()
    learners = [client(service, name, ToyHost(vector(1))) for name in names]

    def loop(learner: Client) -> None:
        try:
            learner.start()
            while not over.wait(0.003):
                learner.boundary(1, 1.0)
        except BaseException as error:
            errors.append(error)
        finally:
            learner.abort()

    threads = [threading.Thread(target=loop, args=(learner,)) for learner in learners]
    for thread in threads:
        thread.start()
    try:
        yield learners
    finally:
        over.set()
        for thread in threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), "a learner hangs"
    if errors:
        raise errors[0]


def merged(service: Service, count: int) -> None:
    tally = service.syncer.state.tally
    wait_until(lambda: tally.contributions_merged >= count, f"{count} contributions")


def test_a_life_whose_number_comes_again_is_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    address = f"tcp://127.0.0.1:{free_ports()}"
    config = broker_config(
        tmp_path, broker__listen=address, fragments__sync_period_steps=4, merge__quorum=2
    )
    state, copy = tmp_path / "state", tmp_path / "copy"
    with ExitStack() as stack:
        with live_broker(config) as service:
            learners = stack.enter_context(training(service, "a", "b"))
            merged(service, 8)
        shutil.copytree(state, copy)
        with live_broker(config) as lost:
            merged(lost, 30)
        shutil.rmtree(state)
        shutil.copytree(copy, state)
        with live_broker(config) as restored:
            assert restored.syncer.state.epoch[:2] == lost.syncer.state.epoch[:2]
            assert restored.syncer.state.version_sum < lost.syncer.state.version_sum
            # The quorum is both: nothing is merged unless each has come back and gone back.
            merged(restored, 30)
    totals = [learner.background.ledger() for learner in learners]
    assert min(total.rolled_back for total in totals) > 0
    told = [r.getMessage() for r in caplog.records if "history_lost" in r.getMessage()]
    assert told and all("restored from an older copy" in text for text in told)


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Generator[Run]:
    with Processes(tmp_path) as processes:
        yield Run(tmp_path, data, processes)


def stop_broker(run: Run) -> None:
    run.processes.kill("broker", signal.SIGTERM)
    assert run.processes.wait("broker", HANG_S) == 0, run.processes.tail("broker", 20)


def both_merge(run: Run) -> None:
    """Waits until both learners have contributed to this life of the broker."""
    wait_until(lambda: min(map(run.contributions, "ab")) >= 3, "contributions of both")


def test_learners_that_are_several_lives_ahead_go_back_and_the_run_lives(run: Run) -> None:
    """The restored broker counts its lives on from the copy: its number is lower than the last that
    the learners have seen."""
    state, copy = run.folder / "state", run.folder / "copy"
    run.broker()
    run.learner("a")
    run.learner("b")
    both_merge(run)
    stop_broker(run)
    shutil.copytree(state, copy)
    lost = None
    for _ in range(2):
        run.broker()
        both_merge(run)
        lost = run.status()
        run.processes.kill("broker")
    shutil.rmtree(state)
    shutil.copytree(copy, state)

    run.broker()
    restored = run.status()
    assert lost is not None and restored is not None
    assert restored.run_id == lost.run_id and sum(restored.versions) < sum(lost.versions)
    both_merge(run)
    run.leave("a", "b")
    run.check_digests("a", "b")
    for name in "ab":
        ledger = run.summary(name)["stats"]["ledger"]
        fates = ("pending", "merged", "overwritten", "refused", "rolled_back", "skipped")
        assert sum(ledger[fate] for fate in fates) == ledger["logged"] * 4
        assert ledger["rolled_back"] > 0
        assert "go back to the broker's versions" in run.log(name)
    told = [line for line in run.log("broker").splitlines() if "history_lost" in line]
    assert len(told) >= 1
    assert "restored from an older copy" in told[0] and "the disk" not in told[0]
