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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from narrows.broker.config import BrokerConfig
from narrows.broker.merging import Alarm, Model, merge
from narrows.broker.records import Contribution, FragmentState, Round, Version
from narrows.broker.store import Recovered, read_initial
from narrows.broker.syncer import Syncer
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.state import fault
from narrows.proto.codec import DecodedChunk, decode_chunk, values_of
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.layout import build_table
from narrows.proto.messages import LOSSLESS, CodecName, Header, Layout
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
class _Push:
    """A push that is here or on its way: bytes for the store, codes for the merge."""

    codec: CodecName
    payloads: dict[int, bytes] = field(default_factory=dict)
    decoded: dict[int, DecodedChunk] = field(default_factory=dict)


class Pipeline:
    """Performs Drop, Merge, Commit, Seed and CommitEnd, and tells the syncer what became of it."""

    syncer: Syncer
    """The host sets it, once `resume` has said what it goes on from."""

    def __init__(
        self,
        config: BrokerConfig,
        pool: Pool,
        store: Store[Version, FragmentState],
        reach: Callable[[str], None],
        note: Callable[[ev.Note], None],
    ) -> None:
        """`reach` is called at each of CRASH_PLACES. `note` takes what people should read."""
        self._config, self._settings = config, config.shared
        self._pool, self._store, self._reach, self._note = pool, store, reach, note
        self._alarm = Alarm()
        self.model: Model | None = None
        """None until version 0 is durable."""
        self._pushes: dict[tuple[str, int, int], _Push] = {}
        self._seed: dict[tuple[int, int], bytes] = {}
        """(fragment, chunk) -> payload of version 0."""
        self._undurable: dict[int, Version] = {}
        """Merged and not durable, by fragment."""
        self._again: list[tuple[float, Callable[[], None]]] = []
        """When a write that the disk refused is tried again, and the write."""
        self._snapshots: list[int] = []
        """Version of the newest snapshot, per fragment."""
        self._snapshotting = False
        self._snapshot_at = -math.inf
        """When a snapshot may be made again, after one that the disk refused."""

    @property
    def loaded(self) -> Model:
        """The model; callers come only after version 0."""
        assert self.model is not None, "there is no version 0 yet"
        return self.model

    # -- pushes

    def keep(self, header: Header, payload: bytes, now: float) -> None:
        """Keeps a wanted chunk, and has a worker decode it."""
        push = self._pushes.setdefault(_key(header), _Push(header.codec))
        if header.codec != push.codec:
            remedy = "code all chunks of a push alike"
            error = fault("codec", push.codec, header.codec, remedy, ErrorCode.BAD_CHUNK)
            self.checked(header, push, error, now)
            return
        push.payloads[header.chunk] = payload
        fragment, elements = self.loaded.table[header.fragment], self._settings.chunk_elements

        def work() -> DecodedChunk | None:
            # A newer push has taken its place: a learner that does this again and again must not
            # fill the queue of the workers.
            if self._pushes.get(_key(header)) is not push:
                return None
            return decode_chunk(fragment, header.codec, elements, header.chunk, payload)

        self._pool.run(work, lambda result, now: self.checked(header, push, result, now))

    def checked(self, header: Header, push: _Push, result: Any, now: float) -> None:
        """A chunk decodes and is finite, or its push is refused."""
        if self._pushes.get(_key(header)) is not push:
            return  # It was dropped meanwhile.
        if isinstance(result, RemoteProtocolError):
            del self._pushes[_key(header)]
            self.syncer.push_failed(header, result, now)
            return
        push.decoded[header.chunk] = result_of(result)
        self.syncer.chunk_checked(header, now)

    def drop(self, order: ev.Drop) -> None:
        """Forgets a push that no round will take. Push id 0 stands for version 0: the one learner
        that was asked for it has failed."""
        if order.push_id == 0:
            self._seed = {k: each for k, each in self._seed.items() if k[0] != order.fragment}
        self._pushes.pop((order.incarnation, order.fragment, order.push_id), None)

    # -- a round

    def merge(self, order: ev.Merge) -> None:
        """Takes the pushes of a round, and has a worker merge them."""
        index, elements = order.fragment, self._settings.chunk_elements
        contributions: list[Contribution] = []
        decoded: list[list[DecodedChunk]] = []
        for facts in order.pushes:
            push = self._pushes.pop((facts.incarnation, index, facts.push_id))
            chunks = tuple(push.payloads[i] for i in range(len(push.payloads)))
            contributions.append(Contribution(*facts, push.codec, elements, chunks))
            decoded.append([push.decoded[i] for i in range(len(chunks))])
        policy, why = self._config.policy, order.reason
        round_ = Round(index, order.version, tuple(contributions), policy, order.period_s, why)
        fragment, before = self.loaded.table[index], self.loaded.states[index]
        self._pool.run(
            lambda: merge(fragment, before, round_, decoded),
            lambda result, now: self.merged(index, result, now),
        )

    def merged(self, fragment: int, result: Any, now: float) -> None:
        """The next version is made. Nothing has changed yet, and no learner hears of it."""
        if isinstance(result, FloatingPointError | NarrowsError):
            self.syncer.merge_failed(fragment, result, now)
            return
        self._undurable[fragment] = result_of(result)
        self._reach("merged")
        self.syncer.merged(fragment, now)

    def commit(self, fragment: int) -> None:
        """Has a worker make the next version durable."""
        version = self._undurable[fragment]
        self._write(
            lambda: self._store.commit(version),
            lambda result, now: self.durable(version, result, now),
            lambda error, now: self.syncer.disk_failed(fragment, error, now),
        )

    def durable(self, version: Version, result: Any, now: float) -> None:
        """The next version exists."""
        fragment = version.state.fragment
        del self._undurable[fragment]
        self.loaded.install(version)
        self._reach("installed")
        self.syncer.durable(fragment, now)
        self._note_merge(version, now)
        is_due = version.state.version >= self._snapshots[fragment] + SNAPSHOT_VERSIONS
        if is_due and now >= self._snapshot_at:
            self._snapshot(version.state)

    # -- version 0 and the end

    def keep_seed(self, header: Header, payload: bytes) -> None:
        """Keeps a wanted chunk of version 0."""
        self._seed[header.fragment, header.chunk] = payload

    def seed(self, order: ev.Seed) -> None:
        """Has a worker make version 0 durable, from the initial file or a learner's chunks."""

        def work() -> Model | RemoteProtocolError:
            try:
                return self._version_0(order.layout)
            except (ConfigError, RemoteProtocolError, MemoryError) as error:
                return _refusal(error, order.layout)

        self._write(work, self.seeded, self._warn_about("version 0"))

    def _version_0(self, layout: Layout) -> Model:
        """On a worker. Raises ConfigError, RemoteProtocolError, DiskFull or MemoryError."""
        table = build_table(layout.entries, self._settings.fragments)
        elements = self._settings.state_chunk_elements
        states: list[FragmentState] = []
        if self._config.broker.init:
            states = read_initial(Path(self._config.broker.init), layout, table)
        else:
            for f in table:
                chunks = [
                    decode_chunk(f, LOSSLESS, elements, i, self._seed[f.index, i])
                    for i in range(f.chunk_count(elements))
                ]
                values = values_of(f, chunks)
                states.append(FragmentState.of(f.index, 0, values, np.zeros_like(values), values))
        self._store.seed(layout, states)
        return Model(table, states)

    def seeded(self, result: Model | RemoteProtocolError, now: float) -> None:
        """Version 0 is durable, or its learner is refused."""
        self._seed.clear()
        if isinstance(result, RemoteProtocolError):
            self.syncer.seed_failed(result, now)
            return
        self.model, self._snapshots = result, list(result.heads)
        self.syncer.seeded(now)

    def commit_end(self) -> None:
        """Has a worker make durable that the run has ended."""
        failed = self._warn_about("the end of the run")
        self._write(self._store.end, lambda _, now: self.syncer.ended(now), failed)

    # -- a start, and a stop

    def resume(self, recovered: Recovered) -> ev.Resumed | None:
        """Replays what the last life left; None before version 0. Raises ConfigError for another
        number of fragments, StateError if a replay gives other bits."""
        for text in recovered.notes:
            self._note(ev.Note("recovered", text, {}, warning=True))
        if recovered.layout is None:
            return None
        if recovered.fragments != self._settings.fragments:
            raise ConfigError(
                "fragments.count cannot change within a run",
                expected=str(recovered.fragments),
                got=str(self._settings.fragments),
                remedy=f"set it to {recovered.fragments}, or begin a run in another --state-dir",
            )
        table = build_table(recovered.layout.entries, recovered.fragments)
        self.model = model = Model(table, recovered.states)
        self._snapshots = list(model.heads)
        for state, each in zip(recovered.states, table, strict=True):
            for version in self._store.replay(each, state):
                model.install(version)
                self._alarm.hear(version)
        tokens = recovered.clock // len(table)
        text = f"resumed run {recovered.run_id} at versions {min(model.heads)} to "
        text += f"{max(model.heads)}, {tokens:,} tokens"
        self._note(ev.Note("resumed", text, {}))
        return ev.Resumed(
            recovered.layout, model.heads, recovered.clock, dict(recovered.merged),
            recovered.period_s, recovered.phase, dict(recovered.merged_tokens),
        )  # fmt: skip

    def close(self) -> bool:
        """Writes what a start would have to replay. No worker runs any more.

        False: a disk has refused that, as a line has said. Raises StateError if the state directory
        is gone.
        """
        self._store.check_folder()
        for state in self.model.states if self.model is not None else ():
            if state.version > self._snapshots[state.fragment]:
                try:
                    self._store.snapshot(state)
                except OSError as error:
                    self._warn(f"the next start replays some rounds: {error}")
                    return False
        return True

    # -- time, and what is served

    def turn(self, now: float) -> None:
        """Tries again what a full disk refused."""
        due = [work for at, work in self._again if now >= at]
        self._again = [each for each in self._again if now < each[0]]
        for work in due:
            work()

    def deadline(self) -> float:
        """When `turn` has something to do."""
        return min((at for at, _ in self._again), default=math.inf)

    @property
    def held_pushes(self) -> set[tuple[str, int, int]]:
        """(incarnation, fragment, push id) of the pushes whose payloads wait for a round."""
        return set(self._pushes)

    def publication(self, fragment: int, version: int) -> Version | None:
        """One of the last publications of a fragment; None if it is no longer kept, or was made
        before a restart that changed the size of chunks."""
        found = self.loaded.publication(fragment, version)
        elements = self._settings.chunk_elements
        return found if found and found.round_.policy.chunk_elements == elements else None

    def head(self, fragment: int) -> tuple[FragmentState, dict[str, int]]:
        """The newest durable state of a fragment, and the newest push of each incarnation in it."""
        return self.loaded.states[fragment], dict(self.syncer.state.rounds[fragment].merged)

    # -- details

    def _note_merge(self, version: Version, now: float) -> None:
        round_, state = version.round_, version.state
        fields: dict[str, object] = {
            "fragment": state.fragment, "version": state.version,
            "digest": f"{state.digests.published:016x}", "reason": round_.reason,
            "contributors": [each.learner for each in round_.contributions],
            "tokens": sum(each.tokens for each in round_.contributions),
            "live": self.syncer.live(now), "run_tokens": self.syncer.run_tokens,
            "elements": self.loaded.table[state.fragment].elements,
            "pushed_bytes": sum(len(c) for each in round_.contributions for c in each.chunks),
            "published_bytes": sum(len(each.payload) for each in version.publication),
        }  # fmt: skip
        self._note(ev.Note("merged", f"fragment {state.fragment}: {state.version}", fields))
        for line in self._alarm.hear(version):
            self._note(ev.Note("alarm", line, {"fragment": state.fragment}, warning=True))

    def _snapshot(self, state: FragmentState) -> None:
        """Has a worker write a whole state, one at a time, so that the other goes on decoding."""

        def done(result: Any, now: float) -> None:
            self._snapshotting = False
            if isinstance(result, OSError):
                # Not at the next version: each try writes a whole state onto a full disk.
                self._snapshot_at = now + SNAPSHOT_AGAIN_S
                self._warn(f"no snapshot of fragment {state.fragment}: {result}")
                return
            result_of(result)
            self._snapshots[state.fragment] = state.version

        if not self._snapshotting:
            self._snapshotting = True
            self._pool.run(lambda: self._store.snapshot(state), done)

    def _write(
        self, work: Callable[[], Any], done: Done, failed: Callable[[OSError, float], None]
    ) -> None:
        """Has a worker write, again and again while the disk refuses; then calls `done`."""

        def finish(result: Any, now: float) -> None:
            if isinstance(result, OSError):
                again = now + DISK_AGAIN_S
                self._again.append((again, lambda: self._pool.run(work, finish)))
                failed(result, now)
            else:
                # A refusal of a learner is a result, too.
                is_refusal = isinstance(result, RemoteProtocolError)
                done(result if is_refusal else result_of(result), now)

        self._pool.run(work, finish)

    def _warn_about(self, what: str) -> Callable[[OSError, float], None]:
        return lambda error, now: self._warn(f"{what} cannot be written yet: {error}")

    def _warn(self, text: str) -> None:
        self._note(ev.Note("disk", text, {}, warning=True))


