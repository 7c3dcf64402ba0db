"""The few parts with I/O that the shells of both sides share.

`EventFile` writes JSON lines for monitors, `WakePipe` wakes a thread that polls sockets, and
`guarded` carries a worker's error to the loop. They stand here because broker and learner may not
import each other. The rest of proto is pure: it may not import this package.
"""

from narrows.proto.shell.event_file import EventFile
from narrows.proto.shell.guard import guarded, raising
from narrows.proto.shell.wake import WakePipe

__all__ = [
    "EventFile",
    "WakePipe",
    "guarded",
    "raising",
]
