"""The server of forks alone loads this: the modules that its children need, and a fast end."""

import atexit
import os

import torch._dynamo  # noqa: F401  Else each process would import it, for seconds.

import narrows.__main__
import narrows.broker.cli.broker
import narrows.broker.cli.status
import narrows.learner.learner  # noqa: F401

# Python takes a second to clear torch away, and a bench that is over would still show meanwhile.
atexit.register(os._exit, 0)
