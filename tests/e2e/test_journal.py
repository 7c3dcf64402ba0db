"""A run's journal: recovered, audited, replayed, exported; and disks that fail while it serves."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from chaos.end_of_run import metadata
from running import (
    HANG_S,
    LAYOUT,
    ToyHost,
    broker_config,
    client,
    live_broker,
    train,
    vector,
    wait_until,
)
from safetensors.numpy import load_file

from narrows.bench.kit.processes import free_ports
from narrows.broker.cli.journal_report import audit, export_model, replay, show, show_layout
from narrows.broker.cli.status import ask_status
from narrows.broker.merging.model import GlobalModel
from narrows.broker.process.service import Service
from narrows.broker.storage import new_seal_key
from narrows.broker.storage.audit import Audit
from narrows.broker.storage.checkpoint import StateDir
from narrows.broker.storage.disk import DirectoryFiles
from narrows.broker.storage.durable_files import Damaged, RecordsLost, StateError
from narrows.broker.storage.history import Changes, memory_digest, model_digest, opened_run
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.records import RoundRecord, decode
from narrows.broker.storage.recovery import begin_epoch
from narrows.broker.storage.replay import read_records
from narrows.broker.syncer.events import JournalGap
from narrows.proto.errors import ConfigError, NarrowsError
from narrows.proto.layout import fingerprint


def run_to_its_goal(folder: Path, **flags: object) -> Path:
    """The state directory of a run of two learners that has ended."""
    settings: dict[str, object] = {
        "run__goal_tokens": 300,
        "run__learners_at_start": 2,
        "fragments__sync_period_steps": 6,
        "merge__quorum": 2,
        "broker__journal_segment": "64KiB",
        "broker__checkpoint_versions": 8,
        **flags,
    }
    with live_broker(broker_config(folder, **settings)) as service:
        hosts = {"a": ToyHost(vector(1)), "b": ToyHost(vector(2))}
        train(service, hosts, rate=0.05, step_s=0.003)
    return folder / "state"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_to_its_goal(tmp_path_factory.mktemp("ended"), broker__journal_keep=True)


def test_a_replay_gives_the_model_of_the_run(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay(ended, Changes())
    told = capsys.readouterr().out
    assert "every digest as it was" in told and "equal to the newest checkpoint" in told


def test_a_replay_under_another_merge_says_from_where_on_it_differs(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay(ended, Changes(merge="mean"), tmp_path / "other.safetensors")
    assert metadata(tmp_path / "other.safetensors")["narrows.final"] == "false"
    told = capsys.readouterr().out
    assert "different from record" in told and "version 1 of fragment" in told
    replay(ended, Changes(merge="rda"))
    assert "no difference" in capsys.readouterr().out
    replay(ended, Changes(outer_lr=0.1))
    assert "different from record" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="mean or rda"):
        replay(ended, Changes(merge="median"))


def test_a_run_can_be_merged_again_without_one_learner(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened_run(ended) as (_, journal):
        assert journal is not None
        heads = [head for _, head, _ in read_records(journal, 1) if isinstance(head, RoundRecord)]
    of_a = sum(any(each.learner == "a" for each in head.contributors) for head in heads)
    assert 0 < of_a and any(len(head.contributors) > 1 for head in heads)
    replay(ended, Changes(without=("a",)), tmp_path / "model.safetensors")
    out = capsys.readouterr().out
    assert f"{len(heads)} rounds merged again" in out and "different from record" in out
    assert (tmp_path / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="no contribution of that learner"):
        replay(ended, Changes(without=("nobody",)))


def test_the_audit_finds_nothing_wrong_and_what_is_made_wrong(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit(ended)
    assert "every push at most once" in capsys.readouterr().out
    found = Audit()
    with opened_run(ended) as (_, journal):
        assert journal is not None
        heads = [head for _, head, _ in read_records(journal, journal.first)]
    for head in [*heads, heads[-1]]:
        found.take(0, head)
    assert found.fates["joined"] == 2 and len(found.epochs) == 1
    rounds = [head for head in heads if isinstance(head, RoundRecord)]
    found.take(1, rounds[-1])
    assert any("second time" in problem for problem in found.problems)
    assert not any("never written" in problem for problem in found.problems)
    found.take(2, msgspec.structs.replace(rounds[-1], version=rounds[-1].version + 2))
    assert any("never written" in problem for problem in found.problems)


def test_the_journal_can_be_read(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(ended)
    told = capsys.readouterr().out
    assert "epoch 1.1 begins" in told and "a joined" in told
    assert re.search(r"fragment 0 version 1 \(\d+ in all\) from a \d+%, b \d+%", told)


def test_the_layout_is_that_of_hello_while_the_broker_runs(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StateDir.open(ended):  # The lock of a broker that is running.
        show_layout(ended)
    told = json.loads(capsys.readouterr().out)
    entries = [[e.name, list(e.shape), e.dtype, e.rule] for e in LAYOUT]
    mark = fingerprint(LAYOUT, 0)
    assert told == {"fingerprint": mark, "frozen_digest": 0, "layout": entries}


def test_the_layout_of_an_older_checkpoint_stands_in_for_a_damaged_one(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    shutil.copytree(ended, state)
    manifests = sorted(state.glob("checkpoint-*/manifest.json"))
    assert len(manifests) > 1
    manifests[-1].write_bytes(b"{}")
    show_layout(state)
    assert LAYOUT[0].name in capsys.readouterr().out
    for manifest in manifests:
        manifest.unlink()
    with pytest.raises(ConfigError, match="no checkpoint can be read"):
        show_layout(state)
    with pytest.raises(ConfigError, match="No such file"):
        show_layout(tmp_path / "nowhere")


def test_an_export_has_the_names_of_the_tensors(ended: Path, tmp_path: Path) -> None:
    export_model(ended, tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: array.shape for name, array in tensors.items()} == {
        entry.name: entry.shape for entry in LAYOUT
    }
    with StateDir.open(ended) as state_dir:
        newest = state_dir.load()
    assert newest is not None
    assert metadata(tmp_path / "model.safetensors") == {
        "format": "pt",
        "narrows.final": "true",
        "narrows.parameters": "global",
        "narrows.run": newest.run_id,
        "narrows.versions": json.dumps([state.version for state in newest.fragments]),
        "narrows.run_tokens": str(newest.run_tokens),
    }
    target = (vector(1) + vector(2)) / 2
    start = float(np.abs(target).mean())
    flat = np.concatenate([array.reshape(-1) for array in tensors.values()])
    assert float(np.abs(flat - target).mean()) < 0.7 * start


def test_what_is_no_state_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no state directory"):
        audit(tmp_path / "missing")
    with pytest.raises(ConfigError, match="holds no run"):
        audit(tmp_path)


# Recovery.


def vanish(service: Service) -> None:
    """Ends a broker as SIGKILL would: without a last checkpoint."""
    service.syncer.scheduler.halted = True
    rounds = service.syncer.state.rounds
    wait_until(lambda: not any(r.merging for r in list(rounds.values())), "merges to be over")
    service.syncer.lifecycle.checkpoint_sum = service.syncer.state.version_sum
    service.stop("gone")


def everything(model: GlobalModel) -> str:
    """Digests of the model, and of what its merge remembers."""
    assert all(state.history.rounds for state in model.fragments) and model.watch.names
    return f"{model_digest(model)} {memory_digest(model)}"


def models(folder: Path, **flags: object) -> tuple[str, str, int]:
    """The digest of everything in a broker that ends without a word, that of the one which comes
    after it, and how many rounds that one took from the journal."""
    config = broker_config(
        folder, fragments__sync_period_steps=4, broker__journal_segment="64KiB",
        broker__checkpoint_versions=1000, **flags,
    )  # fmt: skip
    with live_broker(config) as service:
        stop = threading.Event()
        host = ToyHost(vector(3))
        learner = client(service, "a", host)
        learner.start()
        while service.syncer.state.version_sum < 9 and not stop.wait(0.003):
            host.step(0.1)
            learner.boundary(1, 0.0)
        learner.abort()
        assert service.jobs.model is not None
        vanish(service)
    before: GlobalModel = service.jobs.model
    with StateDir.open(Path(config.broker.state_dir)) as state_dir:
        begun = begin_epoch(config, state_dir, now=0.0)
        begun.close()
    assert begun.model is not None
    resumed = begun.syncer.lifecycle.checkpoint_sum
    replayed = sum(state.version for state in begun.model.fragments) - resumed
    return everything(before), everything(begun.model), replayed


@pytest.mark.parametrize("mode", ["full", "merged"])
@pytest.mark.parametrize("codec", ["int4-zstd", "auto", "raw32"])
def test_a_restart_has_every_bit(mode: str, codec: str, tmp_path: Path) -> None:
    before, after, replayed = models(
        tmp_path, broker__journal=mode, codec__push=codec, codec__publish=codec
    )
    assert replayed >= 9
    assert before == after


def test_rounds_of_a_journal_outlive_its_being_switched_off(tmp_path: Path) -> None:
    config = broker_config(tmp_path, broker__journal="off")
    before, after, replayed = models(tmp_path)
    assert before == after and replayed >= 9
    with StateDir.open(Path(config.broker.state_dir)) as state_dir:
        begun = begin_epoch(config, state_dir, now=0.0)
    assert begun.journal is None and begun.model is not None
    assert everything(begun.model) == before


def test_without_a_journal_the_first_learner_tells_what_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"tcp://127.0.0.1:{free_ports()}"
    config = broker_config(
        tmp_path, broker__journal="off", broker__listen=address,
        fragments__sync_period_steps=4, broker__checkpoint_versions=1000,
    )  # fmt: skip
    with live_broker(config) as service:
        host = ToyHost(vector(3))
        learner = client(service, "a", host)
        learner.start()
        while sum(learner.background.session.fragments.held) < 6:
            host.step(0.1)
            learner.boundary(1, 0.0)
            threading.Event().wait(0.003)
        vanish(service)
    again = broker_config(
        tmp_path, broker__journal="off", broker__listen=address,
        fragments__sync_period_steps=4,
    )  # fmt: skip
    with live_broker(again) as service:
        wait_until(lambda: "history_lost" in caplog.text, "the learner to tell")
        learner.abort()


# Rounds that were published and never written.


def without_a_round(ended: Path, state: Path) -> tuple[int, ...]:
    """A copy with nothing but version 0 and a journal that lacks a round of fragment 0, as after
    `journal_errors = "serve"` and a crash; the versions that are left without those after it."""
    shutil.copytree(ended, state)
    newest = sorted(state.glob("checkpoint-*"))[1:]
    for path in newest:
        shutil.rmtree(path)
    left, missing = [0, 0], False
    with StateDir.open(state) as state_dir:
        assert state_dir.run is not None
        whole = DirectoryFiles(state_dir.journal_directory())
        run_id = state_dir.run.run_id
        records = list(Journal.open(whole, run_id=run_id, segment_bytes=65536).records(1))
        for name in whole.names():
            whole.unlink(name)
        journal = Journal.open(whole, run_id=run_id, segment_bytes=65536)
        for record in records:
            head = decode(record.body)[0]
            if isinstance(head, RoundRecord) and head.fragment == 0 and head.version == 1:
                missing = True
                continue
            if isinstance(head, RoundRecord) and not (head.fragment == 0 and missing):
                left[head.fragment] = head.version
            journal.append([record.body])
        journal.sync()
        journal.close()
    assert left[0] == 0 < left[1]
    return tuple(left)


def test_a_gap_names_what_loses_least_and_that_works(
    ended: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    left = without_a_round(ended, state)
    stops = broker_config(tmp_path)
    serves = broker_config(tmp_path, broker__journal_errors="serve")
    with StateDir.open(state) as state_dir, pytest.raises(StateError) as caught:
        begin_epoch(stops, state_dir, now=0.0)
    assert "published and never written" in str(caught.value)
    assert "--set broker.journal_errors=serve" in caught.value.remedy
    assert "remove" not in caught.value.remedy and "move" not in caught.value.remedy
    # Done as told: what follows the gap is given up, all else is there.
    with live_broker(serves) as service:
        assert service.syncer.state.versions == left
    assert "came after one that was never written: lost" in caplog.text
    # Once is enough.
    with live_broker(stops) as service:
        assert service.syncer.state.versions == left


def test_the_model_after_a_gap_can_be_exported_but_not_replayed(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    left = without_a_round(ended, state)
    export_model(state, tmp_path / "model.safetensors")
    told = capsys.readouterr().out
    assert f"versions {min(left)}..{max(left)}" in told
    assert "came after one that was published and never written: left out" in told
    with pytest.raises(NarrowsError, match="never written") as caught:
        replay(state, Changes())
    assert "export" in caught.value.remedy
    with pytest.raises(NarrowsError, match="never written"):
        replay(state, Changes(merge="rda"))


# Disks that fail.


class BadDisk:
    """Makes every write of the journal fail while `broken` is set, or every sync; a sync lasts
    until it `works`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = False
        self.has_room_for_headers = False
        """True if only records do not fit: a new segment can be begun."""
        self.refused = 0
        """Writes that failed."""
        self.works = threading.Event()
        self.works.set()
        original = DirectoryFiles.write

        def write(files: DirectoryFiles, handle: int, parts: Sequence[bytes | memoryview]) -> None:
            if self.broken and not (self.has_room_for_headers and len(parts) == 1):
                self.refused += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(files, handle, parts)

        monkeypatch.setattr(DirectoryFiles, "write", write)
        self.broken_sync = False
        original_sync = DirectoryFiles.sync

        def sync(files: DirectoryFiles, handle: int) -> None:
            self.works.wait(HANG_S)
            if self.broken_sync:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            original_sync(files, handle)

        monkeypatch.setattr(DirectoryFiles, "sync", sync)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> BadDisk:
    monkeypatch.setattr("narrows.broker.storage.writer.RETRY_S", 0.05)
    return BadDisk(monkeypatch)


