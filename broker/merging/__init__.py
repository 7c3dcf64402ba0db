"""Merging: the arithmetic that makes a round's contributions the next version of a fragment.

    merge(fragment, before, round_, decoded=None) -> Version     pure; on a worker, and at a replay
    Model(table, states)      the newest durable states: install(version), publication(f, v)
    Alarm().hear(version)     lines about pushes that are far too long; clips nothing

The same inputs give the same bits on every machine: sums run in the order of the contributions,
over elements in element order, in strict float32.
"""

from __future__ import annotations

from narrows.broker.merging.alarm import Alarm
from narrows.broker.merging.merge import merge, warm_up
from narrows.broker.merging.model import Model

__all__ = ["Alarm", "Model", "merge", "warm_up"]
