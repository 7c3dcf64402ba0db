"""Fuzzes every decoder for a time: `python tests/fuzz/run.py --minutes 10` (make fuzz).

A decoder gets a process of its own, one after the other, which begins with the golden files, the
corpus in the repository, what earlier runs have found (runs/fuzz) and some hundred examples from
hypothesis. A crash leaves its input in the corpus, where a test runs it from then on. `--shrink`
writes the inputs that matter into the corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.corpus import CORPUS, NAMES, examples, load, name_of

ROOT = Path(__file__).resolve().parents[2]
PORTS_NAME = "ports"
"""The ports of a broker, in the report beside the decoders."""

FOLDER = ROOT / "runs/fuzz"
HANG_S = 10
"""Time for one input. The slowest of all takes a tenth of a second."""

RESIDENT_MB = 1500
"""Memory of a process that fuzzes."""

FILE_BYTES_MAX, CORPUS_BYTES_MAX = 1500, 12_000
"""Bytes of one input in the corpus, and of all inputs of one decoder."""


@dataclass
class Figures:
    """Sum of all runs of one decoder."""

    minutes: float = 0.0
    inputs: int = 0
    inputs_per_s: float = 0.0
    edges: int = 0
    """Branches of Python that were reached, in the newest run."""
    resident_mb: int = 0
    """The most memory that a process took."""
    crashes_found: int = 0
    crashes_open: int = 0
    """Those whose inputs still fail."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"decoders: {' '.join(NAMES)}; none: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each decoder")
    parser.add_argument("--report", type=Path, help="JSON file that the figures are added to")
    parser.add_argument("--shrink", action="store_true", help="write the corpus anew afterwards")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in NAMES]:
        parser.error(f"unknown decoder {unknown[0]}; there are {' '.join(NAMES)}")
    failed = False
    for name in arguments.names or NAMES:
        figures = fuzz(name, arguments.minutes * 60)
        print(f"{name}: {json.dumps(asdict(figures))}", flush=True)
        failed |= figures.crashes_found > 0
        if arguments.shrink:
            shrink(name)
        if arguments.report:
            add_to(arguments.report, name, figures)
    sys.exit(failed)


def fuzz(name: str, seconds: float) -> Figures:
    """Runs the fuzzer until the time is over, or the decoder has crashed."""
    folder, figures = FOLDER / name, Figures()
    for part in ("grown", "seeds", "crashes"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for old in (folder / "crashes").iterdir():
        old.unlink()
    write(folder / "seeds", [*load(name).seeds(), *examples(name, 300)])
    started = time.monotonic()
    said = drive(name, folder, seconds)
    take(figures, said, folder)
    spent_s = time.monotonic() - started
    figures.minutes = round(spent_s / 60, 2)
    figures.inputs_per_s = round(figures.inputs / spent_s, 1)
    crashes = {path.read_bytes(): path for path in (folder / "crashes").iterdir()}
    figures.crashes_found = figures.crashes_open = len(crashes)
    for crash in crashes.values():
        print("\n".join(cause(said)), flush=True)
        keep_crash(name, crash)
    return figures


def drive(name: str, folder: Path, seconds: float) -> str:
    """Lines of one process of the fuzzer."""
    (CORPUS / name).mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    with log.open("wb") as out:
        subprocess.run(
            [sys.executable, str(ROOT / "tests/fuzz/drive.py"), name,
             str(folder / "grown"), str(folder / "seeds"), str(CORPUS / name),
             f"-max_total_time={int(seconds)}", f"-timeout={HANG_S}",
             f"-rss_limit_mb={RESIDENT_MB}", f"-artifact_prefix={folder}/crashes/",
             "-print_final_stats=1", "-verbosity=1"],
            stdout=out, stderr=out, env={**os.environ, "PYTHONSAFEPATH": "1"}, check=False,
        )  # fmt: skip
    return log.read_text(errors="replace")


def take(figures: Figures, said: str, folder: Path) -> None:
    """Adds what the process said. Raises RuntimeError if it did not fuzz at all."""
    units = re.findall(r"stat::number_of_executed_units:\s*(\d+)", said)
    units = units or re.findall(r"^#(\d+)\t", said, re.MULTILINE)
    if not units:
        raise RuntimeError(f"the fuzzer did not run: see {folder}/log.txt\n{said[-2000:]}")
    figures.inputs += int(units[-1])
    figures.edges = max([figures.edges, *map(int, re.findall(r"\bcov: (\d+)", said))])
    peaks = map(int, re.findall(r"stat::peak_rss_mb:\s*(\d+)", said))
    figures.resident_mb = max([figures.resident_mb, *peaks])


def cause(said: str) -> Iterable[str]:
    """The lines of the error, and where its input is."""
    lines = said.splitlines()
    starts = [i for i, line in enumerate(lines) if "ERROR" in line or "Uncaught" in line]
    first = starts[0] if starts else 0
    return [line for line in lines[first : first + 40] if "Instrumenting" not in line]


def keep_crash(name: str, crash: Path) -> None:
    """Moves the input of a crash into the corpus."""
    data = crash.read_bytes()
    (CORPUS / name / f"crash-{name_of(data)}").write_bytes(data)
    crash.unlink()


def write(folder: Path, inputs: Iterable[bytes]) -> None:
    for data in inputs:
        (folder / name_of(data)).write_bytes(data)


def shrink(name: str) -> None:
    """The smallest inputs that reach every branch become the corpus; crashes stay in it."""
    folder = FOLDER / name
    least = folder / "least"
    least.mkdir(exist_ok=True)
    for old in least.iterdir():
        old.unlink()
    (CORPUS / name).mkdir(parents=True, exist_ok=True)
    again, drive_py = folder / "again.sh", ROOT / "tests/fuzz/drive.py"
    again.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{drive_py}" {name} "$@"\n')
    again.chmod(0o755)
    sources = [least, folder / "grown", folder / "seeds", CORPUS / name]
    subprocess.run(
        [str(again), "-merge=1", *map(str, sources)], capture_output=True, check=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", "NARROWS_FUZZ_AGAIN": str(again)},
    )  # fmt: skip
    for old in (CORPUS / name).iterdir():
        if not old.name.startswith("crash-"):
            old.unlink()
    left = CORPUS_BYTES_MAX
    for path in sorted(least.iterdir(), key=lambda each: (each.stat().st_size, each.name)):
        left -= path.stat().st_size
        if left < 0 or path.stat().st_size > FILE_BYTES_MAX:
            break
        write(CORPUS / name, [path.read_bytes()])


def add_to(report: Path, name: str, new: Figures) -> None:
    """Adds the figures of a run to those of the runs before it."""
    known: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {"decoders": {}}
    decoders: dict[str, dict[str, Any]] = known["decoders"]
    old = Figures(**decoders.get(name, {}))
    old.inputs_per_s = new.inputs_per_s
    old.edges, old.resident_mb = new.edges, max(old.resident_mb, new.resident_mb)
    old.minutes = round(old.minutes + new.minutes, 2)
    old.inputs += new.inputs
    old.crashes_found += new.crashes_found
    old.crashes_open = new.crashes_open
    decoders[name] = asdict(old)
    known["inputs"] = sum(int(each["inputs"]) for each in decoders.values())
    known["minutes"] = round(sum(each["minutes"] for each in decoders.values()), 1)
    report.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