def _key(header: Header) -> tuple[str, int, int]:
    return header.incarnation, header.fragment, header.push_id


def _refusal(
    error: ConfigError | RemoteProtocolError | MemoryError, layout: Layout
) -> RemoteProtocolError:
    """The refusal of a learner of whose chunks version 0 cannot be made."""
    if isinstance(error, MemoryError):
        return fault(
            "the model does not fit into the broker's memory",
            "about 20 bytes of memory for each parameter",
            f"{sum(math.prod(each.shape) for each in layout.entries)} parameters",
            "run the broker on a larger machine, or train a smaller model", ErrorCode.TOO_LARGE,
        )  # fmt: skip
    code, what, remedy = error.code, error.message, error.remedy
    if code is ErrorCode.CONFIG:  # It fits neither the settings nor the initial file.
        code = ErrorCode.LAYOUT_DIFFERS
    elif code is ErrorCode.NOT_FINITE:  # Asked again, its learner would send the same.
        code, what = ErrorCode.NOT_FINITE_SEED, "version 0"
        remedy = "start it with parameters that are finite"
    return fault(what, error.expected, error.got, remedy, code)


def result_of(result: Any) -> Any:
    """The result of a worker. An error that nobody expects ends the process, loudly."""
    if isinstance(result, BaseException):
        raise result
    return result
