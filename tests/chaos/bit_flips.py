"""Every bit of a small state directory flipped, every file cut at every byte: nothing is silent.

`python tests/chaos/bit_flips.py` prints the counts; a stride above 1 takes every n-th place.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrows.broker.config import BrokerConfig, load_config
from narrows.broker.merging.contribution import Contribution
from narrows.broker.merging.model import GlobalModel, version_zero
from narrows.broker.merging.policy import policy_of
from narrows.broker.storage.checkpoint import CheckpointContent, StateDir
from narrows.broker.storage.disk import DirectoryFiles
from narrows.broker.storage.durable_files import StateError
from narrows.broker.storage.history import model_digest
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.records import FORMAT, LifeRecord, encode
from narrows.broker.storage.recovery import begin_epoch
from narrows.broker.storage.writer import committed
from narrows.broker.syncer.events import Note, Received, StartMerge
from narrows.broker.syncer.machine import Syncer
from narrows.broker.syncer.phases import Turn
from narrows.broker.syncer.run_secret import RunSecret
from narrows.learner.session.identity import Identity
from narrows.proto.codec.chunk import DecodedChunk
from narrows.proto.codec.transfer import decode_chunk, encode_fragment
from narrows.proto.errors import NarrowsError
from narrows.proto.fragments import build_table
from narrows.proto.messages import LayoutEntry, Phase

LAYOUT = (
    LayoutEntry("weight", (4, 4), "float32", "rda"),
    LayoutEntry("bias", (4,), "float32", "mean"),
)
ROUNDS, CHECKPOINT_AFTER = 6, 3
SEGMENT_BYTES = 1500


@dataclass
class State:
    """A state directory, and the model that it holds after each round."""

    path: Path
    config: BrokerConfig
    digests: list[str]
    """Digests of the model after 0, 1, ... rounds."""


def config_of(path: Path) -> BrokerConfig:
    flags = {"broker.state_dir": str(path), "fragments.count": 1, "broker.journal_segment": "4KiB"}
    return load_config(None, flags)


def make(path: Path) -> State:
    """Two checkpoints and a journal in several segments."""
    config = config_of(path)
    table = build_table(LAYOUT, 1)
    rng = np.random.default_rng(0)
    model = GlobalModel(config, table, [version_zero(rng.standard_normal(20, np.float32))])
    with StateDir.open(path) as state_dir:
        run = state_dir.begin_epoch("0" * 16, "0" * 16)
        files = DirectoryFiles(state_dir.journal_directory())
        journal = Journal.open(files, run_id=run.run_id, segment_bytes=SEGMENT_BYTES)
        journal.append(encode(LifeRecord(FORMAT, run.epoch, run.config_digest, (), 0.0)))
        journal.sync()
        secret = RunSecret(state_dir.secret)
        epoch = (*run.epoch, 7)
        syncer = Syncer(config, run_id=run.run_id, epoch=epoch, secret=secret, now=0.0)
        syncer.state.turn(Turn.BEGIN)
        digests = [model_digest(model)]
        for version in range(ROUNDS + 1):
            if version:
                _round(model, journal, syncer, version, rng)
                digests.append(model_digest(model))
            if version in (0, CHECKPOINT_AFTER):
                state_dir.save(
                    CheckpointContent(
                        run.run_id, run.epoch, LAYOUT, 0, 1, 100 * version, Phase.RUNNING,
                        tuple(model.fragments), journal.durable,
                    )
                )  # fmt: skip
        journal.close()
    return State(path, config, digests)


def _round(
    model: GlobalModel, journal: Journal, syncer: Syncer, version: int, rng: np.random.Generator
) -> None:
    part = model.table[0]
    chunks: dict[int, tuple[int, DecodedChunk]] = {}
    contributed: list[Contribution] = []
    travelled: list[tuple[str, list[tuple[int, int, bytes]]]] = []
    for learner in ("a", "b"):
        values = 0.01 * rng.standard_normal(20, np.float32)
        (chunk,) = encode_fragment(
            part, values, codec_name="int4-zstd", rho=0.5, chunk_elements=64,
            reconstructed=np.empty_like(values),
        )  # fmt: skip
        handle = len(chunks)
        chunks[handle] = (0, decode_chunk(part, "int4-zstd", 0, 20, chunk.payload))
        contributed.append(Contribution(learner, "0" * 32, version, 100, 5, (handle,)))
        travelled.append(("int4-zstd", [(0, 20, chunk.payload)]))
    effect = StartMerge(0, version, tuple(contributed), "a test")
    outcome = model.merge(0, version, contributed, chunks, policy_of(model.config))
    journal.append(committed(syncer.state, effect, outcome, travelled))
    journal.sync()
    model.install(outcome)
    for done in contributed:
        key = done.learner, done.incarnation, 0
        tokens = syncer.state.merged_pushes.get(key, (0, 0))[1] + done.tokens
        syncer.state.merged_pushes[key] = done.push_id, tokens


def fate_of(state: State) -> str:
    """The broker's reaction to the directory: detected, harmless, last rounds gone, or SILENT."""
    loud = _Loud()
    logging.getLogger("narrows.broker").addHandler(loud)
    try:
        with StateDir.open(state.path) as state_dir:
            begun = begin_epoch(state.config, state_dir, now=0.0)
            begun.close()
    except (NarrowsError, StateError):
        return "detected: refused"
    finally:
        logging.getLogger("narrows.broker").removeHandler(loud)
    if begun.model is None:
        return "SILENT"
    digest = model_digest(begun.model)
    if digest == state.digests[-1]:
        return "detected: another copy was taken" if loud.warned else "harmless"
    if digest not in state.digests:
        return "SILENT"
    if loud.warned:
        return "last rounds gone, warned"
    return "last rounds gone, a learner tells" if _told_by_a_learner(begun.syncer) else "SILENT"


