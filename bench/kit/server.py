"""Loaded by the server of forks alone: what its children need, and an end at once."""

import atexit
import os

import torch._dynamo  # noqa: F401  Else each process would import it, for seconds.

import narrows.__main__
import narrows.broker.cli.broker
import narrows.broker.cli.status
import narrows.learner.learner  # noqa: F401

# Python takes a second to clear torch away, in which a bench that is over would still show.
atexit.register(os._exit, 0)
