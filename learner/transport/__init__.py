"""The learner's background: sockets and threads between session, module and line."""

from narrows.learner.transport.client import Client
from narrows.learner.transport.push import PushWork, Residuals, encode_push
from narrows.learner.transport.thread import ParameterHost

__all__ = [
    "Client",
    "ParameterHost",
    "PushWork",
    "Residuals",
    "encode_push",
]
