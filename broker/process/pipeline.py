"""A round's slow half, on one page: the only owner of payloads, model and store.

    keep -> checked -> merge -> merged -> commit -> durable: install, publish

Workers decode, merge and write; the loop hears of each and tells the syncer. So a version that is
merged and not durable has a name, it is in flight, and nobody but this file can know it. A full
disk is a time at which the loop tries again, not a worker asleep.
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
from narrows.broker.rounds import Contribution, FragmentState, Round, Version
from narrows.broker.store import Recovered, Store, read_initial
from narrows.broker.syncer import Syncer
from narrows.broker.syncer import events as ev
from narrows.proto.codec import DecodedChunk, decode_chunk, values_of
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.layout import Fragment, build_table
from narrows.proto.messages import LEARNERS_MAX, LOSSLESS, CodecName, Header, Layout
from narrows.proto.ports import Pool
from narrows.proto.timing import DISK_AGAIN_S

SNAPSHOT_VERSIONS: Final = 25
"""Versions of a fragment between two snapshots. A start replays at most so many, and snapshots
write less than the payloads of two learners do."""


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
        store: Store,
        reach: Callable[[str], None],
        note: Callable[[ev.Note], None],
    ) -> None:
        """`reach` is called with each of log.CRASH_PLACES, `note` with what people should read."""
        self._config, self._settings = config, config.shared
        self._pool, self._store, self._reach, self._note = pool, store, reach, note
        self._alarm = Alarm()
        self.model: Model | None = None
        """None until version 0 is durable."""
        self._merged: list[dict[str, int]] = []
        """Per fragment: incarnation -> newest push id that the head holds, newest last."""
        self._pushes: dict[tuple[str, int, int], _Push] = {}
        self._seed: dict[tuple[int, int], bytes] = {}
        """(fragment, chunk) -> payload of version 0."""
        self._flights: dict[int, Version] = {}
        """Merged and not durable, by fragment."""
        self._again: list[tuple[float, Callable[[], None]]] = []
        """Work that a full disk refused, and when it is tried again."""
        self._snapshots: list[int] = []
        """Version of the newest snapshot, per fragment."""
        self._snapshotting = False

    @property
    def _there(self) -> Model:
        """The model, where nothing is asked before version 0."""
        assert self.model is not None, "there is no version 0 yet"
        return self.model

    # -- pushes

    def keep(self, header: Header, payload: bytes, now: float) -> None:
        """Keeps a wanted chunk, and has a worker decode it."""
        push = self._pushes.setdefault(_key(header), _Push(header.codec))
        if header.codec != push.codec:
            error = RemoteProtocolError(
                ErrorCode.BAD_CHUNK, "codec", expected=push.codec, got=header.codec
            )
            self.checked(header, push, error, now)
            return
        push.payloads[header.chunk] = payload
        fragment, elements = self._there.table[header.fragment], self._settings.chunk_elements

        def work() -> DecodedChunk | None:
            # Who displaces his own push again and again must not fill the queue of the workers.
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
        push.decoded[header.chunk] = _result(result)
        self.syncer.chunk_checked(header, now)

    def drop(self, order: ev.Drop) -> None:
        """Forgets a push that no round will take; push 0 is version 0 of a learner that failed."""
        if order.push_id == 0:
            self._seed = {k: each for k, each in self._seed.items() if k[0] != order.fragment}
        self._pushes.pop((order.incarnation, order.fragment, order.push_id), None)

    # -- a round

    def merge(self, order: ev.Merge) -> None:
        """Takes the pushes of a round, and has a worker merge them."""
        contributions: list[Contribution] = []
        decoded: list[list[DecodedChunk]] = []
        for facts in order.pushes:
            push = self._pushes.pop((facts.incarnation, order.fragment, facts.push_id))
            order_of_chunks = range(len(push.payloads))
            chunks = tuple(push.payloads[i] for i in order_of_chunks)
            elements = self._settings.chunk_elements
            contributions.append(Contribution(*facts, push.codec, elements, chunks))
            decoded.append([push.decoded[i] for i in order_of_chunks])
        policy, period_s = self._config.policy, order.period_s
        round_ = Round(
            order.fragment, order.version, tuple(contributions), policy, period_s, order.reason
        )
        fragment, before = self._there.table[order.fragment], self._there.states[order.fragment]
        self._pool.run(
            lambda: merge(fragment, before, round_, decoded),
            lambda result, now: self.merged(order.fragment, result, now),
        )

    def merged(self, fragment: int, result: Any, now: float) -> None:
        """The next version is made. Nothing has changed yet, and nobody may know it."""
        if isinstance(result, FloatingPointError | NarrowsError):
            self.syncer.merge_failed(fragment, result, now)
            return
        self._flights[fragment] = _result(result)
        self._reach("merged")
        self.syncer.merged(fragment, now)

    def commit(self, fragment: int) -> None:
        """Has a worker make the next version durable."""
        version = self._flights[fragment]
        self._pool.run(
            lambda: self._store.commit(version),
            lambda result, now: self.durable(version, result, now),
        )

    def durable(self, version: Version, result: Any, now: float) -> None:
        """The next version exists. Or the disk is full: that holds publishing back, no more."""
        fragment = version.state.fragment
        if isinstance(result, OSError):
            self._again.append((now + DISK_AGAIN_S, lambda: self.commit(fragment)))
            self.syncer.disk_failed(fragment, result, now)
            return
        _result(result)
        del self._flights[fragment]
        self._there.install(version)
        self._remember(version)
        self._reach("installed")
        self.syncer.durable(fragment, now)
        self._tell(version, now)
        if version.state.version >= self._snapshots[fragment] + SNAPSHOT_VERSIONS:
            self._snapshot(version.state)

    # -- version 0 and the end

    def keep_seed(self, header: Header, payload: bytes) -> None:
        """Keeps a wanted chunk of version 0."""
        self._seed[header.fragment, header.chunk] = payload

    def seed(self, order: ev.Seed) -> None:
        """Has a worker make version 0 durable, from the initial file or a learner's chunks."""
        self._pool.run(
            lambda: self._version_0(order.layout),
            lambda result, now: self.seeded(order, result, now),
        )

    def _version_0(self, layout: Layout) -> Model:
        """On a worker. Raises ConfigError, RemoteProtocolError, DiskFull or MemoryError."""
        table = build_table(layout.entries, self._settings.fragments)
        elements = self._settings.state_chunk_elements
        states: list[FragmentState] = []
        if self._config.broker.init:
            states = read_initial(Path(self._config.broker.init), layout, table)
        else:
            for f in table:
                payloads = [self._seed[f.index, i] for i in range(f.chunk_count(elements))]
                chunks = [
                    decode_chunk(f, LOSSLESS, elements, i, each) for i, each in enumerate(payloads)
                ]
                values = values_of(f, chunks)
                states.append(FragmentState.of(f.index, 0, values, np.zeros_like(values), values))
        self._store.seed(layout, states)
        return Model(table, states)

    def seeded(self, order: ev.Seed, result: Any, now: float) -> None:
        """Version 0 is durable, or its learner is refused."""
        if isinstance(result, OSError):
            self._wait_for_disk("version 0", result, now, lambda: self.seed(order))
            return
        self._seed.clear()
        if isinstance(result, ConfigError):  # It fits neither the settings nor the initial file.
            result = RemoteProtocolError(
                ErrorCode.LAYOUT_DIFFERS,
                result.message,
                expected=result.expected,
                got=result.got,
                remedy=result.remedy,
            )
        if isinstance(result, MemoryError):
            elements = sum(each.elements for each in build_table(order.layout.entries, 1))
            result = RemoteProtocolError(
                ErrorCode.TOO_LARGE,
                "the model does not fit into the broker's memory",
                expected="about 20 bytes of memory for each parameter",
                got=f"{elements} parameters",
                remedy="run the broker on a larger machine, or train a smaller model",
            )
        if isinstance(result, RemoteProtocolError):
            if result.code is ErrorCode.NOT_FINITE:  # Asked again, its learner would send the same.
                result = RemoteProtocolError(
                    ErrorCode.NOT_FINITE_SEED,
                    "version 0",
                    expected=result.expected,
                    got=result.got,
                    remedy="start it with parameters that are finite",
                )
            self.syncer.seed_failed(result, now)
            return
        self._begin(_result(result))
        self.syncer.seeded(now)

    def commit_end(self) -> None:
        """Has a worker make durable that the run has ended."""
        self._pool.run(self._store.end, self.ended)

    def ended(self, result: Any, now: float) -> None:
        """The end of the run is durable."""
        if isinstance(result, OSError):
            self._wait_for_disk("the end of the run", result, now, self.commit_end)
            return
        _result(result)
        self.syncer.ended(now)

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
        self._begin(Model(table, recovered.states))
        for (incarnation, fragment), push_id in recovered.merged.items():
            self._merged[fragment][incarnation] = push_id
        for state, each in zip(recovered.states, table, strict=True):
            for version in self._store.replay(each, state):
                self._there.install(version)
                self._alarm.hear(version)
        return ev.Resumed(
            recovered.layout,
            self._there.heads,
            recovered.clock,
            dict(recovered.merged),
            recovered.period_s,
            recovered.phase,
            dict(recovered.merged_tokens),
        )

    def close(self) -> None:
        """Writes what a start would have to replay. No worker runs any more."""
        for state in self.model.states if self.model is not None else ():
            if state.version > self._snapshots[state.fragment]:
                try:
                    self._store.snapshot(state)
                except OSError as error:
                    text = f"the next start replays some rounds: {error}"
                    self._note(ev.Note("disk", text, {}, warning=True))
                    return

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

    def fragment(self, index: int) -> Fragment:
        return self._there.table[index]

    def publication(self, fragment: int, version: int) -> Version | None:
        """One of the last publications of a fragment; None if it is not kept, or was cut into the
        chunks of an earlier life."""
        found = self._there.publication(fragment, version)
        elements = self._settings.chunk_elements
        return found if found and found.round_.policy.chunk_elements == elements else None

    def head(self, fragment: int) -> tuple[FragmentState, dict[str, int]]:
        """The newest durable state of a fragment, and the newest push of each incarnation in it."""
        return self._there.states[fragment], dict(self._merged[fragment])

    # -- details

    def _begin(self, model: Model) -> None:
        self.model, self._merged = model, [{} for _ in model.table]
        self._snapshots = list(model.heads)

    def _remember(self, version: Version) -> None:
        """Whose pushes the head holds now, for those who fetch it."""
        merged = self._merged[version.state.fragment]
        for each in version.round_.contributions:
            merged.pop(each.incarnation, None)
            merged[each.incarnation] = each.push_id
        while len(merged) > LEARNERS_MAX:
            del merged[next(iter(merged))]

    def _tell(self, version: Version, now: float) -> None:
        round_, state = version.round_, version.state
        fields: dict[str, object] = {
            "fragment": state.fragment,
            "version": state.version,
            "digest": f"{state.digests.published:016x}",
            "contributors": [each.learner for each in round_.contributions],
            "tokens": sum(each.tokens for each in round_.contributions),
            "live": self.syncer.live(now),
            "run_tokens": self.syncer.run_tokens,
            "reason": round_.reason,
            "elements": self.fragment(state.fragment).elements,
            "pushed_bytes": sum(len(c) for each in round_.contributions for c in each.chunks),
            "published_bytes": sum(len(each.payload) for each in version.publication),
        }
        self._note(ev.Note("merged", f"fragment {state.fragment}: {state.version}", fields))
        for line in self._alarm.hear(version):
            self._note(ev.Note("alarm", line, {"fragment": state.fragment}, warning=True))

    def _snapshot(self, state: FragmentState) -> None:
        """Has a worker write a whole state, unless one is being written: decoding must go on."""

        def done(result: Any, now: float) -> None:
            self._snapshotting = False
            if isinstance(result, OSError):  # The next version tries again.
                text = f"no snapshot of fragment {state.fragment}: {result}"
                self._note(ev.Note("disk", text, {}, warning=True))
                return
            _result(result)
            self._snapshots[state.fragment] = state.version

        if not self._snapshotting:
            self._snapshotting = True
            self._pool.run(lambda: self._store.snapshot(state), done)

    def _wait_for_disk(
        self, what: str, error: OSError, now: float, work: Callable[[], None]
    ) -> None:
        self._again.append((now + DISK_AGAIN_S, work))
        self._note(ev.Note("disk", f"{what} cannot be written yet: {error}", {}, warning=True))


def _key(header: Header) -> tuple[str, int, int]:
    return header.learner, header.fragment, header.push_id


def _result(result: Any) -> Any:
    """The result of a worker. An error that nobody expects ends the process, loudly."""
    if isinstance(result, BaseException):
        raise result
    return result