def _told_by_a_learner(syncer: Syncer) -> bool:
    """True if the first learner that joins makes the loss known: it holds the newest version."""
    identity, run_id = Identity("a", "1" * 32, LAYOUT, 0), syncer.state.run_id
    proof = syncer.state.secret.proof(run_id, (1, 1, 7))
    hello = identity.hello(run_id, (1, 1, 7), proof, 9, 900, (ROUNDS,))
    effects = syncer.handle(Received(b"a", hello), now=0.0)
    return any(isinstance(e, Note) and e.text.startswith("history_lost") for e in effects)


class _Loud(logging.Handler):
    """Records whether the operator was told of damage."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warned = False

    def emit(self, record: logging.LogRecord) -> None:
        self.warned |= record.levelno >= logging.ERROR


def damage(folder: Path, *, stride: int = 1) -> Counter[str]:
    """Counts by kind of damage and fate."""
    counts: Counter[str] = Counter()
    whole = make(folder / "whole")
    broken = State(folder / "broken", config_of(folder / "broken"), whole.digests)
    files = [p.relative_to(whole.path) for p in sorted(whole.path.rglob("*")) if p.is_file()]
    for file in files:
        if file.name == "lock":
            continue
        data = (whole.path / file).read_bytes()
        counts[f"file gone: {_fate(whole, broken, file, None)}"] += 1
        for place in range(0, 8 * len(data), stride):
            flipped = bytearray(data)
            flipped[place // 8] ^= 1 << place % 8
            counts[f"bit flipped: {_fate(whole, broken, file, bytes(flipped))}"] += 1
        for length in range(0, len(data), stride):
            counts[f"cut: {_fate(whole, broken, file, data[:length])}"] += 1
    return counts


def _fate(whole: State, broken: State, file: Path, data: bytes | None) -> str:
    shutil.rmtree(broken.path, ignore_errors=True)
    shutil.copytree(whole.path, broken.path)
    if data is None:
        (broken.path / file).unlink()
    else:
        (broken.path / file).write_bytes(data)
    return fate_of(broken)


def main(stride: int) -> int:
    """Exit code 0 if no damage was silent."""
    logging.getLogger("narrows").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        counts = damage(Path(folder), stride=stride)
    for name, count in sorted(counts.items()):
        print(f"{count:8d}  {name}")
    return any("SILENT" in name for name in counts)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
