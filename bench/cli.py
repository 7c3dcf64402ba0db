"""`narrows bench NAME`: a bench is imported when it runs."""

from __future__ import annotations

from typing import Final

import cyclopts

BENCHES: Final = {
    "bandwidth": "Measure bits per parameter on the wire, Gbit/s per site, and the budget.",
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
