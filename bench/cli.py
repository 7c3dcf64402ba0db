"""`narrows bench NAME`. A bench is imported when it runs, so that the command line is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import cyclopts

BENCHES: Final = {
    "bandwidth": "Measure bits per parameter on the wire, and Gbit/s per site.",
    "chaos": "Kill a broker under load, and look whether anything was lost.",
    "codec": "Measure bits, error and speed of the codecs, beside what others do.",
    "fairness": "Measure the share of each learner's tokens that are merged, however unequal.",
    "goodput": "Measure the useful share of a large cluster's time when its chips fail.",
    "loop": "Measure rounds per second, and what a round costs at either end.",
    "peers": "Measure seconds per exchange and time computing on a line, beside other systems.",
    "quality": "Measure the loss that a run reaches, beside data parallel at equal tokens.",
    "wan": "Measure what is promised of a line: budget, distance, relays, revocation.",
}

bench = cyclopts.App(name="bench", help="Measure codec, bandwidth, rounds, lives under failure.")
for _name, _help in BENCHES.items():
    bench.command(f"narrows.bench.{_name}:{_name}", name=_name, help=_help)


@bench.command(name="all")
def run_all(*, folder: Path = Path("runs/bench")) -> None:
    """Run every bench in its short form, one after the other.

    Parameters
    ----------
    folder
        Folder for the rows of each bench, in NAME.json.
    """
    from narrows.proto.errors import ErrorCode, NarrowsError

    failed: dict[str, Exception] = {}
    for name in BENCHES:
        print(f"-- {name}", flush=True)
        options = ["--short", "--json", str(folder / f"{name}.json")]
        try:
            bench([name, *options], result_action="return_value")
        except (NarrowsError, OSError) as error:
            failed[name] = error
            print(f"{name} failed: {error}", flush=True)
    if failed:
        raise NarrowsError(
            ErrorCode.UNFINISHED,
            f"benches that failed: {', '.join(failed)}",
            expected="rows of all",
            got=str(next(iter(failed.values()))),
        )
