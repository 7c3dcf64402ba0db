"""`narrows bench journal`: the cost of durability: rounds per second, bytes, delay."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from statistics import median, quantiles
from typing import Final

import numpy as np

from narrows.bench.kit import machine
from narrows.broker.cli.tables import Table, show, terminal
from narrows.broker.config import BrokerConfig
from narrows.broker.merging import (
    Contribution,
    GlobalModel,
    Outcome,
    policy_of,
    version_zero,
    warm_up,
)
from narrows.broker.storage import (
    Chain,
    Chunk,
    Commits,
    DirectoryFiles,
    Journal,
    Mode,
    SealKey,
    new_seal_key,
)
from narrows.broker.syncer import RunSecret, StartMerge, Syncer, Turn
from narrows.broker.syncer import events as ev
from narrows.proto.codec import DecodedChunk, decode_chunk, encode_fragment
from narrows.proto.fragments import Fragment, build_table
from narrows.proto.messages import LayoutEntry
from narrows.proto.units import format_bytes

MODES: Final[tuple[tuple[Mode, bool], ...]] = (
    ("off", False), ("merged", False), ("full", False), ("full", True),
)  # fmt: skip
"""Mode, and if the journal is sealed."""
COLUMNS: Final = 1024
CHUNK_ELEMENTS: Final = 1 << 18


@dataclass(frozen=True)
class JournalRow:
    """Rounds one after the other at full speed: merge, journal, publication."""

    journal: str
    params: int
    learners: int
    fragments: int
    rounds_per_s: float
    bytes_per_round: float
    """Bytes written to the journal."""
    merge_ms_median: float
    added_ms_median: float
    """Time from the end of the merge to the moment at which the publication may leave."""
    added_ms_p99: float
    is_sealed: bool = False


@dataclass(frozen=True)
class _Contributions:
    """Contributions to a fragment, decoded and as they travelled."""

    contributed: tuple[Contribution, ...]
    chunks: dict[int, tuple[int, DecodedChunk]]
    travelled: list[tuple[str, list[Chunk]]]


def run_journal_bench(
    folder: Path | None, json_file: Path | None, *, params: int, learners: int, rounds: int
) -> None:
    """Measures the modes, prints, and writes the requested files. `folder`: a folder on the disk to
    measure."""
    warm_up()
    rows = [
        _measured(mode, folder, params, learners, rounds, is_sealed=is_sealed)
        for mode, is_sealed in MODES
    ]
    show(terminal(), table(rows))
    machine.write_result(json_file, "journal", {"rows": [asdict(row) for row in rows]})


def table(rows: Sequence[JournalRow]) -> Table:
    """A row per mode."""
    shown = Table(("journal", "rounds/s", "bytes/round", "merge ms", "added ms", "p99"))
    for row in rows:
        name = f"{row.journal}, sealed" if row.is_sealed else row.journal
        shown.add(
            name, f"{row.rounds_per_s:.2f}", format_bytes(int(row.bytes_per_round)),
            f"{row.merge_ms_median:.0f}", f"{row.added_ms_median:.1f}", f"{row.added_ms_p99:.1f}",
        )  # fmt: skip
    return shown


def _measured(
    mode: Mode, folder: Path | None, params: int, learners: int, rounds: int, *, is_sealed: bool
) -> JournalRow:
    config = BrokerConfig()
    config = replace(config, broker=replace(config.broker, journal=mode))
    fragments = max(1, params // (1 << 23))
    layout = [
        LayoutEntry(f"t{i}", (params // fragments // COLUMNS, COLUMNS), "float32", "rda")
        for i in range(fragments)
    ]
    table = build_table(layout, fragments)
    rng = np.random.default_rng(0)
    model = GlobalModel(
        config, table, [version_zero(rng.standard_normal(p.elements, np.float32)) for p in table]
    )
    # The same contributions every time: the bench measures only the journal.
    sent = _contributions(table[0], learners, rng)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return _timed(mode, Path(place), model, sent, params, rounds, is_sealed=is_sealed)


def _timed(
    mode: Mode, place: Path, model: GlobalModel, sent: _Contributions, params: int, rounds: int,
    *, is_sealed: bool,
) -> JournalRow:  # fmt: skip
    posted: SimpleQueue[Callable[[], ev.Event | None]] = SimpleQueue()
    key = new_seal_key(place / "seal.key") if is_sealed else None
    commits = _commits(place, model.config, posted, key) if mode != "off" else None
    policy = policy_of(model.config)
    added_s, merge_s = list[float](), list[float]()
    began = time.perf_counter()
    for number in range(rounds):
        index = number % len(model.table)
        version = model.fragments[index].version + 1
        effect = StartMerge(index, version, sent.contributed, "a bench")
        started = time.perf_counter()
        outcome = model.merge(index, version, sent.contributed, sent.chunks, policy)
        merged = time.perf_counter()
        travelled = sent.travelled if mode == "full" else []
        _commit(commits, posted, model, effect, outcome, travelled)
        added_s.append(time.perf_counter() - merged)
        merge_s.append(merged - started)
    seconds = time.perf_counter() - began
    if commits is not None:
        commits.close()
    written = sum(_used_bytes(path, path.stat().st_size) for path in place.rglob("journal-*.log"))
    return JournalRow(
        journal=mode,
        params=params,
        learners=len(sent.contributed),
        fragments=len(model.table),
        rounds_per_s=rounds / seconds,
        bytes_per_round=written / rounds,
        merge_ms_median=1000 * median(merge_s),
        added_ms_median=1000 * median(added_s),
        added_ms_p99=1000 * quantiles(added_s, n=100, method="inclusive")[98],
        is_sealed=is_sealed,
    )


def _commit(
    commits: Commits | None,
    posted: SimpleQueue[Callable[[], ev.Event | None]],
    model: GlobalModel,
    effect: StartMerge,
    outcome: Outcome,
    travelled: list[tuple[str, list[Chunk]]],
) -> None:
    def exists() -> ev.Event:
        model.install(outcome)
        state = outcome.state
        return ev.Merged(outcome.fragment, state.version, state.digest, 0)

    if commits is None:
        exists()
        return
    commits.commit(effect, outcome, travelled, exists)
    posted.get()()


def _commits(
    place: Path, config: BrokerConfig, posted: SimpleQueue[Callable[[], ev.Event | None]],
    key: SealKey | None,
) -> Commits:  # fmt: skip
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    segment_bytes = config.broker.journal_segment
    files, chain = DirectoryFiles(fd), Chain(key) if key else None
    journal = Journal.open(files, run_id="bench", segment_bytes=segment_bytes, chain=chain)
    state = Syncer(
        config, run_id="bench", epoch=(1, 1, 1), secret=RunSecret(bytes(32)), now=0.0
    ).state
    state.turn(Turn.BEGIN)
    return Commits(journal, state, posted.put, serve_on=False)


def _contributions(part: Fragment, learners: int, rng: np.random.Generator) -> _Contributions:
    chunks: dict[int, tuple[int, DecodedChunk]] = {}
    contributed: list[Contribution] = []
    travelled: list[tuple[str, list[Chunk]]] = []
    for learner in range(learners):
        values = 1e-3 * rng.standard_normal(part.elements, np.float32)
        handles: list[int] = []
        own: list[Chunk] = []
        for chunk in encode_fragment(
            part, values, codec_name="int4-zstd", rho=0.5, chunk_elements=CHUNK_ELEMENTS,
            reconstructed=np.empty_like(values),
        ):  # fmt: skip
            handles.append(len(chunks))
            own.append((chunk.offset, chunk.count, chunk.payload))
            decoded = decode_chunk(part, "int4-zstd", chunk.offset, chunk.count, chunk.payload)
            chunks[len(chunks)] = (chunk.offset, decoded)
        name = f"{learner:03}"
        contributed.append(Contribution(name, "0" * 32, 1, 1000, 10, tuple(handles)))
        travelled.append(("int4-zstd", own))
    return _Contributions(tuple(contributed), chunks, travelled)


def _used_bytes(path: Path, size_bytes: int) -> int:
    """Bytes of a segment without the zeros at its end, which were never written."""
    with path.open("rb") as file:
        for end in range(size_bytes, 0, -(1 << 20)):
            file.seek(max(0, end - (1 << 20)))
            if any(file.read(min(end, 1 << 20))):
                return end
    return 0
