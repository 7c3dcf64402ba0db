"""The session decides: when to join, push, adopt and leave. [pure]"""

from narrows.learner.session import events
from narrows.learner.session.connection import Connection, Identity
from narrows.learner.session.joining import DataPath, JoinWatch, Line
from narrows.learner.session.machine import Session

__all__ = [
    "Connection",
    "DataPath",
    "Identity",
    "JoinWatch",
    "Line",
    "Session",
    "events",
]
