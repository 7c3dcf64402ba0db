"""The thread behind the journal: rounds become durable before they exist. No decisions.

Records are appended in the order of the merges and synced in groups: records that come while one
sync runs share the next one. So a slow disk costs latency, but hardly any throughput.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from narrows.broker.merging import Contribution, Outcome, PushEvidence
from narrows.broker.storage import records
from narrows.broker.storage.journal import Journal, JournalError
from narrows.broker.storage.seal import NO_SEAL
from narrows.broker.syncer import RunState
from narrows.broker.syncer import events as ev
from narrows.proto.codec import upper_halves
from narrows.proto.limits import TOKENS_MAX
from narrows.proto.shell import guarded
from narrows.proto.units import format_bytes

CLOSE_S: Final = 5.0
"""Seconds that the end of the process waits for the last sync."""

RETRY_S: Final = 2.0
"""Seconds after which a journal that could not be written is tried again."""

SLOW_S: Final = 2.0
SLOW_TOLD_S: Final = 60.0
"""A sync of more than SLOW_S seconds is logged, at most once in SLOW_TOLD_S seconds."""

PACE_ROUNDS: Final = 20
"""Rounds after which the pace of the journal is logged. Earlier the first rounds would mislead."""

_log = logging.getLogger("narrows.broker")

Chunk = tuple[int, int, bytes]
"""Offset, elements and payload as it travelled."""


@dataclass
class Written:
    """Logs once how fast the journal grows, as soon as the pace of the run can be seen."""

    rounds: int = 0
    size_bytes: int = 0
    began_at: float = 0.0

    def add(self, size_bytes: int) -> None:
        """Counts a round of `size_bytes` that is about to be written."""
        now = time.monotonic()
        self.began_at = self.began_at or now
        if self.rounds == PACE_ROUNDS and now > self.began_at:
            per_hour = self.size_bytes * 3600 / (now - self.began_at)
            _log.info(
                "the journal takes %s a round, about %s an hour at this pace, until it is cut back",
                format_bytes(self.size_bytes // self.rounds),
                format_bytes(int(per_hour)),
            )
        self.rounds += 1
        self.size_bytes += size_bytes


class Commits:
    """Writes a run's records; calls back on the loop's thread through `post`."""

    def __init__(
        self,
        journal: Journal,
        run: RunState,
        post: Callable[[Callable[[], ev.Event | None]], None],
        *,
        serve_on: bool,
        reach: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`serve_on`: a round exists even if the disk does not take it. `reach` is called with each
        place of crash_points.NAMES that is reached."""
        self._reach = reach
        self._journal, self._run, self._post, self._serve_on = journal, run, post, serve_on
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="narrows-journal")
        self._closing = threading.Event()
        self._failing = False
        self._sync_waits = False
        self._slow_told_at = -math.inf
        self.hangs = False
        """True if the disk did not answer when the journal was closed."""
        self.installed = journal.durable
        """Newest record whose version is installed. A checkpoint made now holds all up to it."""
        self.installed_seal = journal.sealer.seal
        """The seal of that record, in a sealed journal; NO_SEAL if it is not durable."""
        self._written = Written()

    def commit(
        self,
        effect: ev.StartMerge,
        outcome: Outcome,
        contributions: Sequence[tuple[str, Sequence[Chunk]]],
        done: Callable[[], ev.Event],
    ) -> None:
        """Makes a merged round durable, then has `done` called on the loop's thread.

        `contributions` are codec and chunks of each contributor, none in a journal of merged outer
        gradients. Called on the loop's thread.
        """
        self._reach("merged")
        body = committed(self._run, effect, outcome, contributions)
        self._written.add(sum(map(len, body)))
        number = self._append(body)
        self._reach("appended")
        self._submit(lambda: self._make_durable(number, body, done))

    def note(self, fate: ev.LogFate) -> None:
        """Appends the fate of a learner or a push; it is durable soon.

        Nobody waits for it: a lost fate costs an operator a line, not the run a version.
        """
        head = records.FateRecord(
            self._run.epoch[:2], fate.what, fate.learner, fate.incarnation, fate.fragment,
            fate.push_id, fate.reason, time.time(),
        )  # fmt: skip
        self._append(records.encode(head), keep_seal=False)
        if not self._sync_waits:
            self._sync_waits = True
            self._submit(self._sync_fates)

    def cut_before(self, number: int) -> None:
        """Removes the records before `number`, which no checkpoint needs any more."""

        def work() -> None:
            try:
                self._journal.cut_before(number)
                self._reach("journal_cut")
            except JournalError as error:
                _log.warning("%s", error)  # It is tried again after the next checkpoint.

        self._submit(work)

    def close(self) -> None:
        """Makes the last records durable, unless the disk does not answer within CLOSE_S."""
        self._closing.set()
        last = self._thread.submit(self._sync)
        try:
            last.result(CLOSE_S)
        except TimeoutError:
            self.hangs = True
            self._thread.shutdown(wait=False, cancel_futures=True)
            return
        self._thread.shutdown(wait=True)
        self._journal.close()

    def _submit(self, work: Callable[[], None]) -> None:
        """Runs `work` on the journal's thread; an unexpected error ends the loop, loudly."""
        self._thread.submit(guarded(work, self._post))

    def _append(self, body: list[bytes | memoryview], *, keep_seal: bool = True) -> int:
        """The record's number, 0 if the queue is full, as after a long failure of the disk."""
        try:
            return self._journal.append(body, keep_seal=keep_seal)
        except JournalError as error:
            self._fails(str(error))
            return 0

    def _make_durable(
        self, number: int, body: list[bytes | memoryview], done: Callable[[], ev.Event]
    ) -> None:
        """Runs on the journal's thread until the record is durable, or is given up.

        In the mode that serves on, a round may exist although its record is not durable.
        """
        while True:
            number = number or self._append(body)
            if self._sync() and number:
                break
            if self._serve_on:
                break
            if self._closing.wait(RETRY_S):
                return  # The round never existed: nobody has seen it.
        self._reach("durable")
        is_durable = 0 < number <= self._journal.durable
        seal = self._journal.sealer.take(number) if is_durable else NO_SEAL

        def exists() -> ev.Event:
            event = done()
            if number:
                self.installed, self.installed_seal = number, seal
            return event

        self._post(exists)
        if not number:
            self._post(lambda: ev.JournalGap("its queue is full"))

    def _sync_fates(self) -> None:
        self._sync_waits = False
        self._sync()

    def _sync(self) -> bool:
        began_at = time.monotonic()
        try:
            self._journal.sync()
        except JournalError as error:
            self._fails(str(error))
            return False
        self._tell_if_slow(began_at)
        if self._failing:
            self._failing = False
            self._post(lambda: ev.JournalWorks())
        return True

    def _tell_if_slow(self, began_at: float) -> None:
        now = time.monotonic()
        if now - began_at >= SLOW_S and now - self._slow_told_at >= SLOW_TOLD_S:
            self._slow_told_at = now
            _log.warning(
                "the disk took %.1f s to make rounds durable; they were published that much later,"
                " learners trained on. Is something else writing to it?",
                now - began_at,
            )

    def _fails(self, reason: str) -> None:
        """Reports a failure once, until the journal works again."""
        if not self._failing:
            self._failing = True
            self._post(lambda: ev.JournalFailed(reason))


