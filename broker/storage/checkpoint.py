"""A run's state directory: its lock, its epoch, and generations of checkpoints.

    run.json  run.copy.json                  the run and its epoch, twice
    run.secret                               32 bytes that prove an epoch (secret_file.py)
    checkpoint-00000012/fragment-00000.safetensors ...   global, momentum, published: float32 (n,)
    checkpoint-00000012/manifest.json        written last; versions and digests of every array
    journal/journal-00000003.log ...         the rounds since the older checkpoint (journal.py)
    seal.json  checkpoint-00000012/seal.json  only with a seal key (sealed.py)
    lock                                     held by the one broker that uses the directory

Nothing counts before it is durable: temporary name, fsync, rename, fsync of the directory. Two
generations are kept, because a disk may damage the newest one after it was verified. A digest
guards every byte that is read back. Names are built in this package only, symbolic links are not
followed, and files with other names are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
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
from narrows.broker.storage.fragment_file import file_of, fragment_name, read_fragment
from narrows.broker.storage.manifest import (
    MANIFEST,
    RUN_FILES,
    RUN_FORMAT,
    CheckpointContent,
    Manifest,
    RunRecord,
    manifest_of,
    read_manifest,
    read_run,
    sealed,
    snapshot_of,
)
from narrows.broker.storage.names import (
    generation_name,
    generations_in,
    next_generation,
    remove_leftovers,
)
from narrows.broker.storage.seal import SealKey
from narrows.broker.storage.sealed import DirectorySeal, refuse_sealed
from narrows.broker.storage.secret_file import SECRET_FILE, find_secret, new_secret
from narrows.proto.errors import ConfigError, ErrorCode

__all__ = ["CheckpointContent", "RunRecord", "StateDir", "StateError"]

GENERATIONS_KEPT: Final = 2

# Remedies: for state that cannot be read, and for a checkpoint that cannot be written.
_GONE: Final = "restore the directory from a backup, or start a new run in an empty state_dir"
_KEPT: Final = "check the disk; the checkpoint before it and the journal still hold everything"


class StateDir:
    """The state directory of one broker, locked from `open` to `close`. Not thread-safe."""

    def __init__(
        self, path: Path, directory_fd: int, lock_fd: int, seal_key: SealKey | None = None
    ) -> None:
        self.path = path
        self.seal = DirectorySeal(path, directory_fd, seal_key) if seal_key else None
        self.keep_first = False
        """True if the generation of version 0 is never removed: a replay begins there."""
        self.warnings: list[str] = []
        """Damage that was passed over; the caller tells the operator."""
        self.secret = b""  # The run's, once its epoch has begun.
        self._fd = directory_fd
        self._journal_fd: int | None = None
        self._lock_fd = lock_fd
        self._damaged: set[int] = set()

    @classmethod
    def open(cls, path: Path, seal_key: SealKey | None = None) -> Self:
        """Makes the directory if it is missing, and locks it. With a key all it writes is sealed.

        Raises StateError STATE_LOCKED, naming the process that has it, and ConfigError.
        """
        try:
            make_directory(path)
            directory_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return cls(path, directory_fd, lock(path, directory_fd), seal_key)
            except BaseException:
                os.close(directory_fd)
                raise
        except OSError as error:
            message = f"{path}: cannot be used as state directory"
            raise ConfigError(message, got=error.strerror or str(error)) from error

    @property
    def directory_fd(self) -> int:
        """A descriptor of the directory, until `close`."""
        return self._fd

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_seals(self, *, but: str = "") -> None:
        """Compares the seals of all files but the journal's, and but one at the top.

        Raises StateError if one differs, or if there is a key and no seal, or the other way round.
        """
        if self.seal is None:
            refuse_sealed(self._fd, self.path)
            return
        run, places = self.run, [generation_name(number) for number in self._generations()]
        is_new = run is None and not self.has_journal
        self.seal.check(run.run_id if run else None, places, is_new=is_new, but=but)

    # The run and its epoch.

    @property
    def run(self) -> RunRecord | None:
        """The run of this directory, None in a new one. Raises StateError STATE_DAMAGED.

        Of the two copies the newer one counts, so that one damaged file cannot lower the epoch.
        """
        records, problems = read_run(self._fd)
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
        remove_leftovers(self._fd)
        before = self.run
        run_id = before.run_id if before else new_run_id
        term, life = before.epoch if before else (1, 0)
        assert term >= 1 and life >= 0, before
        is_required = before is not None and before.format == RUN_FORMAT
        secret = find_secret(self._fd, self.path, is_required=is_required)
        self.secret = secret or new_secret()
        record = sealed(RunRecord(RUN_FORMAT, run_id, (term, life + 1), config_digest))
        contents = {name: msgspec.json.encode(record) for name in RUN_FILES}
        self._replace(run_id, contents if secret else {SECRET_FILE: self.secret, **contents})
        return record

    def renew_secret(self) -> Path:
        """Makes a new secret of the run, durably, and returns the path of its file."""
        self.check_seals(but=SECRET_FILE)
        if (run := self.run) is None:
            raise ConfigError(f"{self.path}: no run, so there is no secret to renew")
        remove_leftovers(self._fd)
        self.secret = new_secret()
        self._replace(run.run_id, {SECRET_FILE: self.secret})
        return self.path / SECRET_FILE

    def _replace(self, run_id: str, contents: Mapping[str, bytes]) -> None:
        """Gives files beside the checkpoints new contents, one after the other, durably."""
        with self.seal.replacing(run_id, contents) if self.seal else nullcontext():
            for name, content in contents.items():
                write_file(self._fd, f".new-{name}", [content])
                self._publish(name)

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
        remove_leftovers(self._fd)
        number = next_generation(self._fd)
        name = generation_name(number)
        os.mkdir(f".new-{name}", 0o700, dir_fd=self._fd)
        with directory(self._fd, f".new-{name}") as fd:
            for index, state in enumerate(snapshot.fragments):
                write_file(fd, fragment_name(index), file_of(state))
            write_file(fd, MANIFEST, [msgspec.json.encode(manifest)])
            if self.seal is not None:
                journal = snapshot.journal, snapshot.journal_seal
                self.seal.seal_folder(fd, name, snapshot.run_id, journal)
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

    def load(self, *, at_most: int | None = None) -> CheckpointContent | None:
        """The newest generation that is whole, None if there is none at all.

        `at_most`: the newest one whose versions have no larger sum.

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
                if at_most is None or sum(each.version for each in fragments) <= at_most:
                    return snapshot_of(manifest, fragments)
        if problems and at_most is None:
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

    def remove_before(self, number: int) -> None:
        """Removes all generations that are older."""
        for each in self._generations():
            if each < number:
                self._remove(each)

    def _remove(self, number: int) -> None:
        """Removes a generation, renamed first, so that nobody sees one with half of its files.

        The next `save` tries again to remove what is left. Nothing depends on it.
        """
        name = generation_name(number)
        with suppress(OSError):
            os.rename(name, f".old-{name}", src_dir_fd=self._fd, dst_dir_fd=self._fd)
        remove_leftovers(self._fd)

    def _warn(self, problems: Sequence[str]) -> None:
        self.warnings += [text for text in problems if text not in self.warnings]

    def _raise_damaged(
        self, message: str, problems: Sequence[str], remedy: str = _GONE
    ) -> NoReturn:
        got = "; ".join(problems)
        raise StateError(ErrorCode.STATE_DAMAGED, f"{self.path}: {message}", got=got, remedy=remedy)
