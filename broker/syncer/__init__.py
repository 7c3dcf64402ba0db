"""The broker's decisions, without sockets, threads or a clock. Begin with `rounds.py`."""

from __future__ import annotations

from narrows.broker.syncer.machine import Syncer

__all__ = ["Syncer"]
