"""From records back to versions: recovery after a restart, and the same history under other rules.

Every version that is computed again is compared with the digests in its record. A difference is
damage or a bug, never a new truth: learners hold the copy that was published then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from narrows.broker.config import BrokerConfig
from narrows.broker.merging import (
    DecodedVector,
    EncodedVersion,
    FragmentState,
    GlobalModel,
    MergeResult,
    Outcome,
    Policy,
    Process,
    PushEvidence,
    remembered,
)
from narrows.broker.storage.checkpoint import CheckpointContent
from narrows.broker.storage.durable_files import Damaged, RecordsLost, StateError
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.records import Head, RoundRecord, decode, payloads
from narrows.broker.storage.scan import lost
from narrows.broker.storage.without import Payloads
from narrows.broker.syncer import MergedPushes
from narrows.proto.codec import (
    F32,
    DecodedChunk,
    EncodedChunk,
    advance_copy,
    decode_chunk,
    digest_of,
    widened,
)
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.fragments import Fragment, build_table
from narrows.proto.frames import digest
from narrows.proto.limits import TOKENS_MAX
from narrows.proto.messages import Phase

PHASES: Final = tuple(Phase)
"""In the order in which a run goes through them."""


@dataclass
class History:
    """The state that a checkpoint and the journal after it give together."""

    model: GlobalModel
    phase: Phase
    token_units: int
    """The run's clock in units of a P-th token, for P fragments."""
    merged_pushes: MergedPushes
    replayed: int = 0
    """Rounds that came from the journal."""
    newest: int = 0
    """The newest record that was read."""
    gaps: int = 0
    """Rounds that follow one which was published and never written (journal_errors = "serve"). No
    version can be made of them."""

    @property
    def run_tokens(self) -> int:
        return self.token_units // len(self.model.table)


def recover(
    config: BrokerConfig, snapshot: CheckpointContent, journal: Journal | None,
    *, until: int | None = None,
) -> History:  # fmt: skip
    """The newest state: a checkpoint and the rounds that the journal has after it.

    `until`: the first state at which the versions have this sum.

    Raises StateError STATE_DAMAGED if a record is lost, or does not give the digests it states.
    """
    table = build_table(snapshot.layout, snapshot.fragment_count)
    model = GlobalModel(config, table, snapshot.fragments, snapshot.watch)
    merged = {
        (p.learner, p.incarnation, p.fragment): (p.push_id, p.tokens)
        for p in snapshot.merged_pushes
    }
    units = snapshot.run_tokens * len(table) + snapshot.token_parts
    history = History(model, snapshot.phase, units, merged, newest=snapshot.journal)
    if journal is None:
        return history
    for number, head, blobs in read_records(journal, snapshot.journal + 1):
        if until is not None and version_sum_of(model.fragments) >= until:
            break
        history.newest = number
        if isinstance(head, RoundRecord):
            apply(history, head, blobs, number)
    model.forget_publications()
    return history


def version_sum_of(fragments: Sequence[FragmentState]) -> int:
    """The version of the whole model: each merged round raises it by one."""
    return sum(state.version for state in fragments)


def read_records(journal: Journal, first: int) -> Iterator[tuple[int, Head, memoryview]]:
    """Records from `first` on, decoded. Raises StateError."""
    for record in journal.records(first):
        try:
            head, blobs = decode(record.body)
        except Damaged as problem:
            raise _damaged(record.number, str(problem)) from problem
        yield record.number, head, blobs


def apply(history: History, head: RoundRecord, blobs: memoryview, number: int) -> None:
    """Installs the version of a committed round, unless the checkpoint has it already."""
    model = history.model
    missing = missing_before(model, head, number)
    if missing < 0:
        return
    if missing:
        if model.config.broker.journal_errors != "serve":
            raise _gap(number, head, head.version - 1 - missing)
        history.gaps += 1
        return
    try:
        outcome = outcome_of(model, head, blobs)
    except (Damaged, RemoteProtocolError, FloatingPointError) as problem:
        raise _damaged(number, str(problem)) from problem
    model.set_rate(head.fragment, head.publication.codec, head.publication.rho)
    install(model, head, outcome)
    # A round may have been under way when the clock or the phase went on.
    history.phase = max(history.phase, head.phase, key=PHASES.index)
    history.token_units = units_after(history.token_units, len(model.table), head)
    history.replayed += 1
    for contributor in head.contributors:
        key = contributor.learner, contributor.incarnation, head.fragment
        history.merged_pushes[key] = contributor.push_id, contributor.merged_tokens


def units_after(units: int, fragments: int, head: RoundRecord) -> int:
    """The run's clock after a round, in units of a P-th token, for P fragments."""
    # More only after a gap, and in records of format 1, whose clock was that of the reports.
    units = max(units, head.run_tokens * fragments)
    counted = sum(max(each.counted, 0) for each in head.contributors)
    return min(units + counted, TOKENS_MAX * fragments)


def missing_before(model: GlobalModel, head: RoundRecord, number: int) -> int:
    """Versions that are missing before a round's; negative: the model has the round already.

    Raises StateError if there is no such fragment.
    """
    if not 0 <= head.fragment < len(model.table):
        raise _damaged(number, f"fragment {head.fragment} of {len(model.table)}")
    return head.version - 1 - model.fragments[head.fragment].version


