"""The broker's process: sockets, threads, and the loop between syncer, merge and disk."""

from narrows.broker.process.downlink import Downlink
from narrows.broker.process.service import Service
from narrows.broker.process.subscriptions import Subscriptions

__all__ = [
    "Downlink",
    "Service",
    "Subscriptions",
]
