"""Writes outer gradients of a run to a file: real data for benches of the codecs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from narrows.learner.transport import Client, ClientOptions, ParameterHost
from narrows.proto.codec import F32
from narrows.proto.fragments import Fragment

RECORDED_ROUND: Final = 50
"""The round whose outer gradient is kept for each fragment: the first rounds are not typical."""


class RecordingHost:
    """Stands between a learner and its parameters, and keeps one outer gradient per fragment.

    The file is a safetensors file with `outer_grad.i`, float32 (n,), and `bounds.i`, int64
    (k + 1,): the bounds of the tensor pieces in fragment i.
    """

    def __init__(self, host: ParameterHost, path: Path) -> None:
        self._host, self._path = host, path
        self._adopted: dict[int, F32] = {}
        self._rounds: dict[int, int] = {}
        self._recorded: dict[str, Any] = {}

    def snapshot(self, fragment: Fragment, out: F32) -> None:
        """See ParameterHost."""
        self._host.snapshot(fragment, out)
        index = fragment.index
        self._rounds[index] = self._rounds.get(index, 0) + 1
        if self._rounds[index] == RECORDED_ROUND and index in self._adopted:
            self._recorded[f"outer_grad.{index}"] = self._adopted[index] - out
            self._recorded[f"bounds.{index}"] = np.array(fragment.bounds)
            save_file(self._recorded, self._path)

    def adopt(self, fragment: Fragment, values: F32) -> None:
        """See ParameterHost."""
        self._host.adopt(fragment, values)
        self._adopted[fragment.index] = values


def recording_client(path: Path, options: ClientOptions) -> Client:
    """A client whose outer gradients are recorded; for the `connect` of a Learner."""
    return Client(replace(options, host=RecordingHost(options.host, path)))
