"""The broker's slow work: decode, merge, encode, disk, on a small pool. No decisions.

Each job ends by handing an event to the loop's thread through `post`; jobs never touch sockets
or the syncer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from narrows.broker.config import BrokerConfig
from narrows.broker.merging import (
    EncodedVersion,
    GlobalModel,
    Outcome,
    encode_state,
    from_chunks,
    policy_of,
    warm_up,
)
from narrows.broker.storage import (
    Begun,
    CheckpointContent,
    Chunk,
    Commits,
    MergedPush,
    StateDir,
    read_initial,
)
from narrows.broker.syncer import RunState
from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.codec import STATE_CODEC, DecodedChunk, decode_chunk
from narrows.proto.errors import NarrowsError, RemoteProtocolError
from narrows.proto.flow import chunk_elements
from narrows.proto.shell import guarded

_log = logging.getLogger("narrows.broker")

POOL_THREADS = 2
"""Threads for decode, merge and encode. These release the interpreter lock, so two threads use two
cores."""


class Jobs:
    """Holds payloads, decoded chunks and the global model, and works on them in threads."""

    def __init__(
        self,
        config: BrokerConfig,
        run: RunState,
        state_dir: StateDir,
        post: Callable[[Callable[[], ev.Event | None]], None],
        commits: Commits | None,
        begun: Begun,
        *,
        reach: Callable[[str], None],
    ) -> None:
        """`begun` gives the model that was recovered, and the newest record that it holds.
        `reach` is called with each place of crash_points.NAMES."""
        self._reach = reach
        self._journaled = begun.journaled
        self._commits = commits
        self._keeps_payloads = commits is not None and config.broker.journal == "full"
        self._config, self._run, self._state_dir, self._post = config, run, state_dir, post
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="narrows-broker")
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="narrows-disk")
        self._payloads: dict[int, bytes] = {}
        self._chunks: dict[int, tuple[int, DecodedChunk]] = {}
        self._handle = 0
        self._submit(self._pool, warm_up)
        self.model = begun.model
        """Only this object replaces it; None until version 0 stands."""

    @property
    def held(self) -> int:
        """Payloads and decoded chunks in memory."""
        return len(self._payloads.keys() | self._chunks.keys())

    def keep(self, payload: bytes) -> int:
        """Holds a payload; returns its handle."""
        self._handle += 1
        self._payloads[self._handle] = payload
        return self._handle

    def drop(self, handles: tuple[int, ...]) -> None:
        for handle in handles:
            self._payloads.pop(handle, None)
            self._chunks.pop(handle, None)

    def unpack(self, header: msg.Header, handle: int) -> None:
        """Decodes and checks a payload."""
        payload = self._payloads[handle]
        if not self._keeps_payloads or header.kind is not msg.DataKind.PUSH:
            del self._payloads[handle]
        fragment = self._run.table[header.fragment]

        def work() -> None:
            try:
                chunk = decode_chunk(fragment, header.codec, header.offset, header.count, payload)
            except RemoteProtocolError as error:
                damaged = ev.ChunkDamaged(header, handle, error.code, error.message)
                self._post(lambda: damaged)
                return

            def unpacked() -> ev.Event:
                self._chunks[handle] = (header.offset, chunk)
                self._reach("unpacked")
                return ev.ChunkUnpacked(header, handle)

            self._post(unpacked)

        self._submit(self._pool, work)

    def found(self, effect: ev.Found) -> None:
        """Makes version 0 from the founder's chunks or from the initial file."""
        table, handles = self._run.table, effect.handles
        chunks = {h: self._chunks[h] for fragment in handles or () for h in fragment}

        def work() -> None:
            try:
                if handles is None:
                    fragments = read_initial(Path(self._config.broker.init), effect.layout, table)
                else:
                    fragments = from_chunks(table, handles, chunks)
            except (NarrowsError, OSError, ValueError) as error:
                failed = ev.FoundingFailed(str(error))
                self._post(lambda: failed)
                return

            def founded() -> ev.Event:
                self.model = GlobalModel(self._config, table, fragments)
                self.model.follow(self._run.settings)
                self.drop(tuple(chunks))
                return ev.Founded(tuple(state.digest for state in fragments))

            self._post(founded)

        self._submit(self._pool, work)

    def merge(self, effect: ev.StartMerge, installed: Callable[[Outcome], None]) -> None:
        """Merges contributions; `installed` gets the outcome before the syncer hears of it."""
        model = self.model
        assert model is not None
        chunks = {h: self._chunks[h] for c in effect.contributions for h in c.handles}
        policy = policy_of(self._config, organisations=effect.organisations)

        def work() -> None:
            try:
                outcome = model.merge(
                    effect.fragment, effect.version, effect.contributions, chunks, policy
                )
            except (FloatingPointError, NarrowsError) as error:
                failed = ev.MergeFailed(effect.fragment, str(error))
                self._post(lambda: finish(failed, None))
                return
            state = outcome.state
            merged = ev.Merged(effect.fragment, state.version, state.digest, outcome.merged.clipped)
            self._post(lambda: commit(merged, outcome))

        def commit(event: ev.Merged, outcome: Outcome) -> ev.Event | None:
            if self._commits is None:
                return finish(event, outcome)
            travelled = self._travelled(effect, chunks) if self._keeps_payloads else []
            self._commits.commit(effect, outcome, travelled, lambda: finish(event, outcome))
            return None

        def finish(event: ev.Event, outcome: Outcome | None) -> ev.Event:
            self.drop(tuple(chunks))
            if outcome is not None:
                model.install(outcome)
                installed(outcome)
                self._reach("installed")
                event = judged(event, outcome)
            return event

        def judged(event: ev.Event, outcome: Outcome) -> ev.Event:
            """The event with what the watch says, now that the round is in it."""
            evidence = outcome.merged.evidence
            assert isinstance(event, ev.Merged)
            return replace(
                event,
                suspects=model.watch.suspects(evidence),
                forgiven=model.watch.forgiven(evidence),
            )

        self._submit(self._pool, work)

    def _travelled(
        self, effect: ev.StartMerge, chunks: Mapping[int, tuple[int, DecodedChunk]]
    ) -> list[tuple[str, list[Chunk]]]:
        """Returns codec and chunks of each contribution, encoded as they came."""
        return [
            (
                chunks[each.handles[0]][1].codec,
                [(chunks[h][0], chunks[h][1].count, self._payloads[h]) for h in each.handles],
            )
            for each in effect.contributions
        ]

    def encode_state(self, index: int, encoded: Callable[[EncodedVersion, float], None]) -> None:
        """Encodes the newest published copy; `encoded` gets it, and the time, on the loop's
        thread."""
        assert self.model is not None
        fragment, state = self._run.table[index], self.model.fragments[index]

        def work() -> None:
            size = chunk_elements(self._run.settings, STATE_CODEC)
            version = encode_state(fragment, state, size)
            self._post(lambda: encoded(version, time.monotonic()))

        self._submit(self._pool, work)

    def save(self) -> None:
        """Writes a checkpoint of the current state while serving goes on."""
        snapshot = self._snapshot()

        def work() -> None:
            self._reach("checkpoint_begun")
            try:
                self._state_dir.save(snapshot)
                needed_from = self._state_dir.journal_needed_from()
            except (OSError, NarrowsError) as error:
                failed = ev.CheckpointFailed(str(error))
                self._post(lambda: failed)
                return
            written = ev.CheckpointWritten(sum(state.version for state in snapshot.fragments))
            if any(snapshot.journal_seal):
                seal = snapshot.journal_seal.hex()
                _log.info("sealed up to record %d:%s", snapshot.journal, seal)
            self._reach("checkpoint_written")
            self._post(lambda: written)
            if self._commits is not None and not self._config.broker.journal_keep:
                self._commits.cut_before(needed_from)

        self._submit(self._disk, work)

    def close(self) -> None:
        """Waits for what is running; what has not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._disk.shutdown(wait=True)
        if self._commits is not None:
            self._commits.close()

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], None]) -> None:
        """Runs `work` on a pool; an unexpected error ends the loop, loudly, not one round."""
        pool.submit(guarded(work, self._post))

    def _snapshot(self) -> CheckpointContent:
        """References to arrays that are never changed in place: cheap and consistent."""
        assert self.model is not None
        run = self._run
        return CheckpointContent(
            run_id=run.run_id,
            epoch=run.epoch[:2],
            layout=run.layout,
            frozen_digest=run.frozen_digest,
            fragment_count=run.settings.fragment_count,
            run_tokens=run.clock.run_tokens,
            token_parts=run.clock.units % run.clock.fragments,
            phase=run.phase.stored,
            fragments=tuple(self.model.fragments),
            journal=self._commits.installed if self._commits is not None else self._journaled,
            merged_pushes=self._merged_pushes(),
            journal_seal=self._commits.installed_seal if self._commits is not None else b"",
            watch=self.model.watch,
        )

    def _merged_pushes(self) -> tuple[MergedPush, ...]:
        return tuple(
            MergedPush(learner, incarnation, fragment, push_id, tokens)
            for (learner, incarnation, fragment), (push_id, tokens) in sorted(
                self._run.merged_pushes.items()
            )
        )
