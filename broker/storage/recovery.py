"""The beginning of a broker's life: checkpoint, durable epoch, journal, replay, syncer."""

from __future__ import annotations

import json
import logging
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from narrows.broker.config import BrokerConfig
from narrows.broker.merging import GlobalModel
from narrows.broker.storage import records
from narrows.broker.storage.checkpoint import CheckpointContent, StateDir
from narrows.broker.storage.disk import DirectoryFiles
from narrows.broker.storage.durable_files import RecordsLost, StateError
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.manifest import RunRecord
from narrows.broker.storage.replay import History, read_records, recover
from narrows.broker.storage.rollback import finish_rollbacks, roll_back
from narrows.broker.storage.seal import read_seal_key
from narrows.broker.syncer import Resumed, RunPhase, RunSecret, Syncer, check_founder
from narrows.proto import messages as msg
from narrows.proto.config import flatten
from narrows.proto.errors import ConfigError, ErrorCode
from narrows.proto.frames import digest
from narrows.proto.units import counted

NONCE_BITS: Final = 62
"""Bits of a nonce, as many as an integer of the wire holds. No two lives of a run share one."""

_log = logging.getLogger("narrows.broker")


@dataclass(frozen=True)
class Begun:
    """A life of the broker that may serve."""

    syncer: Syncer
    model: GlobalModel | None
    """None until version 0 stands."""
    journal: Journal | None
    journaled: int
    """The newest record of the journal whose round is in the model."""

    def close(self) -> None:
        """Closes the journal of a life that ends before it serves."""
        if self.journal is not None:
            self.journal.close()


def open_state_dir(config: BrokerConfig) -> StateDir:
    """The state directory of a broker, locked, with its seal key if there is one.

    Raises StateError, ConfigError.
    """
    path, seal_key = Path(config.broker.state_dir), config.security.seal_key
    return StateDir.open(path, read_seal_key(Path(seal_key), path) if seal_key else None)


def begin_epoch(
    config: BrokerConfig,
    state_dir: StateDir,
    *,
    now: float,
    uplink_port: int = 0,
    downlink_port: int = 0,
) -> Begun:
    """Recovers the durable state and begins the next epoch.

    The epoch is on disk when this returns. Its nonce is not: no other life has it, so a learner can
    tell this life from all lives before, those of copies of this directory too. Raises NarrowsError
    if the state is damaged, was made with another fragment count or needs a founder, and OSError.
    """
    state_dir.keep_first = config.broker.journal_keep
    state_dir.check_seals()
    is_rolled_back = finish_rollbacks(state_dir) or config.broker.rollback_to >= 0
    if config.broker.rollback_to >= 0:
        _roll_back(config, state_dir)
    snapshot = state_dir.load()
    for warning in state_dir.warnings:
        _log.error("%s", warning)  # At once: the start may fail below.
    _check_fits(config, state_dir, snapshot)
    settings = json.dumps(flatten(config), sort_keys=True).encode()
    run = state_dir.begin_epoch(secrets.token_hex(8), f"{digest(settings):016x}")
    journal, history = None, None
    try:
        journal = _open_journal(config, state_dir, run)
        if not is_rolled_back:
            _tell_if_removed(state_dir, journal)
        if snapshot is not None:
            history = recover(config, snapshot, journal)
        elif journal is not None:
            _check_new(state_dir, journal)
        if journal is not None and config.broker.journal != "off":
            _begin_record(journal, run, history)
    except BaseException as error:
        if journal is not None:
            journal.close()
        if isinstance(error, RecordsLost) and snapshot is not None:
            raise _last_resort(error, state_dir, snapshot) from error
        raise
    for warning in journal.warnings if journal is not None else []:
        _log.error("%s", warning)
    syncer = Syncer(
        config,
        run_id=run.run_id,
        epoch=(*run.epoch, secrets.randbits(NONCE_BITS)),
        secret=RunSecret(state_dir.secret),
        now=now,
        resumed=_resumed(snapshot, history) if snapshot is not None and history else None,
        from_file=bool(config.broker.init) and snapshot is None,
        uplink_port=uplink_port,
        downlink_port=downlink_port,
    )
    if history is not None and history.gaps:
        text = "%s of the journal came after one that was never written: lost"
        _log.error(text, counted(history.gaps, "round"))
        # The next start then begins behind the gap, and does not meet it again.
        syncer.lifecycle.checkpoint_wanted = True
    _tell(state_dir, run, syncer, history)
    newest = history.newest if history is not None else 0
    if journal is not None and config.broker.journal == "off":
        journal.close()
        journal = None
    return Begun(syncer, history.model if history else None, journal, newest)


