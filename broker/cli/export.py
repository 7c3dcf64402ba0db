"""`narrows export`: the global model as safetensors, or the run's layout as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from narrows.broker.cli.journal import Directory, opened
from narrows.broker.store import export_model
from narrows.proto.errors import ConfigError


def export(directory: Directory, *, to: Path | None = None, layout: bool = False) -> None:
    """Write the global model of a state directory into a safetensors file.

    Parameters
    ----------
    to
        File to write; its metadata name the run and the version of each fragment.
    layout
        Print the layout of the model as JSON instead, for learners in other languages.
    """
    with opened(directory) as history:
        found = history.run.layout
        if found is None:
            raise ConfigError(f"{directory} holds no model yet", expected="a run with version 0")
        if layout:
            named = {"frozen_digest": found.frozen_digest, "entries": found.entries}
            print(msgspec.json.encode(named).decode())
            return
        if to is None:
            raise ConfigError("--to is missing", expected="a file to write", got="none")
        if to.resolve().is_relative_to(directory.resolve()):
            raise ConfigError("--to", expected="a file outside of the state directory", got=str(to))
        states = list(history.states())
        versions = [state.version for state in states]
        export_model(
            to,
            found,
            history.table,
            [state.global_ for state in states],
            {"narrows.run": history.run.run_id, "narrows.versions": json.dumps(versions)},
        )
    print(f"{to}: versions {versions}")
