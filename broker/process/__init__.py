"""The broker's process: sockets, threads, and the loop between syncer, merge and disk."""

from narrows.broker.process.service import Service

__all__ = [
    "Service",
]
