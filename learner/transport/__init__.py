"""Connects one learner process to the broker: sockets, a background thread, pushes and copies.

`Client` is made of one `ClientOptions` and used by the training thread; it calls the model's
parameters through the `ParameterHost` of the options. Others import these three, and benches also
the arithmetic of a push: `PushWork`, `Residuals` and `encode_push`. What decides lies in
`learner/session`; here are only threads, sockets and buffers.
"""

from narrows.learner.transport.client import Client
from narrows.learner.transport.options import ClientOptions, ParameterHost
from narrows.learner.transport.push import PushWork, Residuals, encode_push

__all__ = [
    "Client",
    "ClientOptions",
    "ParameterHost",
    "PushWork",
    "Residuals",
    "encode_push",
]
