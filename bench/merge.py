"""`narrows bench merge`: what a merge costs by number of learners and size, in time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from narrows.bench import machine
from narrows.bench.processes import environment
from narrows.broker.config import BrokerConfig
from narrows.broker.events import Contributed
from narrows.broker.merge import warm_up as warm_up_merge
from narrows.broker.model import GlobalModel, version_zero
from narrows.proto.buffers import empty_f32
from narrows.proto.chunk import DecodedChunk
from narrows.proto.codecs import warm_up
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.fragments import build_table
from narrows.proto.messages import LayoutEntry
from narrows.proto.transfer import decode_chunk, encode_fragment
from narrows.proto.units import format_bytes, format_count

LEARNERS: Final = (2, 4, 8, 16, 32, 64)
PARAMS: Final = (1 << 20, 1 << 22, 1 << 24)
"""In one fragment."""

LARGE: Final = (8, 1 << 28, 16)
"""Learners, params and fragments of the large model."""

TENSOR_ELEMENTS: Final = 1 << 20
STATE_BYTES_PER_PARAM: Final = 12
"""Global parameters, momentum and published copy, float32 each."""

MERGE_BYTES_PER_PARAM: Final = 4 + 4 + 12
"""Of the fragment that is merged: mean, direction and its new state."""

CODE_BYTES_PER_PARAM: Final = 0.5


@dataclass(frozen=True)
class Row:
    """Merges of whole rounds: decoded contributions in, new state and publication out."""

    learners: int
    params: int
    fragments: int
    seconds_per_round: float
    """Median over the fragments; a round merges one fragment."""
    params_per_s: float
    """Parameters of a fragment, not times learners."""
    peak_rss_bytes: int
    """Of the process, the interpreter and its libraries included."""
    formula_bytes: int
    """Interpreter before anything was made + state + what a merge needs + codes of its round."""


def run_merge_bench(json_file: Path | None, *, large: bool) -> None:
    """Measures each row in a process of its own, prints, and writes what was asked for."""
    cases = [(m, n, 1) for n in PARAMS for m in LEARNERS]
    rows = [_measured(*case) for case in [*cases, *([LARGE] if large else [])]]
    Console().print(table(rows))
    if json_file is not None:
        result = machine.describe() | {"rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def _measured(learners: int, params: int, fragments: int) -> Row:
    command = [sys.executable, "-m", __name__, str(learners), str(params), str(fragments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        raise NarrowsError(
            ErrorCode.MISUSE, f"the merge of {learners} learners failed", got=done.stderr[-500:]
        )
    return Row(**json.loads(done.stdout))


def measure(learners: int, params: int, fragments: int) -> Row:
    """One row, in this process."""
    warm_up()
    warm_up_merge()
    empty_bytes = _peak_rss_bytes()
    shape = (TENSOR_ELEMENTS // 1024, 1024)
    layout = [
        LayoutEntry(f"t{i}", shape, "float32", "rda") for i in range(params // TENSOR_ELEMENTS)
    ]
    table_ = build_table(layout, fragments)
    rng = np.random.default_rng(0)
    model = GlobalModel(
        BrokerConfig(),
        table_,
        [version_zero(rng.standard_normal(part.elements, np.float32)) for part in table_],
    )
    # Version 0 shares one array for both copies; from version 1 on there are three.
    times: list[float] = []
    for repeat in range(3 if fragments == 1 else 1):
        for part in table_:
            contributed, chunks = _contributions(model, part.index, learners, repeat)
            started = time.perf_counter()
            model.install(model.merge(part.index, repeat + 1, contributed, chunks))
            times.append(time.perf_counter() - started)
            del contributed, chunks
    part_params = params // fragments
    seconds = median(times)
    needed = (
        STATE_BYTES_PER_PARAM * params
        + MERGE_BYTES_PER_PARAM * part_params
        + CODE_BYTES_PER_PARAM * part_params * learners
    )
    return Row(
        learners,
        params,
        fragments,
        seconds,
        part_params / seconds,
        _peak_rss_bytes(),
        empty_bytes + int(needed),
    )


def _contributions(
    model: GlobalModel, fragment: int, learners: int, repeat: int
) -> tuple[list[Contributed], dict[int, tuple[int, DecodedChunk]]]:
    """Different codes of every learner, coded chunk by chunk so that no copy is held long."""
    part = model.table[fragment]
    chunks: dict[int, tuple[int, DecodedChunk]] = {}
    contributed: list[Contributed] = []
    # Memory from the pool, which the merge uses afterwards: the bench itself must not be the peak.
    values, sent = empty_f32(part.elements), empty_f32(part.elements)
    for learner in range(learners):
        handles: list[int] = []
        np.random.default_rng([fragment, repeat, learner]).standard_normal(
            part.elements, np.float32, out=values
        )
        for chunk in encode_fragment(
            part, values, codec_name="int4-zstd", rho=0.5,
            chunk_elements=1 << 18, reconstructed=sent,
        ):  # fmt: skip
            handles.append(len(chunks))
            decoded = decode_chunk(part, "int4-zstd", chunk.offset, chunk.count, chunk.payload)
            chunks[len(chunks)] = (chunk.offset, decoded)
        contributed.append(Contributed(f"{learner:03}", "0" * 32, 1, 1000, 10, tuple(handles)))
    return contributed, chunks


def _peak_rss_bytes() -> int:
    # Not ru_maxrss, which a child inherits from who started it.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise NarrowsError(ErrorCode.MISUSE, "this system does not tell a process's peak memory")


def table(rows: list[Row]) -> Table:
    """For people."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("learners", "params", "fragments", "s/round", "M params/s",
                    "ns/param/learner", "peak RSS", "formula"):  # fmt: skip
        shown.add_column(heading, justify="right")
    for row in rows:
        part = row.params / row.fragments
        shown.add_row(
            str(row.learners), format_count(row.params), str(row.fragments),
            f"{row.seconds_per_round:.3f}", f"{row.params_per_s / 1e6:.0f}",
            f"{1e9 * row.seconds_per_round / part / row.learners:.2f}",
            format_bytes(row.peak_rss_bytes), format_bytes(row.formula_bytes),
        )  # fmt: skip
    return shown


def main(arguments: list[str]) -> None:
    """Prints one row as JSON."""
    fields: dict[str, Any] = asdict(measure(*map(int, arguments)))
    print(json.dumps(fields))


if __name__ == "__main__":
    main(sys.argv[1:])
