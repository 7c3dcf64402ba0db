"""How a life of the broker begins: newest checkpoint, fragment check, durable epoch, syncer."""

from __future__ import annotations

import json
import logging
import secrets

from narrows.broker.checkpoint import Snapshot, StateDir
from narrows.broker.config import BrokerConfig
from narrows.broker.syncer import Resumed, Syncer
from narrows.proto import messages as msg
from narrows.proto.config import flatten
from narrows.proto.errors import ConfigError
from narrows.proto.frames import digest

_log = logging.getLogger("narrows.broker")


def begin_epoch(
    config: BrokerConfig, state_dir: StateDir, *, now: float
) -> tuple[Syncer, Snapshot | None]:
    """The syncer of a new epoch, and the checkpoint that it resumes from, if there is one.

    The epoch is on disk when this returns: whatever a learner hears from now on is newer than
    all that it heard from the life before. Raises NarrowsError if the state is damaged, or was
    made with another fragment count.
    """
    snapshot = state_dir.load()
    for warning in state_dir.warnings:
        _log.error("%s", warning)
    if snapshot is not None and snapshot.fragment_count != config.fragments.count:
        raise ConfigError(
            f"the checkpoint in {state_dir.path} has another fragment count",
            expected=f"fragments.count = {snapshot.fragment_count}",
            got=str(config.fragments.count),
            remedy="start with the old setting, or with a new --state-dir",
        )
    settings = json.dumps(flatten(config), sort_keys=True).encode()
    run = state_dir.begin_epoch(secrets.token_hex(8), f"{digest(settings):016x}")
    syncer = Syncer(
        config,
        run_id=run.run_id,
        epoch=run.epoch,
        now=now,
        resumed=_resumed(snapshot) if snapshot is not None else None,
        from_file=bool(config.broker.init) and snapshot is None,
    )
    how = f"resumed at versions {syncer.state.versions}" if snapshot is not None else "begins"
    _log.info("run %s %s, epoch %d.%d", run.run_id, how, *run.epoch)
    if syncer.state.phase is msg.Phase.ENDED:
        _log.warning(
            "this run has ended, its final model is in %s; learners only get it. "
            "A new run needs another --state-dir",
            state_dir.path,
        )
    return syncer, snapshot


def _resumed(snapshot: Snapshot) -> Resumed:
    return Resumed(
        layout=snapshot.layout,
        frozen_digest=snapshot.frozen_digest,
        heads=tuple(msg.FragmentHead(f.version, f.digest) for f in snapshot.fragments),
        run_tokens=snapshot.run_tokens,
        phase=msg.Phase(snapshot.phase),
    )
