"""The history of a run in its state directory: opened, checked, and merged again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import xxhash

from narrows.broker.config import BrokerConfig
from narrows.broker.merging import FragmentState, GlobalModel, NormHistory, Policy
from narrows.broker.storage import manifest
from narrows.broker.storage.checkpoint import CheckpointContent, StateDir
from narrows.broker.storage.disk import DirectoryFiles
from narrows.broker.storage.durable_files import Damaged, StateError, directory
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.manifest import Manifest
from narrows.broker.storage.names import generation_name, generations_in
from narrows.broker.storage.records import RoundRecord, payloads
from narrows.broker.storage.replay import install, missing_before, read_records, stepped
from narrows.broker.storage.seal import SealKey
from narrows.broker.storage.sealed import DirectorySeal, is_sealed
from narrows.broker.storage.without import left_out, left_over
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError
from narrows.proto.fragments import build_table
from narrows.proto.units import counted

RULES = {"mean": "mean", "rda": "layout"}
"""The merge rule for each value of `--merge`."""


SEGMENT_BYTES = 1 << 20
"""A size that `Journal.open` asks for. No segment is written here."""


@dataclass(frozen=True)
class Changes:
    """The rules that a replay changes; None: as in the run."""

    merge: str | None = None
    optimizer: str | None = None
    outer_lr: float | None = None
    momentum: float | None = None
    without: tuple[str, ...] = ()
    """Learners whose contributions are left out."""

    def policy(self, own: Policy) -> Policy:
        """The run's policy with the changes."""
        changes: dict[str, object] = {}
        if self.merge is not None:
            if self.merge not in RULES:
                raise ConfigError("--merge", expected=" or ".join(RULES), got=self.merge)
            changes["merge_rule"] = RULES[self.merge]
        for name in ("optimizer", "outer_lr", "momentum"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        return msgspec.structs.replace(own, **changes)


@contextmanager
def opened_run(
    path: Path, seal_key: SealKey | None = None
) -> Generator[tuple[StateDir, Journal | None]]:
    """A state directory and its journal, locked, for reading. With a key all seals are compared.

    Raises NarrowsError.
    """
    remedy = "see --state-dir of the broker"
    if not path.is_dir():
        raise ConfigError(f"{path} is no state directory", remedy=remedy)
    if not any((path / name).exists() for name in ("run.json", "run.copy.json")):
        raise ConfigError(f"{path} holds no run", remedy=remedy)
    try:
        state_dir = StateDir.open(path, seal_key)
    except StateError as error:
        if error.code is not ErrorCode.STATE_LOCKED:
            raise
        raise StateError(
            error.code, f"a broker is running on {path}", got=error.got, remedy="stop it first"
        ) from error
    with state_dir:
        run = state_dir.run
        assert run is not None
        journal, chain = None, None
        if state_dir.seal is not None:
            state_dir.check_seals()
            chain = state_dir.seal.chain()
        if state_dir.has_journal:
            files = DirectoryFiles(state_dir.journal_directory())
            journal = Journal.open(
                files, run_id=run.run_id, segment_bytes=SEGMENT_BYTES, chain=chain
            )
        if state_dir.seal is not None and (removed := state_dir.seal.removed(journal)):
            raise removed
        yield state_dir, journal


def oldest_versions(state_dir: StateDir) -> tuple[int, list[int]]:
    """The newest record that the oldest checkpoint holds, and its versions; none if it is damaged.

    The versions of later records follow from them.
    """
    for number in reversed(generations_in(state_dir.directory_fd)):
        with suppress(Damaged, OSError):
            with directory(state_dir.directory_fd, generation_name(number)) as fd:
                found = manifest.read_manifest(fd)
                return found.journal, [entry.version for entry in found.fragments]
    return 0, []


def seal_run(path: Path, key: SealKey) -> None:
    """Seals a state directory as it is. Raises NarrowsError if it is sealed, or not whole."""
    with opened_run(path) as (state_dir, _):
        fd = state_dir.directory_fd
        if is_sealed(fd):
            raise StateError(
                ErrorCode.STATE_DAMAGED, f"{path}: it is sealed already",
                remedy="check it: narrows journal audit --seal-key FILE",
            )  # fmt: skip
        run, journal = state_dir.run, dict[str, int]()
        assert run is not None
        state_dir.load()
        for place in map(generation_name, generations_in(fd)):
            with directory(fd, place) as each:
                journal[place] = manifest.read_manifest(each).journal
        DirectorySeal(path, fd, key).adopt(run.run_id, journal)


def read_manifest(path: Path) -> Manifest:
    """Returns the newest manifest of a state directory, without its lock: a broker may be running.

    Raises ConfigError if there is none that is whole.
    """
    problems: list[str] = []
    try:
        with directory(None, str(path)) as parent_fd:
            for number in generations_in(parent_fd):
                try:
                    with directory(parent_fd, generation_name(number)) as fd:
                        return manifest.read_manifest(fd)
                except (OSError, Damaged) as problem:
                    problems.append(f"{generation_name(number)}: {problem}")
    except OSError as error:
        problems.append(error.strerror or str(error))
    raise ConfigError(
        f"{path}: no checkpoint can be read",
        expected="the state directory of a run that has its version 0",
        got="; ".join(problems) or "a directory without checkpoints",
        remedy="see --state-dir of the broker; start the learner that brings the model first",
    )


def model_digest(model: GlobalModel) -> str:
    """xxh3_128 (hex) over global parameters, momentum and published copies of all fragments."""
    hasher = xxhash.xxh3_128()
    for state in model.fragments:
        for array in (state.global_, state.momentum, state.published):
            hasher.update(array.data.cast("B"))
    return hasher.hexdigest()


def memory_digest(model: GlobalModel) -> str:
    """xxh3_128 (hex) over what the merge remembers: the histories of norms, and the watch.

    It is no part of `model_digest`, since checkpoints of older releases have none.
    """
    hasher = xxhash.xxh3_128(msgspec.json.encode(model.watch))
    for state in model.fragments:
        for each in state.history.rounds:
            hasher.update(msgspec.json.encode((each.version, each.processes)))
            hasher.update(each.norms.tobytes())
    return hasher.hexdigest()


@dataclass(frozen=True)
class MergedAgain:
    """A history under other rules."""

    model: GlobalModel
    rounds: int
    differs: str
    """The first round that came out differently; empty: none."""
    left_out: Mapping[str, int]
    """Contributions that were left out, by learner."""


def merge_again(
    config: BrokerConfig, oldest: CheckpointContent, journal: Journal, changes: Changes
) -> MergedAgain:
    """Merges the same contributions again, with changes. Raises NarrowsError."""
    states = [_forgetting(state, changes.without) for state in oldest.fragments]
    model = GlobalModel(config, build_table(oldest.layout, len(states)), states)
    differs, rounds, names = "", 0, Counter[str]()
    for number, head, blobs in read_records(journal, oldest.journal + 1):
        if not isinstance(head, RoundRecord):
            continue
        missing = missing_before(model, head, number)
        if missing < 0:
            continue
        check_whole(missing)
        rounds += 1
        names.update(each.learner for each in head.contributors)
        try:
            published = _merge_again(model, head, blobs, changes, number)
        except FloatingPointError as error:
            raise NarrowsError(
                ErrorCode.NOT_FINITE, f"record {number}: {error}",
                remedy="choose a smaller --outer-lr, or leave that learner's pushes out",
            ) from error  # fmt: skip
        if published != head.digests[2] and not differs:
            differs = f"record {number}, version {head.version} of fragment {head.fragment}"
    return MergedAgain(model, rounds, differs, left_out(names, changes.without, oldest))


def _merge_again(
    model: GlobalModel, head: RoundRecord, blobs: memoryview, changes: Changes, number: int
) -> int:
    """Installs the version that a round gives under the changes; the digest of its published
    copy."""
    fragment = model.table[head.fragment]
    if not head.contributions and (changes.merge is not None or changes.without):
        raise ConfigError(
            f"record {number} holds the merged outer gradient only",
            expected='journal = "full" in the run\'s settings, for another merge',
        )
    policy = changes.policy(head.policy)
    try:
        vectors = list(payloads([head.publication, *head.contributions], blobs))
    except Damaged as problem:
        raise NarrowsError(ErrorCode.STATE_DAMAGED, f"record {number}: {problem}") from problem
    head, vectors = left_over(head, vectors, changes.without)
    if not head.contributors:
        return model.stand_still(fragment.index, head.version)
    try:
        merged, params, momentum = stepped(model, head, vectors, blobs, policy)
    except Damaged as problem:
        raise NarrowsError(ErrorCode.STATE_DAMAGED, f"record {number}: {problem}") from problem
    _code_as_then(model, head)
    weights = tuple(each.weight for each in head.contributors)
    outcome = model.published(fragment, head.version, params, momentum, merged, weights, policy)
    install(model, head, outcome)
    return outcome.state.digest


def _forgetting(state: FragmentState, names: Sequence[str]) -> FragmentState:
    """A fragment whose history begins anew if names are left out of it."""
    return replace(state, history=NormHistory()) if names else state


def _code_as_then(model: GlobalModel, head: RoundRecord) -> None:
    """Sets the coding of the round's publication: codec, step, cut into chunks.

    With another step the published copies would differ for a reason that nobody asked about.
    """
    codec = replace(
        model.config.codec,
        publish=head.publication.codec,
        publish_rho=head.publication.rho,
        chunk_elements=max(256, head.publication.chunks[0][1]),
    )
    model.configure(replace(model.config, codec=codec))


def config_of(snapshot: CheckpointContent) -> BrokerConfig:
    """A configuration that reads any history: records bring their policy and their codec.

    Gaps are counted and reported, so that a reader of a run need not decide anything.
    """
    config = BrokerConfig()
    fragments = replace(config.fragments, count=snapshot.fragment_count)
    return replace(
        config, fragments=fragments, broker=replace(config.broker, journal_errors="serve")
    )


GAP = "of the journal came after one that was published and never written"
"""The gap that `journal_errors = "serve"` may leave behind, as the end of a sentence."""


def check_whole(gaps: int) -> None:
    """Raises NarrowsError if rounds are missing: the rounds after them cannot be made again."""
    if gaps:
        raise NarrowsError(
            ErrorCode.STATE_DAMAGED, f"{counted(gaps, 'round')} {GAP}: they cannot be made again",
            remedy="`narrows export` writes the newest model all the same",
        )  # fmt: skip


def needed_journal(journal: Journal | None, path: Path) -> Journal:
    """The journal. Raises ConfigError if there is none."""
    if journal is None:
        raise ConfigError(f"{path} holds no journal", remedy='was the run\'s broker.journal "off"?')
    return journal


def first_record(journal: Journal | None) -> int:
    """Number of the oldest record that is kept."""
    return journal.first if journal is not None else 1