def _check_fits(
    config: BrokerConfig, state_dir: StateDir, snapshot: CheckpointContent | None
) -> None:
    """Raises ConfigError unless the run that is there, or begins, can have these settings."""
    if snapshot is None:
        check_founder(config)
    elif snapshot.fragment_count != config.fragments.count:
        raise ConfigError(
            f"the checkpoint in {state_dir.path} has another fragment count",
            expected=f"fragments.count = {snapshot.fragment_count}",
            got=str(config.fragments.count),
            remedy="start with the old setting, or with a new --state-dir",
        )


def _roll_back(config: BrokerConfig, state_dir: StateDir) -> None:
    run = state_dir.run
    journal = _open_journal(config, state_dir, run) if run is not None else None
    try:
        _tell_if_removed(state_dir, journal)
        roll_back(config, state_dir, journal)
    finally:
        if journal is not None:
            journal.close()
    state_dir.check_seals()


def _open_journal(config: BrokerConfig, state_dir: StateDir, run: RunRecord) -> Journal | None:
    """The journal; None if this life writes none and no life before has written one.

    A life without a journal reads an older one: its rounds must not be thrown away.
    """
    if config.broker.journal == "off" and not state_dir.has_journal:
        return None
    return Journal.open(
        DirectoryFiles(state_dir.journal_directory()),
        run_id=run.run_id,
        segment_bytes=config.broker.journal_segment,
        chain=state_dir.seal.chain() if state_dir.seal else None,
    )


def _tell_if_removed(state_dir: StateDir, journal: Journal | None) -> None:
    """Logs that a sealed run has lost its whole journal. It goes on from its newest checkpoint."""
    if state_dir.seal is not None and (error := state_dir.seal.removed(journal)):
        _log.error("%s", error)


def _last_resort(
    error: RecordsLost, state_dir: StateDir, snapshot: CheckpointContent
) -> RecordsLost:
    """The same error, with the remedy for a start without a backup and its price."""
    versions = [state.version for state in snapshot.fragments]
    return RecordsLost(
        error.code, error.message, expected=error.expected, got=error.got,
        remedy=f"{error.remedy}. Without one, move {state_dir.path}/journal away: the run then "
        f"goes on from its newest whole checkpoint, versions {min(versions)} to {max(versions)}, "
        "and all rounds since are lost",
    )  # fmt: skip


def _check_new(state_dir: StateDir, journal: Journal) -> None:
    """Raises StateError if the journal has rounds: then this is no new run, its checkpoints are
    lost."""
    if any(
        isinstance(head, records.RoundRecord) for _, head, _ in read_records(journal, journal.first)
    ):
        raise StateError(
            ErrorCode.STATE_DAMAGED,
            f"{state_dir.path}: the journal holds rounds, but there is no checkpoint",
            remedy="restore the checkpoints from a backup, or start with a new --state-dir",
        )


def _begin_record(journal: Journal, run: RunRecord, history: History | None) -> None:
    if history is not None:
        journal.continue_after(history.newest)
    states = history.model.fragments if history is not None else ()
    began = records.LifeRecord(
        records.FORMAT, run.epoch, run.config_digest, tuple(s.version for s in states), time.time()
    )
    if journal.has_unsealed:
        key = journal.sealer.key
        name = key.name if key else ""
        journal.append(records.encode(records.SealRecord(run.epoch, name, time.time())))
    journal.append(records.encode(began))
    journal.sync()


def _tell(state_dir: StateDir, run: RunRecord, syncer: Syncer, history: History | None) -> None:
    how = "begins"
    if history is not None:
        replayed = counted(history.replayed, "round")
        how = f"resumed at versions {syncer.state.versions}, {replayed} replayed"
    _log.info("run %s %s, epoch %d.%d", run.run_id, how, *run.epoch)
    if syncer.state.phase is RunPhase.ENDED:
        _log.warning(
            "this run has ended, its final model is in %s; learners only get it. "
            "A new run needs another --state-dir",
            state_dir.path,
        )


def _resumed(snapshot: CheckpointContent, history: History) -> Resumed:
    fragments = history.model.fragments
    return Resumed(
        layout=snapshot.layout,
        frozen_digest=snapshot.frozen_digest,
        heads=tuple(msg.FragmentHead(f.version, f.digest) for f in fragments),
        run_tokens=history.run_tokens,
        token_parts=history.token_units % len(fragments),
        phase=msg.Phase(history.phase),
        merged_pushes=history.merged_pushes,
        checkpoint_sum=sum(state.version for state in snapshot.fragments),
    )
