"""A clear error from commands that need PyTorch, before they begin."""

from __future__ import annotations

import importlib.util

from narrows.proto.errors import ConfigError


def need_torch() -> None:
    """Raises ConfigError without PyTorch: the package can be installed for a broker alone."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "this command needs PyTorch",
            remedy="pip install '.[learner]' in the checkout"
            " (the broker and `narrows status` do without)",
        )