def committed(
    run: RunState,
    effect: ev.StartMerge,
    outcome: Outcome,
    contributions: Sequence[tuple[str, Sequence[Chunk]]],
) -> list[bytes | memoryview]:
    """The body of a round's record: see records.RoundRecord."""
    publication = outcome.publication
    steps = [(c.offset, c.count, c.payload) for c in publication.chunks]
    vectors = [records.vector_of(codec, 0.0, chunks) for codec, chunks in contributions]
    blobs: list[bytes | memoryview] = [data for _, _, data in steps]
    blobs += [data for _, chunks in contributions for _, _, data in chunks]
    if outcome.policy.is_rounded:
        blobs.append(upper_halves(outcome.merged.outer_grad).data.cast("B"))
    head = records.RoundRecord(
        epoch=run.epoch[:2],
        fragment=effect.fragment,
        version=effect.version,
        reason=effect.reason,
        contributors=tuple(
            _contributor(run, effect.fragment, place, c, outcome)
            for place, c in enumerate(effect.contributions)
        ),
        policy=outcome.policy,
        phase=run.phase.stored,
        run_tokens=run.clock.run_tokens,
        publication=records.vector_of(publication.codec, publication.rho, steps),
        contributions=tuple(vectors),
        error_ratio=outcome.error_ratio,
        digests=outcome.digests,
        at=time.time(),
    )
    return records.encode(head, blobs)


def _contributor(
    run: RunState, fragment: int, place: int, contribution: Contribution, outcome: Outcome
) -> records.ContributorRecord:
    """The part of the contribution at `place` in name order."""
    merged = outcome.merged
    evidence = merged.evidence[place] if merged.evidence else PushEvidence(contribution.learner)
    norms = merged.applied[place].tolist() if outcome.policy.is_rounded else ()
    return records.ContributorRecord(
        contribution.learner,
        contribution.incarnation,
        contribution.push_id,
        contribution.tokens,
        contribution.steps,
        outcome.weights[place],
        min(contribution.tokens + _tokens_before(run, contribution, fragment), TOKENS_MAX),
        contribution.tokens if contribution.counted is None else contribution.counted,
        is_clipped=evidence.is_clipped,
        cosine=evidence.cosine,
        is_noise=evidence.is_noise,
        norms=tuple(norms),
    )


def _tokens_before(run: RunState, contribution: Contribution, fragment: int) -> int:
    """Tokens of this process that were merged into the fragment before."""
    key = contribution.learner, contribution.incarnation, fragment
    return run.merged_pushes.get(key, (0, 0))[1]
