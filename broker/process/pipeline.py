"""A round's slow half, on one page: the only owner of payloads, model and store.

    the host calls       keep        merge        commit
    a worker             decodes     adds         writes
    the loop then calls  checked     merged       durable, which installs the version

Each of the last three tells the syncer, which decides what follows. No learner hears of a version
before it is durable. When the disk refuses a write, the loop tries it again after DISK_AGAIN_S; no
worker sleeps meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import sub
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import structs

from narrows.broker.config import BrokerConfig
from narrows.broker.merging import Alarm, Model, merge
from narrows.broker.records import Contribution, FragmentState, Recovered, Version
from narrows.broker.store import read_initial
from narrows.broker.syncer import Syncer
from narrows.broker.syncer import events as ev
from narrows.proto.codec import DecodedChunk, decode_chunk, values_of
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError, RemoteProtocolError, fault
from narrows.proto.layout import Fragment, build_table
from narrows.proto.messages import (
    LOSSLESS,
    TEXT_CHARACTERS_MAX,
    DataKind,
    DiskStatus,
    Header,
    Layout,
)
from narrows.proto.ports import Done, Pool, Store
from narrows.proto.timing import DISK_AGAIN_S

CRASH_PLACES: Final = ("merged", "appended", "durable", "installed", "published")
"""Moments in the life of a round, in their order, at which a test may end the process."""

SNAPSHOT_VERSIONS: Final = 25
"""Versions of a fragment between two snapshots. A start replays at most so many, and snapshots
write less than the payloads of two learners do."""

SNAPSHOT_AGAIN_S: Final = 60.0
"""A snapshot that the disk refused is tried again after this long. Only the next start needs it."""


@dataclass
class PushPayloads:
    """The chunks of a push that the syncer's inbox waits for or holds: bytes for the store, codes
    for the merge."""

    payloads: dict[int, bytes] = field(default_factory=dict)
    decoded: dict[int, DecodedChunk] = field(default_factory=dict)


def replay(
    config: BrokerConfig,
    store: Store[Version, FragmentState],
    recovered: Recovered,
    alarm: Alarm,
    note: Callable[[ev.Note], None],
) -> Model | None:
    """The model as the last life left it, by replay; None before version 0. Raises ConfigError for
    another number of fragments, StateError if a replay gives other bits."""
    for text in recovered.notes:
        note(ev.Note("recovered", text, {}, warning=True))
    if recovered.layout is None:
        return None
    if recovered.fragments != config.fragments.count:
        raise ConfigError(
            "fragments.count cannot change within a run",
            expected=str(recovered.fragments),
            got=str(config.fragments.count),
            remedy=f"set it to {recovered.fragments}, or begin a run in another --state-dir",
        )
    model = Model(build_table(recovered.layout.entries, recovered.fragments), recovered.states)
    for fragment, snapshot in zip(model.table, recovered.states, strict=True):
        for version in store.replay(fragment, snapshot):
            model.install(version)
            alarm.hear(version)
    note(
        ev.Note(
            "resumed",
            f"resumed run {recovered.run_id} at versions {min(model.heads)} to {max(model.heads)}, "
            f"{recovered.clock // recovered.fragments:,} tokens",
            {},
        )
    )
    return model


class Pipeline:
    """Performs Drop, MergeRound, Commit, Seed and CommitEnd, and tells the syncer what became of
    them."""

    def __init__(
        self,
        config: BrokerConfig,
        pool: Pool,
        store: Store[Version, FragmentState],
        syncer: Syncer,
        recovered: Recovered,
        model: Model | None,
        alarm: Alarm,
        *,
        reach: Callable[[str], None],
        note: Callable[[ev.Note], None],
    ) -> None:
        """`model` is the one that `replay` has made, and `alarm` has heard its versions. `reach`
        is called at each of CRASH_PLACES. `note` takes lines that people should read."""
        self._config = config
        self._settings = config.shared
        self._pool = pool
        self._store = store
        self._syncer = syncer
        self._reach = reach
        self._note = note
        self._alarm = alarm
        self.model = model
        """None until version 0 is durable."""
        self._snapshots = [state.version for state in recovered.states]
        """Version of the newest snapshot, per fragment."""
        self.pushes: dict[tuple[str, int, int], PushPayloads] = {}
        """By (incarnation, fragment, push id)."""
        self._seed: dict[tuple[int, int], bytes] = {}
        """(fragment, chunk) -> payload of version 0."""
        self._undurable: dict[int, Version] = {}
        """Merged and not durable, by fragment."""
        self._again: list[tuple[float, Callable[[], None]]] = []
        """When a write that the disk refused is tried again, and the write."""
        self._refusals: dict[str, tuple[str, float]] = {}
        """Kind of write that the disk refuses -> why, and since when."""
        self._snapshot_at = -math.inf
        """When the next snapshot may begin; inf while a worker writes one."""

    @property
    def loaded(self) -> Model:
        """The model; callers come only after version 0."""
        assert self.model is not None, "there is no version 0 yet"
        return self.model

    # -- pushes

    def keep(self, header: Header, payload: bytes) -> None:
        """Keeps a wanted chunk of version 0, or of a push, which a worker then decodes."""
        if header.kind is DataKind.SEED:
            self._seed[header.fragment, header.chunk] = payload
            return
        push = self.pushes.setdefault(_key(header), PushPayloads())
        push.payloads[header.chunk] = payload

        def work() -> DecodedChunk | None:
            # A newer push has taken its place: a learner that does this again and again must not
            # fill the queue of the workers.
            if self.pushes.get(_key(header)) is not push:
                return None
            return decode_chunk(
                self.loaded.table[header.fragment],
                header.codec,
                self._settings.chunk_elements,
                header.chunk,
                payload,
            )

        self._pool.run(work, lambda result, now: self.checked(header, push, result, now))

    def checked(self, header: Header, push: PushPayloads, result: Any, now: float) -> None:
        """A chunk decodes and is finite, or its push is refused."""
        if self.pushes.get(_key(header)) is not push:
            return  # It was dropped meanwhile.
        if isinstance(result, RemoteProtocolError):
            del self.pushes[_key(header)]
            self._syncer.push_failed(header, result, now)
            return
        push.decoded[header.chunk] = result_of(result)
        self._syncer.chunk_checked(header, now)

    def drop(self, order: ev.Drop) -> None:
        """Forgets a push that no round will take. Push id 0 stands for version 0: the one learner
        that was asked for it has failed."""
        if order.push_id == 0:
            self._seed = {
                (fragment, index): payload
                for (fragment, index), payload in self._seed.items()
                if fragment != order.fragment
            }
        self.pushes.pop((order.incarnation, order.fragment, order.push_id), None)

    # -- a round

    def merge(self, order: ev.MergeRound) -> None:
        """Puts the payloads to the pushes of a round, and has a worker merge them."""
        due = order.round_
        contributions: list[Contribution] = []
        decoded: list[list[DecodedChunk]] = []
        for contribution in due.contributions:
            push = self.pushes[contribution.incarnation, due.fragment, contribution.push_id]
            indexes = range(len(push.payloads))
            contributions.append(
                replace(contribution, chunks=tuple(push.payloads[index] for index in indexes))
            )
            decoded.append([push.decoded[index] for index in indexes])
        round_ = replace(due, contributions=tuple(contributions))
        fragment = self.loaded.table[due.fragment]
        before = self.loaded.states[due.fragment]
        self._pool.run(
            lambda: merge(fragment, before, round_, decoded),
            lambda result, now: self.merged(order, result, now),
        )

    def merged(self, order: ev.MergeRound, result: Any, now: float) -> None:
        """The next version is made. Nothing has changed yet, and no learner hears of it."""
        if isinstance(result, FloatingPointError | NarrowsError):
            self._syncer.failed(order, result, now)
            return
        due = order.round_
        self._undurable[due.fragment] = result_of(result)
        for contribution in due.contributions:
            del self.pushes[contribution.incarnation, due.fragment, contribution.push_id]
        self._reach("merged")
        self._syncer.done(order, now)

    def commit(self, order: ev.Commit) -> None:
        """Has a worker make the next version durable."""
        version = self._undurable[order.fragment]
        self._write(
            lambda: self._store.commit(version),
            lambda result, now: self.durable(order, now),
            lambda error, now: self._syncer.failed(order, error, now),
        )

    def durable(self, order: ev.Commit, now: float) -> None:
        """The next version exists."""
        version = self._undurable.pop(order.fragment)
        self.loaded.install(version)
        self._reach("installed")
        self._syncer.done(order, now)
        self._note_merge(version, now)
        is_due = version.state.version >= self._snapshots[order.fragment] + SNAPSHOT_VERSIONS
        if is_due and now >= self._snapshot_at:
            self._snapshot(version.state)

    # -- version 0 and the end

    def seed(self, order: ev.Seed) -> None:
        """Has a worker make version 0 durable, from the initial file or a learner's chunks."""
        self._write(
            lambda: self._version_0(order.layout),
            lambda result, now: self.seeded(order, result, now),
            lambda error, now: self._warn(f"version 0 cannot be written yet: {error}"),
        )

    def _version_0(self, layout: Layout) -> Model | RemoteProtocolError:
        """The durable version 0, or the refusal of its learner; on a worker. Raises DiskFull."""
        try:
            table = build_table(layout.entries, self._settings.fragments)
            if self._config.broker.init:
                states = read_initial(Path(self._config.broker.init), layout, table)
            else:
                states = [self._sent_state(fragment) for fragment in table]
            self._store.seed(layout, states)
            return Model(table, states)
        except (ConfigError, RemoteProtocolError, MemoryError) as error:
            return _refusal(error, layout)

    def _sent_state(self, fragment: Fragment) -> FragmentState:
        """Version 0 of a fragment, from a learner's chunks."""
        elements = self._settings.state_chunk_elements
        chunks = [
            decode_chunk(fragment, LOSSLESS, elements, index, self._seed[fragment.index, index])
            for index in range(fragment.chunk_count(elements))
        ]
        values = values_of(fragment, chunks)
        return FragmentState.of(fragment.index, 0, values, np.zeros_like(values), values)

    def seeded(self, order: ev.Seed, result: Model | RemoteProtocolError, now: float) -> None:
        """Version 0 is durable, or its learner is refused."""
        self._seed.clear()
        if isinstance(result, RemoteProtocolError):
            self._syncer.failed(order, result, now)
            return
        self.model = result
        self._snapshots = list(result.heads)
        self._syncer.done(order, now)

    def commit_end(self, order: ev.CommitEnd) -> None:
        """Has a worker make durable that the run has ended."""
        self._write(
            self._store.end,
            lambda result, now: self._syncer.done(order, now),
            lambda error, now: self._warn(f"the end of the run cannot be written yet: {error}"),
        )

    # -- a stop

    def close(self) -> bool:
        """Writes a snapshot of each fragment, so that the next start replays nothing. No worker
        runs any more.

        False: the disk has refused one, as the log says. Raises StateError if the state directory
        is gone.
        """
        self._store.check_folder()
        states = self.model.states if self.model is not None else []
        try:
            for state in states:
                if state.version > self._snapshots[state.fragment]:
                    self._store.snapshot(state)
        except OSError as error:
            self._warn(f"the next start replays some rounds: {error}")
            return False
        return True

    # -- time, and what is served

    def turn(self, now: float) -> None:
        """Tries the writes again that a full disk refused."""
        due = [write for at, write in self._again if now >= at]
        self._again = [(at, write) for at, write in self._again if now < at]
        for write in due:
            write()

    def deadline(self) -> float:
        """When `turn` has something to do."""
        return min((at for at, _ in self._again), default=math.inf)

    def publication(self, fragment: int, version: int) -> Version | None:
        """One of the last publications of a fragment; None if it is no longer kept, or was made
        before a restart that changed the size of chunks."""
        found = self.loaded.publication(fragment, version)
        if found and found.round_.policy.chunk_elements != self._settings.chunk_elements:
            return None
        return found

    def head(self, fragment: int) -> tuple[FragmentState, dict[str, int]]:
        """The newest durable state of a fragment, and the newest push of each incarnation in it."""
        return self.loaded.states[fragment], dict(self._syncer.state.rounds[fragment].merged)

    def disk(self, now: float) -> DiskStatus:
        """The state directory, for a Status."""
        heads = self.model.heads if self.model is not None else ()
        error, error_at = self._refusals.get("version", ("", now))
        snapshot_error, snapshot_error_at = self._refusals.get("snapshot", ("", now))
        return structs.replace(
            self._store.figures(),
            versions_since_snapshot=max(map(sub, heads, self._snapshots), default=0),
            error=error,
            error_s=now - error_at,
            snapshot_error=snapshot_error,
            snapshot_error_s=now - snapshot_error_at,
        )

    # -- details

    def _heed(self, kind: str, result: Any, now: float) -> None:
        """Remembers that the disk has refused a write of this kind, or that it has taken one."""
        _, since = self._refusals.pop(kind, ("", now))
        if isinstance(result, OSError):
            text = str(result) or type(result).__name__
            self._refusals[kind] = (text[:TEXT_CHARACTERS_MAX], since)

    def _note_merge(self, version: Version, now: float) -> None:
        """Writes the round to the events file, and warns of a push that is far too long."""
        round_ = version.round_
        state = version.state
        syncer = self._syncer.state
        self._note(
            ev.Note(
                "merged",
                f"fragment {state.fragment}: {state.version}",
                {
                    "fragment": state.fragment,
                    "version": state.version,
                    "digest": f"{state.digests.published:016x}",
                    "reason": round_.reason,
                    "contributors": [each.learner for each in round_.contributions],
                    "tokens": sum(each.tokens for each in round_.contributions),
                    "live": sorted(each.name for each in syncer.members.awaited(now)),
                    "run_tokens": syncer.clock.run_tokens,
                    "elements": self.loaded.table[state.fragment].elements,
                    "pushed_bytes": sum(
                        len(c) for each in round_.contributions for c in each.chunks
                    ),
                    "published_bytes": sum(len(each.payload) for each in version.publication),
                },
            )
        )
        for line in self._alarm.hear(version):
            self._note(ev.Note("alarm", line, {"fragment": state.fragment}, warning=True))

    def _snapshot(self, state: FragmentState) -> None:
        """Has a worker write a whole state, one at a time, so that the other goes on decoding."""

        def done(result: Any, now: float) -> None:
            self._snapshot_at = now
            self._heed("snapshot", result, now)
            if isinstance(result, OSError):
                # Not at the next version: each try writes a whole state onto a full disk.
                self._snapshot_at = now + SNAPSHOT_AGAIN_S
                self._warn(f"no snapshot of fragment {state.fragment}: {result}")
                return
            result_of(result)
            self._snapshots[state.fragment] = state.version

        self._snapshot_at = math.inf
        self._pool.run(lambda: self._store.snapshot(state), done)

    def _write(
        self, work: Callable[[], Any], done: Done, failed: Callable[[OSError, float], None]
    ) -> None:
        """Has a worker write, again and again while the disk refuses; then calls `done`."""

        def finish(result: Any, now: float) -> None:
            self._heed("version", result, now)
            if isinstance(result, OSError):
                self._again.append((now + DISK_AGAIN_S, lambda: self._pool.run(work, finish)))
                failed(result, now)
            elif isinstance(result, RemoteProtocolError):
                done(result, now)  # The refusal of a learner is a result, too.
            else:
                done(result_of(result), now)

        self._pool.run(work, finish)

    def _warn(self, text: str) -> None:
        self._note(ev.Note("disk", text, {}, warning=True))


