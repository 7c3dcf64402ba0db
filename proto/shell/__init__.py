"""The few parts with I/O that the shells of both sides share."""

from narrows.proto.shell.event_file import EventFile
from narrows.proto.shell.wake import WakePipe

__all__ = [
    "EventFile",
    "WakePipe",
]
