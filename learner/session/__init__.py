"""Decides for one learner when to join, push, adopt and leave. [pure]

`Session` is a state machine: an event goes in with the time, effects come out in order. It has no
socket, thread or clock, so the simulator runs the very code that runs in production. Others import
`Session` with the `Identity` that it speaks for, the `events` module with all events and effects,
and the `SessionView` that other threads read. `JoinWatch` says when a join has failed, from the
`DataConnections` that the shell sees.
"""

from narrows.learner.session import events
from narrows.learner.session.dialer import Connection
from narrows.learner.session.identity import Identity
from narrows.learner.session.joining import DataConnection, DataConnections, JoinWatch
from narrows.learner.session.machine import Session
from narrows.learner.session.view import SessionView

__all__ = [
    "Connection",
    "DataConnection",
    "DataConnections",
    "Identity",
    "JoinWatch",
    "Session",
    "SessionView",
    "events",
]
