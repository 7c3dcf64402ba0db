"""Jobs of a bench in their own processes, one JSON line per result.

A job whose row is in the file is not run again, so that a bench goes on after an interruption.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from narrows.bench.kit import machine
from narrows.bench.kit.rows import append_row, end_last_line, rows_by_key
from narrows.proto.errors import ConfigError

Row: TypeAlias = dict[str, Any]
Arguments: TypeAlias = tuple[Any, ...]


def run_missing(
    jobs: Mapping[str, Arguments],
    work: Callable[..., Row],
    path: Path,
    *,
    key_of: Callable[[Row], str],
    say: Callable[[Row], str],
    workers: int,
    console: Console,
    cost_of: Callable[[str], float] = lambda key: 1.0,
) -> dict[str, Row]:
    """Runs `work(*arguments)` for every key that `path` has no row of; returns rows by key.

    `key_of` gives the key of a row, `say` describes a row in half a line, `cost_of` is a job's time
    in any unit. Each worker is a process with one thread. Raises ConfigError without workers.
    """
    if workers < 1:
        raise ConfigError("--workers is out of range", expected="1 or more, 0: one per core")
    known = rows_by_key(path, key_of)
    missing = {key: job for key, job in jobs.items() if key not in known}
    if missing:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        end_last_line(path)
    console.print(f"{len(jobs) - len(missing)} of {len(jobs)} runs are in {path}", markup=False)
    started_s, cost_done, whole = time.monotonic(), 0.0, sum(map(cost_of, missing))
    # Ctrl-C reaches the workers as well. There it would end a job, and the next job would begin.
    with ProcessPoolExecutor(
        workers,
        mp_context=get_context("forkserver"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    ) as pool:
        try:
            futures = {pool.submit(work, *job): key for key, job in missing.items()}
            for count, future in enumerate(as_completed(futures), 1):
                row = machine.describe() | future.result()
                known[key_of(row)] = row
                append_row(path, row)
                cost_done += cost_of(futures[future])
                left_s = (time.monotonic() - started_s) / cost_done * (whole - cost_done)
                progress = f"{count}/{len(missing)}, {left_s / 60:.0f} min left"
                console.print(f"{progress}: {say(row)}", markup=False)
        except BaseException:
            console.print(f"{path} keeps what is done; the same command goes on", markup=False)
            # Otherwise the pool would run the rest, for minutes, and nobody would write it down.
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise
    return {key: known[key] for key in jobs}
