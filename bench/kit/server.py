"""The server of forks alone loads this: the modules that its children need, and a fast end."""

import atexit
import os

import narrows.__main__
import narrows.broker.cli.broker
import narrows.learner.learner  # noqa: F401

# Python takes a second to clear torch away, and a bench that is over would still show meanwhile.
atexit.register(os._exit, 0)
