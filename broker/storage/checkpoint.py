"""A run's state directory: its lock, its epoch, and generations of checkpoints.

    run.json  run.copy.json                  the run and its epoch, twice
    run.secret                               32 bytes that prove an epoch (secret_file.py)
    checkpoint-00000012/fragment-00000.safetensors ...   global, momentum, published: float32 (n,)
    checkpoint-00000012/manifest.json        written last; versions and digests of every array
    journal/journal-00000003.log ...         the rounds since the older checkpoint (journal.py)
    lock                                     held by the one broker that uses the directory

Nothing counts before it is durable: temporary name, fsync, rename, fsync of the directory. Two
generations are kept, because a disk may damage the newest one after it was verified. A digest
guards every byte that is read back. Names are built in this package only, symbolic links are not
followed, and files with other names are left alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn, Self

import msgspec

from narrows.broker.merging import FragmentState
from narrows.broker.storage.durable_files import (
    Damaged,
    StateError,
    directory,
    lock,
    make_directory,
    write_file,
)
from narrows.broker.storage.manifest import (
    MANIFEST,
    RUN_FORMAT,
    CheckpointContent,
    Manifest,
    RunRecord,
    blocks_of,
    export_tensors,
    fragment_header,
    fragment_name,
    manifest_of,
    read_fragment,
    read_manifest,
    read_sealed,
    sealed,
    snapshot_of,
)
from narrows.broker.storage.secret_file import SECRET_FILE, find_secret, make_secret
from narrows.proto.errors import ConfigError, ErrorCode

__all__ = [
    "CheckpointContent",
    "RunRecord",
    "StateDir",
    "StateError",
    "export_tensors",
    "generation_name",
    "generations_in",
]

GENERATIONS_KEPT: Final = 2
_GENERATION: Final = re.compile(r"checkpoint-([0-9]{8,18})")
_NUMBER: Final = re.compile(r"\bcheckpoint-([0-9]{8,18})\b")
_LEFTOVER: Final = re.compile(r"\.(new|old)-[a-z0-9.-]+")
_OWN_FILE: Final = re.compile(r"manifest\.json|fragment-[0-9]{5,}\.safetensors")
_RECORDS: Final = ("run.copy.json", "run.json")

# Remedies: for state that cannot be read, and for a checkpoint that cannot be written.
_GONE: Final = "restore the directory from a backup, or start a new run in an empty state_dir"
_KEPT: Final = "check the disk; the checkpoint before it and the journal still hold everything"


class StateDir:
    """The state directory of one broker, locked from `open` to `close`. Not thread-safe."""

    def __init__(self, path: Path, directory_fd: int, lock_fd: int) -> None:
        self.path = path
        self.keep_first = False
        """True if the generation of version 0 is never removed: a replay begins there."""
        self.warnings: list[str] = []
        """Damage that was passed over; the caller tells the operator."""
        self.secret = b""
        """The run's, once its epoch has begun."""
        self._fd = directory_fd
        self._journal_fd: int | None = None
        self._lock_fd = lock_fd
        self._damaged: set[int] = set()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Makes the directory if it is missing, and locks it.

        Raises StateError STATE_LOCKED, naming the process that has it, and ConfigError.
        """
        try:
            make_directory(path)
            directory_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return cls(path, directory_fd, lock(path, directory_fd))
            except BaseException:
                os.close(directory_fd)
                raise
        except OSError as error:
            message = f"{path}: cannot be used as state directory"
            raise ConfigError(message, got=error.strerror or str(error)) from error

    def close(self) -> None:
        """Gives the lock back. The lock file stays.

        A broker that has opened it already would lock a file without a name, and a third one a new
        file: both would go on.
        """
        if self._journal_fd is not None:
            os.close(self._journal_fd)
        os.close(self._lock_fd)
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    # The run and its epoch.

    @property
    def run(self) -> RunRecord | None:
        """The run of this directory, None in a new one. Raises StateError STATE_DAMAGED.

        Of the two copies the newer one counts, so that one damaged file cannot lower the epoch.
        """
        records: list[RunRecord] = []
        problems: list[str] = []
        for name in _RECORDS:
            try:
                records.append(read_sealed(self._fd, name, RunRecord))
            except FileNotFoundError:
                continue
            except Damaged as problem:
                problems.append(str(problem))
        if not records and (problems or self._generations()):
            what = "the run and its epoch cannot be read"
            self._raise_damaged(what, problems or ["no run.json"])
        self._warn(problems)
        return max(records, key=lambda record: record.epoch, default=None)

    def begin_epoch(self, new_run_id: str, config_digest: str) -> RunRecord:
        """Raises the life of the epoch by one; durable when it returns, so call it before serving.

        `new_run_id` is used in a new directory only, where the first epoch is (1, 1). Raises
        StateError STATE_DAMAGED or RUN_SECRET, and OSError.
        """
        self._remove_leftovers()
        before = self.run
        run_id = before.run_id if before else new_run_id
        term, life = before.epoch if before else (1, 0)
        assert term >= 1 and life >= 0, before
        is_required = before is not None and before.format == RUN_FORMAT
        self.secret = find_secret(self._fd, self.path, is_required=is_required)
        record = sealed(RunRecord(RUN_FORMAT, run_id, (term, life + 1), config_digest))
        for name in _RECORDS:
            write_file(self._fd, f".new-{name}", [msgspec.json.encode(record)])
            self._publish(name)
        return record

    def renew_secret(self) -> Path:
        """Makes a new secret of the run, durably, and returns the path of its file."""
        if self.run is None:
            raise ConfigError(f"{self.path}: no run, so there is no secret to renew")
        self.secret = make_secret(self._fd)
        return self.path / SECRET_FILE

    def _publish(self, name: str) -> None:
        """Gives the finished `.new-` file or directory its name, durably."""
        os.rename(f".new-{name}", name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        os.fsync(self._fd)

    # Generations.

    def save(self, snapshot: CheckpointContent) -> int:
        """Writes a generation and returns its number; then it is durable and was read back.

        Older generations but one are removed only after that. Raises OSError if the disk fails,
        StateError STATE_DAMAGED if it does not give back what was written; the generations from
        before are still there, and the next `save` starts anew.
        """
        manifest = manifest_of(snapshot)
        self._remove_leftovers()
        number = max(map(int, _NUMBER.findall(" ".join(os.listdir(self._fd)))), default=0) + 1
        name = generation_name(number)
        os.mkdir(f".new-{name}", 0o700, dir_fd=self._fd)
        with directory(self._fd, f".new-{name}") as fd:
            for index, state in enumerate(snapshot.fragments):
                blocks: list[bytes | memoryview] = [
                    fragment_header(state.global_.size),
                    *blocks_of(state),
                ]
                write_file(fd, fragment_name(index), blocks)
            write_file(fd, MANIFEST, [msgspec.json.encode(manifest)])
            os.fsync(fd)
        self._publish(name)
        try:
            self._read(number, lambda state: None)
        except Damaged as problem:
            self._remove(number)
            self._raise_damaged("a checkpoint reads back differently", [str(problem)], _KEPT)
        self._remove_older(number)
        return number

    def journal_needed_from(self) -> int:
        """The oldest record that a generation which is kept does not hold. Raises StateError."""
        manifests: list[Manifest] = []
        for number in self._generations():
            try:
                with directory(self._fd, generation_name(number)) as fd:
                    manifests.append(read_manifest(fd))
            except (OSError, Damaged) as problem:
                self._raise_damaged("a checkpoint cannot be read", [str(problem)], _KEPT)
        return 1 + min((manifest.journal for manifest in manifests), default=0)

    @property
    def has_journal(self) -> bool:
        """Some life of the broker wrote one."""
        return "journal" in os.listdir(self._fd)

    def journal_directory(self) -> int:
        """A descriptor of the journal's folder, which is made if it is missing. Raises OSError.

        `close` closes it.
        """
        if self._journal_fd is not None:
            return self._journal_fd
        with suppress(FileExistsError):
            os.mkdir("journal", 0o700, dir_fd=self._fd)
            os.fsync(self._fd)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._journal_fd = os.open("journal", flags, dir_fd=self._fd)
        return self._journal_fd

    def load(self) -> CheckpointContent | None:
        """The newest generation that is whole, None if there is none at all.

        Generations that had to be passed over are named in `warnings`. Raises StateError
        STATE_DAMAGED if there are some and none is whole.
        """
        run = self.run
        problems: list[str] = []
        for number in self._generations():
            fragments: list[FragmentState] = []
            try:
                manifest = self._read(number, fragments.append)
                if run is None or manifest.run_id != run.run_id:
                    raise Damaged(f"{generation_name(number)}: of run {manifest.run_id}")
            except Damaged as problem:
                self._damaged.add(number)
                problems.append(f"{problem}; passed over for an older checkpoint")
            else:
                self._warn(problems)
                return snapshot_of(manifest, fragments)
        if problems:
            self._raise_damaged("no checkpoint is whole", problems)
        return None

    def load_oldest(self) -> CheckpointContent | None:
        """The oldest generation that is kept, None if there is none. Raises StateError."""
        for number in reversed(self._generations()):
            fragments: list[FragmentState] = []
            try:
                return snapshot_of(self._read(number, fragments.append), fragments)
            except Damaged as problem:
                remedy = (
                    "restore that checkpoint from a backup; the broker may need newer ones only"
                )
                self._raise_damaged("the oldest checkpoint is damaged", [str(problem)], remedy)
        return None

    def _generations(self) -> list[int]:
        return generations_in(self._fd)

    def _read(self, number: int, take: Callable[[FragmentState], None]) -> Manifest:
        """Reads a generation fragment by fragment, checking every digest."""
        name = generation_name(number)
        try:
            with directory(self._fd, name) as fd:
                manifest = read_manifest(fd)
                for index, entry in enumerate(manifest.fragments):
                    take(read_fragment(fd, index, entry))
        except (OSError, Damaged) as problem:
            raise Damaged(f"{name}: {problem}") from problem
        return manifest

    def _remove_older(self, newest: int) -> None:
        """Removes all but the newest generations. Damaged ones go first, however new they are."""
        older = [number for number in self._generations() if number < newest]
        older.sort(key=lambda number: (number in self._damaged, -number))
        for number in older[GENERATIONS_KEPT - 1 :]:
            if not (self.keep_first and number == 1):
                self._remove(number)

    def _remove(self, number: int) -> None:
        """Removes a generation, renamed first, so that nobody sees one with half of its files.

        The next `save` tries again to remove what is left. Nothing depends on it.
        """
        name = generation_name(number)
        with suppress(OSError):
            os.rename(name, f".old-{name}", src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Removes the remains of an interrupted `save`. Files with odd names stay: they do no
        harm."""
        for name in filter(_LEFTOVER.fullmatch, os.listdir(self._fd)):
            with suppress(OSError):
                if not stat.S_ISDIR(os.lstat(name, dir_fd=self._fd).st_mode):
                    os.unlink(name, dir_fd=self._fd)
                    continue
                with directory(self._fd, name) as fd:
                    for file in filter(_OWN_FILE.fullmatch, os.listdir(fd)):
                        os.unlink(file, dir_fd=fd)
                os.rmdir(name, dir_fd=self._fd)

    def _warn(self, problems: Sequence[str]) -> None:
        self.warnings += [text for text in problems if text not in self.warnings]

    def _raise_damaged(
        self, message: str, problems: Sequence[str], remedy: str = _GONE
    ) -> NoReturn:
        got = "; ".join(problems)
        raise StateError(ErrorCode.STATE_DAMAGED, f"{self.path}: {message}", got=got, remedy=remedy)


def generations_in(directory_fd: int) -> list[int]:
    """Numbers of the generations in a state directory, newest first."""
    matches = map(_GENERATION.fullmatch, os.listdir(directory_fd))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def generation_name(number: int) -> str:
    """Name of a generation's folder."""
    return f"checkpoint-{number:08d}"