def _key(header: Header) -> tuple[str, int, int]:
    return header.incarnation, header.fragment, header.push_id


def _refusal(
    error: ConfigError | RemoteProtocolError | MemoryError, layout: Layout
) -> RemoteProtocolError:
    """The refusal of a learner, when its chunks cannot become version 0."""
    if isinstance(error, MemoryError):
        return fault(
            "the model does not fit into the broker's memory",
            expected="about 20 bytes of memory for each parameter",
            got=f"{sum(math.prod(each.shape) for each in layout.entries)} parameters",
            remedy="run the broker on a larger machine, or train a smaller model",
            code=ErrorCode.TOO_LARGE,
        )
    if error.code is ErrorCode.NOT_FINITE:  # Asked again, its learner would send the same.
        return fault(
            "version 0",
            expected=error.expected,
            got=error.got,
            remedy="start it with parameters that are finite",
            code=ErrorCode.NOT_FINITE_SEED,
        )
    code = error.code
    if code is ErrorCode.CONFIG:  # It fits neither the settings nor the initial file.
        code = ErrorCode.LAYOUT_DIFFERS
    return fault(
        error.message, expected=error.expected, got=error.got, remedy=error.remedy, code=code
    )


def result_of(result: Any) -> Any:
    """The result of a worker. An error that nobody expects ends the process, loudly."""
    if isinstance(result, BaseException):
        raise result
    return result
