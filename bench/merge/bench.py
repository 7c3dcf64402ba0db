"""`narrows bench merge`: the cost of a merge by number of learners and size, in time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from narrows.bench.kit import machine
from narrows.bench.kit.failures import reason_of
from narrows.bench.kit.processes import environment
from narrows.broker.cli.tables import Table, show, terminal
from narrows.broker.config import BrokerConfig
from narrows.broker.merging import (
    Contribution,
    DecodedVector,
    FragmentState,
    GlobalModel,
    MergeResult,
    Policy,
    policy_of,
    version_zero,
    warm_up,
)
from narrows.proto.codec import F32, DecodedChunk, decode_chunk, empty_f32, encode_fragment
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.fragments import Fragment, build_table
from narrows.proto.limits import PUBLICATIONS_KEPT
from narrows.proto.messages import LayoutEntry
from narrows.proto.units import format_bytes, format_count

LEARNERS: Final = (2, 4, 8, 16, 32, 64)
PARAMS: Final = (1 << 20, 1 << 22, 1 << 24)
"""Parameters of one fragment."""

LARGE: Final = (8, 1 << 28, 16)
"""Learners, parameters and fragments of the large model."""

TENSOR_ELEMENTS: Final = 1 << 20
STATE_BYTES_PER_PARAM: Final = 12
"""Global parameters, momentum and published copy, float32 each."""

MERGE_BYTES_PER_PARAM: Final = 4 + 4 + 12
"""Memory for the fragment that is merged: mean, direction and its new state."""

CODE_BYTES_PER_PARAM: Final = 0.5
FILLING_LEARNERS: Final = 2
"""Learners in the rounds before the measured ones, which only fill the store of publications."""

MEASURED_ROUNDS: Final = 3
STAGES: Final = ("decode", "sums", "outer_step", "publication")


@dataclass(frozen=True)
class MergeRow:
    """Merges of whole rounds: payloads of contributions in, new state and publication out."""

    learners: int
    params: int
    fragments: int
    seconds_per_round: float
    """Median over rounds and fragments; a round merges one fragment. Decoding happens on arrival
    and is not included."""
    params_per_s: float
    """Parameters of a fragment, not multiplied by the learners."""
    peak_bytes: int
    """Resident memory of the process beyond that of the interpreter and its libraries."""
    formula_bytes: int
    """State, kept publications, memory of a merge, and the codes of its round."""
    share_decode: float
    """Share of payload checks and decoding in the time of a round, decoding included."""
    share_sums: float
    """Share of norms, weighted mean and direction."""
    share_outer_step: float
    share_publication: float
    """Share of difference, codes, entropy coding, the next published copy and its digest."""


def run_merge_bench(json_file: Path | None, plot: Path | None, *, large: bool) -> None:
    """Measures each row in its own process, prints, and writes the requested files."""
    cases = [(m, n, 1) for n in PARAMS for m in LEARNERS]
    rows = [_measured(*case) for case in [*cases, *([LARGE] if large else [])]]
    show(terminal(), table(rows))
    machine.write_result(json_file, "merge", {"rows": [asdict(row) for row in rows]})
    if plot is not None:
        from narrows.bench.kit.plots import merge_cost

        merge_cost([asdict(row) for row in rows], plot)


def _measured(learners: int, params: int, fragments: int) -> MergeRow:
    command = [sys.executable, "-m", __name__, str(learners), str(params), str(fragments)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if child.returncode:
        raise NarrowsError(
            ErrorCode.MISUSE,
            f"the merge of {learners} learners failed",
            got=reason_of(child.stderr),
        )
    return MergeRow(**json.loads(child.stdout))


class _TimedModel(GlobalModel):
    """A model that measures the time of the parts of a merge."""

    sums_s = outer_step_s = 0.0

    def merged(
        self,
        fragment: Fragment,
        contributions: Sequence[DecodedVector],
        weights: Sequence[float],
        policy: Policy,
    ) -> MergeResult:
        started = time.perf_counter()
        result = super().merged(fragment, contributions, weights, policy)
        self.sums_s += time.perf_counter() - started
        return result

    def outer_step(
        self, fragment: Fragment, before: FragmentState, outer_grad: F32, policy: Policy
    ) -> tuple[F32, F32]:
        started = time.perf_counter()
        result = super().outer_step(fragment, before, outer_grad, policy)
        self.outer_step_s += time.perf_counter() - started
        return result


def measure(learners: int, params: int, fragments: int) -> MergeRow:
    """Measures one row in this process."""
    warm_up()
    before_bytes = _resident_bytes("VmRSS")
    shape = (TENSOR_ELEMENTS // 1024, 1024)
    layout = [
        LayoutEntry(f"t{i}", shape, "float32", "rda") for i in range(params // TENSOR_ELEMENTS)
    ]
    table_ = build_table(layout, fragments)
    rng = np.random.default_rng(0)
    model = _TimedModel(
        BrokerConfig(),
        table_,
        [version_zero(rng.standard_normal(part.elements, np.float32)) for part in table_],
    )
    policy = policy_of(model.config)
    decode_s, merge_s = list[float](), list[float]()
    for version in range(1, PUBLICATIONS_KEPT + MEASURED_ROUNDS + 1):
        measured = version > PUBLICATIONS_KEPT
        for part in table_:
            contributed, chunks, seconds = _contributions(
                part, learners if measured else min(learners, FILLING_LEARNERS), version
            )
            started = time.perf_counter()
            model.install(model.merge(part.index, version, contributed, chunks, policy))
            if measured:
                merge_s.append(time.perf_counter() - started)
                decode_s.append(seconds)
            del contributed, chunks
        if not measured:
            model.sums_s = model.outer_step_s = 0.0
    part_params, whole_s = params // fragments, sum(merge_s) + sum(decode_s)
    publication = model.publication(0, PUBLICATIONS_KEPT + MEASURED_ROUNDS)
    assert publication is not None
    needed = (
        (STATE_BYTES_PER_PARAM + PUBLICATIONS_KEPT * publication.bits_per_param / 8) * params
        + MERGE_BYTES_PER_PARAM * part_params
        + CODE_BYTES_PER_PARAM * part_params * learners
    )
    return MergeRow(
        learners=learners,
        params=params,
        fragments=fragments,
        seconds_per_round=median(merge_s),
        params_per_s=part_params / median(merge_s),
        peak_bytes=_resident_bytes("VmHWM") - before_bytes,
        formula_bytes=int(needed),
        share_decode=sum(decode_s) / whole_s,
        share_sums=model.sums_s / whole_s,
        share_outer_step=model.outer_step_s / whole_s,
        share_publication=(sum(merge_s) - model.sums_s - model.outer_step_s) / whole_s,
    )


def _contributions(
    part: Fragment, learners: int, version: int
) -> tuple[list[Contribution], dict[int, tuple[int, DecodedChunk]], float]:
    """Contributions with other codes for every learner, and the seconds that decoding took. Coded
    chunk by chunk, so that no copy is held long."""
    chunks: dict[int, tuple[int, DecodedChunk]] = {}
    contributed: list[Contribution] = []
    decode_s = 0.0
    # Memory from the pool, which the merge uses afterwards: the bench itself must not be the peak.
    values, sent = empty_f32(part.elements), empty_f32(part.elements)
    for learner in range(learners):
        handles: list[int] = []
        np.random.default_rng([part.index, version, learner]).standard_normal(
            part.elements, np.float32, out=values
        )
        for chunk in encode_fragment(
            part, values, codec_name="int4-zstd", rho=0.5,
            chunk_elements=1 << 18, reconstructed=sent,
        ):  # fmt: skip
            handles.append(len(chunks))
            started = time.perf_counter()
            decoded = decode_chunk(part, "int4-zstd", chunk.offset, chunk.count, chunk.payload)
            decode_s += time.perf_counter() - started
            chunks[len(chunks)] = (chunk.offset, decoded)
        contributed.append(Contribution(f"{learner:03}", "0" * 32, 1, 1000, 10, tuple(handles)))
    return contributed, chunks, decode_s


def _resident_bytes(name: str) -> int:
    """VmRSS or VmHWM. Not ru_maxrss, which a child inherits from the process that started it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise NarrowsError(ErrorCode.MISUSE, "this system does not tell a process's memory")


def table(rows: list[MergeRow]) -> Table:
    """A table for people."""
    stages = [f"{stage} %" for stage in STAGES]
    shown = Table(
        ("learners", "params", "fragments", "s/round", "M params/s", "ns/param/learner", "peak",
         "formula", *stages),
        keys=3,
    )  # fmt: skip
    for row in rows:
        elements = row.params / row.fragments
        shown.add(
            str(row.learners), format_count(row.params), str(row.fragments),
            f"{row.seconds_per_round:.3f}", f"{row.params_per_s / 1e6:.0f}",
            f"{1e9 * row.seconds_per_round / elements / row.learners:.2f}",
            format_bytes(row.peak_bytes), format_bytes(row.formula_bytes),
            *(f"{100 * getattr(row, f'share_{stage}'):.0f}" for stage in STAGES),
        )  # fmt: skip
    return shown


def main(arguments: list[str]) -> None:
    """Prints one row as JSON."""
    fields: dict[str, Any] = asdict(measure(*map(int, arguments)))
    print(json.dumps(fields))


if __name__ == "__main__":
    main(sys.argv[1:])
