"""A run goes back to an earlier version, and what came after it is kept aside.

The state at that version becomes a new checkpoint, which says that it holds the whole journal: with
it the rollback is done. Before that every file is linked into a folder of its own, which is a state
directory again, to be read with `narrows journal` and `narrows export`. After it the old journal
and the older checkpoints go, so that nothing can replay what was cut off. After a crash the
next start finishes the last step.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from dataclasses import replace
from typing import Final

from narrows.broker.config import BrokerConfig
from narrows.broker.storage.checkpoint import CheckpointContent, StateDir
from narrows.broker.storage.durable_files import Damaged, StateError, directory
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.manifest import MergedPush, read_manifest
from narrows.broker.storage.names import generation_name, generations_in
from narrows.broker.storage.replay import recover, version_sum_of
from narrows.proto.errors import ConfigError, ErrorCode
from narrows.proto.messages import Phase

_ASIDE: Final = re.compile(r"rolled-back-to-[0-9]+")
_KEPT_FILE: Final = re.compile(r"run\.[a-z0-9.]+|seal\.json")
_KEPT_FOLDER: Final = re.compile(r"checkpoint-[0-9]+|journal")

_log = logging.getLogger("narrows.broker")


def roll_back(config: BrokerConfig, state_dir: StateDir, journal: Journal | None) -> None:
    """Makes the state at version `broker.rollback_to` the newest one. Raises NarrowsError, OSError.

    A version is the sum of the fragments' versions: each merged round raises it by one.
    """
    target = config.broker.rollback_to
    aside = f"rolled-back-to-{target}"
    if _was_set_aside(state_dir.directory_fd, aside):
        raise ConfigError(
            f"{state_dir.path}: the run was rolled back to version {target} already",
            remedy="start without --rollback-to; to do it once more, move "
            f"{state_dir.path / aside} away",
        )
    content = _state_at(config, state_dir, journal, target)
    _set_aside(state_dir.directory_fd, aside)
    state_dir.save(content)
    finish_rollbacks(state_dir)
    _log.warning(
        "rolled back to version %d; what came after it, and all before, is kept in %s",
        target,
        state_dir.path / aside,
    )


def finish_rollbacks(state_dir: StateDir) -> bool:
    """Removes what a rollback that is done has set aside, wherever a crash has left some of it.

    Returns whether there was such a rollback: then the journal has no record any more.
    """
    fd, is_finished = state_dir.directory_fd, False
    for aside in filter(_ASIDE.fullmatch, os.listdir(fd)):
        with directory(fd, aside) as aside_fd:
            kept, newest = _inodes(aside_fd), max(generations_in(aside_fd), default=0)
        number = _done_by(fd, newest, int(aside.rpartition("-")[2]))
        if number is None or not kept & _inodes(fd):
            continue
        is_finished = True
        state_dir.remove_before(number)
        if state_dir.has_journal:
            journal_fd = state_dir.journal_directory()
            for name in os.listdir(journal_fd):
                if os.stat(name, dir_fd=journal_fd).st_ino in kept:
                    os.unlink(name, dir_fd=journal_fd)
            os.fsync(journal_fd)
    return is_finished


def _done_by(fd: int, newest: int, target: int) -> int | None:
    """The checkpoint with which a rollback to `target` was done; None if it was not, or long ago.

    It is newer than all that were set aside, and only a rollback lowers the version.
    """
    for number in sorted(generations_in(fd)):
        if number > newest:
            with directory(fd, generation_name(number)) as each, suppress(Damaged):
                manifest = read_manifest(each)
                if sum(entry.version for entry in manifest.fragments) == target:
                    return number
    return None


def _state_at(
    config: BrokerConfig, state_dir: StateDir, journal: Journal | None, target: int
) -> CheckpointContent:
    """The state at a version, as a checkpoint that holds the whole journal."""
    run, snapshot = state_dir.run, state_dir.load(at_most=target)
    oldest = state_dir.load_oldest()
    if run is None or oldest is None:
        raise ConfigError(f"{state_dir.path}: there is no checkpoint to go back to")
    if snapshot is None:
        raise ConfigError(
            f"version {target} is not kept any more",
            expected=f"at least {version_sum_of(oldest.fragments)}, the oldest checkpoint",
            got=str(target),
            remedy="broker.journal_keep keeps everything; a backup may have an older state",
        )
    history = recover(config, snapshot, journal, until=target)
    reached = version_sum_of(history.model.fragments)
    if reached != target:
        what = f"up to {reached}, the newest version that can be made from checkpoint and journal"
        raise ConfigError(f"there is no version {target}", expected=what, got=str(target))
    if journal is not None:
        journal.sync()  # Only what is durable has a number for ever.
    pushes = sorted(history.merged_pushes.items())
    return replace(
        snapshot,
        epoch=run.epoch,
        run_tokens=history.run_tokens,
        token_parts=history.token_units % len(history.model.fragments),
        phase=Phase.RUNNING if history.phase is Phase.ENDED else history.phase,
        fragments=tuple(history.model.fragments),
        journal=journal.durable if journal is not None else snapshot.journal,
        journal_seal=journal.sealer.seal if journal is not None else b"",
        merged_pushes=tuple(MergedPush(*key, *value) for key, value in pushes),
        watch=history.model.watch,
    )


# The folder beside.


def _was_set_aside(fd: int, aside: str) -> bool:
    """True if there is such a folder, and nothing of it is in use any more."""
    try:
        with directory(fd, aside) as aside_fd:
            kept = _inodes(aside_fd)
    except FileNotFoundError:
        return False
    return bool(kept) and not kept & _inodes(fd)


def _inodes(fd: int) -> set[int]:
    """The inodes of all files in checkpoints and journal."""
    found: set[int] = set()
    for folder in filter(_KEPT_FOLDER.fullmatch, os.listdir(fd)):
        with directory(fd, folder) as each:
            found |= {os.stat(name, dir_fd=each).st_ino for name in os.listdir(each)}
    return found


def _set_aside(fd: int, aside: str) -> None:
    """Links every file into the folder `aside`; those that are there already stay."""
    with suppress(FileExistsError):
        os.mkdir(aside, 0o700, dir_fd=fd)
    with directory(fd, aside) as aside_fd:
        _link(fd, aside_fd, [name for name in os.listdir(fd) if _KEPT_FILE.fullmatch(name)])
        for folder in filter(_KEPT_FOLDER.fullmatch, os.listdir(fd)):
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700, dir_fd=aside_fd)
            with directory(fd, folder) as source, directory(aside_fd, folder) as target:
                _link(source, target, os.listdir(source))
                os.fsync(target)
        os.fsync(aside_fd)
    os.fsync(fd)


def _link(source_fd: int, target_fd: int, names: list[str]) -> None:
    try:
        for name in names:
            with suppress(FileExistsError):
                os.link(
                    name, name, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False
                )
    except OSError as error:
        raise StateError(
            ErrorCode.STATE_DAMAGED, "the history cannot be kept aside", got=str(error),
            expected="a file system with hard links",
            remedy="move the state directory to such a file system",
        ) from error  # fmt: skip