class Training:
    """One learner that goes on, whatever the broker does."""

    def __init__(self, service: Service) -> None:
        self.host, self.steps = ToyHost(vector(3)), 0
        self._stop = threading.Event()
        self.learner = client(service, "a", self.host)
        self.learner.start()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.003):
            self.host.step(0.1)
            self.learner.boundary(1, 0.0)
            self.steps += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.learner.abort()


@pytest.fixture
def serving(tmp_path: Path, request: pytest.FixtureRequest) -> Generator[tuple[Service, Training]]:
    config = broker_config(
        tmp_path, fragments__sync_period_steps=4, broker__journal_errors=request.param
    )
    with live_broker(config) as service:
        training = Training(service)
        try:
            wait_until(lambda: service.syncer.state.version_sum > 3, "the first versions")
            yield service, training
        finally:
            training.stop()


@pytest.mark.parametrize("serving", ["stop"], indirect=True)
@pytest.mark.parametrize("what", ["broken", "broken_sync"])
def test_on_a_bad_disk_nothing_is_published_and_training_goes_on(
    serving: tuple[Service, Training], disk: BadDisk, what: str
) -> None:
    service, training = serving
    setattr(disk, what, True)
    wait_until(lambda: service.syncer.lifecycle.journal_fails, "the failure to be noticed")
    versions, steps = service.syncer.state.version_sum, training.steps
    wait_until(lambda: training.steps > steps + 100, "the learner to train on")
    assert service.syncer.state.version_sum == versions
    told = ask_status(service.wires.address, timeout_s=HANG_S)
    assert told.waiting_for == "the disk: the journal cannot be written"
    setattr(disk, what, False)
    wait_until(lambda: not service.syncer.lifecycle.journal_fails, "the disk to be used again")
    wait_until(lambda: service.syncer.state.version_sum > versions + 4, "new versions")