def install(model: GlobalModel, head: RoundRecord, outcome: Outcome) -> None:
    """Installs a round's outcome, whose applied norms join the history of the fragment."""
    before = model.fragments[head.fragment]
    state = remembered(before, outcome.state, processes_of(head), outcome.merged)
    model.install(replace(outcome, state=state))


def outcome_of(model: GlobalModel, head: RoundRecord, blobs: memoryview) -> Outcome:
    """The outcome that was committed, computed again. Raises Damaged unless the digests agree."""
    fragment, before = model.table[head.fragment], model.fragments[head.fragment]
    vectors = list(payloads([head.publication, *head.contributions], blobs))
    steps = _decoded(fragment, head.publication.codec, vectors[0])
    # Each round is merged under the policy of its time.
    merged, params, momentum = stepped(model, head, vectors, blobs, head.policy)
    published = advance_copy(fragment, before.published, steps)
    digests = digest_of(params), digest_of(momentum), digest_of(published)
    if digests != head.digests:
        raise Damaged(
            f"version {head.version} of fragment {head.fragment} comes out differently:"
            f" {digests} instead of {head.digests}"
        )
    chunks = tuple(
        EncodedChunk(offset, count, data, digest(data)) for offset, count, data in vectors[0]
    )
    publication = EncodedVersion(
        head.version, digests[2], head.publication.codec, head.publication.rho, chunks
    )
    state = FragmentState(head.version, digests[2], params, momentum, published)
    weights = tuple(each.weight for each in head.contributors)
    return Outcome(
        head.fragment, state, digests, publication, head.error_ratio, merged, weights, head.policy
    )


def stepped(
    model: GlobalModel, head: RoundRecord, vectors: list[Payloads], blobs: memoryview,
    policy: Policy,
) -> tuple[MergeResult, F32, F32]:  # fmt: skip
    """A round under `policy`: its merge, and global parameters and momentum behind it."""
    fragment = model.table[head.fragment]
    merged = _merged_of(model, fragment, head, vectors, blobs, policy)
    return merged, *model.step(fragment, merged.outer_grad, policy)


def _merged_of(
    model: GlobalModel, fragment: Fragment, head: RoundRecord, vectors: list[Payloads],
    blobs: memoryview, policy: Policy,
) -> MergeResult:  # fmt: skip
    """The merged outer gradient: merged again by `policy`, or as the record keeps it."""
    if not head.contributions:
        merged = blobs[sum(len(data) for _, _, data in vectors[0]) :]
        if len(merged) != 2 * fragment.elements:
            text = f"{len(merged)} bytes of a merged outer gradient"
            raise Damaged(f"{text} of {fragment.elements} elements")
        values = widened(np.frombuffer(merged, np.uint16))
        norms, evidence = _norms_of(head, fragment), _evidence_of(head)
        return MergeResult(values, 0, np.zeros((0, 0)), norms, evidence)
    contributions = [
        DecodedVector(who.learner, _decoded(fragment, vector.codec, chunks))
        for who, vector, chunks in zip(
            head.contributors, head.contributions, vectors[1:], strict=True
        )
    ]
    return model.merged(fragment, contributions, [who.weight for who in head.contributors], policy)


def _norms_of(head: RoundRecord, fragment: Fragment) -> F32:
    """The applied norms (M, k) that a record keeps; (0, 0) in one of a release without a history.

    Raises Damaged if they do not fit the fragment.
    """
    kept = [each.norms for each in head.contributors]
    if not any(kept):
        return np.zeros((0, 0), np.float32)
    if {len(norms) for norms in kept} != {len(fragment.pieces)}:
        raise Damaged(f"norms of other pieces than the {len(fragment.pieces)} of the fragment")
    norms = np.array(kept, np.float32)
    if not (norms >= 0).all() or not np.isfinite(norms).all():
        raise Damaged("norms that are no lengths")
    return norms


def _evidence_of(head: RoundRecord) -> tuple[PushEvidence, ...]:
    return tuple(
        PushEvidence(each.learner, each.is_clipped, each.cosine, each.is_noise)
        for each in head.contributors
    )


def processes_of(head: RoundRecord) -> list[Process]:
    """Name and incarnation of each contributor, in name order."""
    return [(each.learner, each.incarnation) for each in head.contributors]


def _decoded(
    fragment: Fragment, codec: str, chunks: Iterable[tuple[int, int, bytes]]
) -> list[tuple[int, DecodedChunk]]:
    """Raises Damaged unless the chunks hold every element: the rest would be old memory."""
    decoded = [(o, decode_chunk(fragment, codec, o, count, data)) for o, count, data in chunks]
    elements = sum(chunk.count for _, chunk in decoded)
    if elements != fragment.elements:
        raise Damaged(f"{elements} elements of a fragment of {fragment.elements}")
    return decoded


def _damaged(number: int, got: str) -> RecordsLost:
    return lost(f"record {number} of the journal", got, expected="a round that follows")


def _gap(number: int, head: RoundRecord, version: int) -> StateError:
    """The error for a round whose predecessor is not in a whole journal.

    It was never written, so no backup has it. The operator can only allow a start without it.
    """
    return StateError(
        ErrorCode.STATE_DAMAGED,
        f"record {number} of the journal follows a round that was published and never written",
        expected=f"version {version + 1} of fragment {head.fragment}",
        got=f"version {head.version}",
        remedy="start the broker once with --set broker.journal_errors=serve: it goes on without "
        f"the versions of that fragment after {version} and keeps all other rounds",
    )
