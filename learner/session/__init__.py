"""The session decides: when to join, push, adopt and leave. [pure]"""

from narrows.learner.session import events
from narrows.learner.session.connection import Connection, Identity
from narrows.learner.session.joining import DataConnection, DataConnections, JoinWatch
from narrows.learner.session.machine import Session

__all__ = [
    "Connection",
    "DataConnection",
    "DataConnections",
    "Identity",
    "JoinWatch",
    "Session",
    "events",
]