@pytest.mark.parametrize("serving", ["stop"], indirect=True)
def test_a_disk_that_stands_still_holds_versions_back_and_is_told(
    serving: tuple[Service, Training],
    disk: BadDisk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("narrows.broker.storage.writer.SLOW_S", 0.0)
    service, training = serving
    disk.works.clear()

    def waits() -> bool:
        told = ask_status(service.wires.address, timeout_s=HANG_S)
        return told.waiting_for.endswith("merged, then written to disk")

    wait_until(waits, "all rounds in flight to wait for the disk")
    versions, steps = service.syncer.state.version_sum, training.steps
    wait_until(lambda: training.steps > steps + 100, "the learner to train on")
    assert service.syncer.state.version_sum == versions
    disk.works.set()
    wait_until(lambda: service.syncer.state.version_sum > versions + 4, "new versions")
    assert "s to make rounds durable" in caplog.text


@pytest.mark.parametrize("serving", ["serve"], indirect=True)
def test_serving_on_is_a_setting(serving: tuple[Service, Training], disk: BadDisk) -> None:
    service, _ = serving
    disk.broken = True
    wait_until(lambda: service.syncer.lifecycle.journal_fails, "the failure to be noticed")
    versions = service.syncer.state.version_sum
    wait_until(lambda: service.syncer.state.version_sum > versions + 4, "new versions")
    disk.broken = False
    wait_until(lambda: not service.syncer.lifecycle.journal_fails, "the disk to be used again")


def test_a_record_that_the_disk_refused_is_no_alteration_of_a_sealed_run(
    disk: BadDisk, tmp_path: Path
) -> None:
    new_seal_key(tmp_path / "seal.key")
    config = broker_config(
        tmp_path, fragments__sync_period_steps=4, broker__journal_errors="serve",
        security__seal_key=str(tmp_path / "seal.key"),
    )  # fmt: skip
    with live_broker(config) as service:
        training = Training(service)
        try:
            wait_until(lambda: service.syncer.state.version_sum > 3, "the first versions")
            disk.broken = disk.has_room_for_headers = True
            wait_until(lambda: service.syncer.lifecycle.journal_fails, "the failure")
            before = service.syncer.state.version_sum
            wait_until(lambda: service.syncer.state.version_sum > before + 4, "new versions")
            service.stop("the test wants it")
            wait_until(lambda: service.syncer.lifecycle.finished, "the broker to end")
        finally:
            training.stop()
        versions = service.syncer.state.versions
    disk.broken = False
    for _ in range(2):
        with live_broker(config) as service:
            assert service.syncer.state.versions == versions


@pytest.mark.parametrize("serving", ["stop"], indirect=True)
def test_a_broker_on_a_full_disk_can_be_stopped(
    serving: tuple[Service, Training], disk: BadDisk, tmp_path: Path
) -> None:
    service, _ = serving
    disk.broken = True
    wait_until(lambda: service.syncer.lifecycle.journal_fails, "the failure to be noticed")
    versions = service.syncer.state.versions
    service.stop("the test wants it")
    wait_until(lambda: service.syncer.lifecycle.finished, "the broker to end")
    disk.broken = False
    wait_until(lambda: service._closed, "it to be closed")
    with opened_run(tmp_path / "state") as (state_dir, _journal):
        snapshot = state_dir.load()
    assert snapshot is not None
    assert tuple(state.version for state in snapshot.fragments) == versions


def test_a_journal_of_another_format_is_refused(ended: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(ended, state)
    for path in (state / "journal").iterdir():
        data = bytearray(path.read_bytes())
        data[4:6] = (2).to_bytes(2, "little")
        path.write_bytes(data)
    with pytest.raises(NarrowsError):
        replay(state, Changes())


def test_a_journal_without_checkpoints_is_no_new_run(ended: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(ended, state)
    for path in state.glob("checkpoint-*"):
        shutil.rmtree(path)
    with pytest.raises(NarrowsError, match="holds rounds, but there is no checkpoint"):
        Service(broker_config(tmp_path))


@pytest.mark.parametrize("codec", ["raw32", "auto"])
def test_a_replay_codes_publications_as_the_run_did(
    codec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = run_to_its_goal(
        tmp_path, broker__journal_keep=True, codec__publish=codec, codec__publish_bits=2.5
    )
    replay(state, Changes(merge="rda"))
    assert "no difference" in capsys.readouterr().out
    replay(state, Changes(merge="mean"))
    assert "different from record" in capsys.readouterr().out


def test_a_round_that_the_queue_refuses_does_not_exist(
    serving_stop: tuple[Service, Training], disk: BadDisk
) -> None:
    """The queue is full: the round waits like one that cannot be written."""
    service, training = serving_stop
    commits = service.commits
    assert commits is not None
    disk.broken = True
    # A queue that was full before has said that the journal fails, too: only when the disk has
    # refused and the loop has seen all that was durable before, nothing more can come.
    wait_until(lambda: disk.refused, "the disk to refuse")
    ask_status(service.wires.address, timeout_s=HANG_S)
    wait_until(lambda: service.syncer.lifecycle.journal_fails, "the failure to be noticed")
    versions, steps = service.syncer.state.version_sum, training.steps
    wait_until(lambda: training.steps > steps + 50, "the learner to train on")
    assert service.syncer.state.version_sum == versions
    disk.broken = False
    wait_until(lambda: service.syncer.state.version_sum > versions + 4, "new versions")


@pytest.fixture
def serving_stop(tmp_path: Path) -> Generator[tuple[Service, Training]]:
    with live_broker(broker_config(tmp_path, fragments__sync_period_steps=4)) as service:
        assert service.commits is not None
        journal = service.commits._journal
        journal._queued_bytes_max = 1
        training = Training(service)
        try:
            wait_until(lambda: service.syncer.state.version_sum > 3, "the first versions")
            yield service, training
        finally:
            training.stop()


# What each refusal advises, where it is printed.


def test_a_damaged_record_names_the_folder_to_move_and_the_price(
    ended: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    shutil.copytree(ended, state)
    for path in sorted(state.glob("checkpoint-*"))[1:]:
        shutil.rmtree(path)
    config = broker_config(tmp_path)
    segment = sorted((state / "journal").iterdir())[0]
    content = bytearray(segment.read_bytes())
    content[2000] ^= 1
    segment.write_bytes(content)
    with StateDir.open(state) as state_dir, pytest.raises(RecordsLost) as caught:
        begin_epoch(config, state_dir, now=0.0)
    remedy = caught.value.remedy
    assert "backup" in remedy and "versions 0 to 0, and all rounds since are lost" in remedy
    # Done as told.
    moved = re.search(r"move (\S+) away", remedy)
    assert moved
    Path(moved[1]).rename(tmp_path / "away")
    with live_broker(config) as service:
        assert service.syncer.state.versions == (0, 0)


def test_who_only_reads_is_not_told_to_throw_anything_away(ended: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(ended, state)
    oldest = sorted(state.glob("checkpoint-*"))[0]
    (oldest / "manifest.json").write_text("{}")
    with pytest.raises(NarrowsError, match="the oldest checkpoint is damaged") as caught:
        replay(state, Changes())
    assert "new run" not in caught.value.remedy and "the broker" in caught.value.remedy


def test_a_checkpoint_that_fails_is_tried_again_and_advises_nothing_drastic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def read_records(_self: StateDir, number: int, _take: object) -> object:
        raise Damaged(f"checkpoint-{number}: another bit")

    monkeypatch.setattr("narrows.broker.syncer.lifecycle.RETRY_S", 0.05)
    with live_broker(broker_config(tmp_path, broker__checkpoint_versions=1_000_000)) as service:
        training = Training(service)
        try:
            wait_until(lambda: service.syncer.state.version_sum > 0, "the first version")
            monkeypatch.setattr(StateDir, "_read", read_records)
            service._post(lambda: JournalGap("the test"))
            wait_until(lambda: caplog.text.count("checkpoint failed") > 1, "it to be tried again")
        finally:
            monkeypatch.undo()
            training.stop()
    told = [r.getMessage() for r in caplog.records if "checkpoint failed" in r.getMessage()]
    assert all("new run" not in text and "backup" not in text for text in told)
    assert "check the disk" in told[0]
