"""Reads and adopts the parameters of one process; the host never sees a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from narrows.learner.push import (
    Adoption,
    Copy,
    HostSnapshot,
    Snapshot,
    adopt_on_device,
    adopt_on_host,
    snapshot_on_device,
    to_device,
)
from narrows.proto.codec import F32, empty_f32, round_to_dtype
from narrows.proto.layout import Fragment, Piece
from narrows.proto.messages import DtypeName

if TYPE_CHECKING:
    import torch


class ParameterSource(Protocol):
    """The tensors of a model, by piece."""

    def read(self, fragment: Fragment, out: F32) -> None:
        """Copies a fragment to host memory; `out` is float32 (n,)."""
        ...

    def write(self, fragment: Fragment, values: F32) -> None:
        """Overwrites a fragment with float32 (n,), rounded to the parameters' precision."""
        ...

    def view(self, piece: Piece) -> Any:
        """The elements of a piece, sharing the parameter's memory: a float32 array (count,), or a
        torch tensor of any shape, precision and device with so many elements."""
        ...

    def dtype(self, piece: Piece) -> DtypeName:
        """The parameter's own precision."""
        ...


class Island:
    """The parameters as the host uses them.

    `copy` is called on a worker, everything else on the training thread between two steps.
    `on_device` forces the GPU's path for tensors wherever they are; None: it is taken for a
    fragment that is on one GPU.
    """

    def __init__(self, source: ParameterSource, *, on_device: bool | None = None) -> None:
        self._source, self._on_device = source, on_device

    def copy(self, fragment: Fragment, values: F32) -> Copy:
        """Prepares a published copy (n,) for `snapshot` and `adopt`, so that they only compute."""
        rounded = values
        if any(self._source.dtype(piece) != "float32" for piece in fragment.pieces):
            rounded = empty_f32(fragment.elements)
            for piece in fragment.pieces:
                span = slice(piece.offset, piece.offset + piece.count)
                round_to_dtype(values[span], self._source.dtype(piece), rounded[span])
        device = self._device(fragment)
        return Copy(values, rounded if device is None else to_device(rounded, device))

    def read(self, fragment: Fragment) -> F32:
        """The parameters (n,) of a fragment, for version 0."""
        values = empty_f32(fragment.elements)
        self._source.read(fragment, values)
        return values

    def snapshot(self, fragment: Fragment, published: Copy) -> Snapshot:
        """Copies the parameters of a fragment now; the snapshot is encoded later, on a worker."""
        if isinstance(published.rounded, np.ndarray):
            return HostSnapshot(published.rounded, self.read(fragment))
        return snapshot_on_device(self._views(fragment), published.rounded)

    def adopt(self, fragment: Fragment, rule: Adoption) -> None:
        """Moves the parameters in place by the rule of push.py."""
        if not isinstance(rule.new.rounded, np.ndarray):
            adopt_on_device(fragment, self._views(fragment), rule)
        elif (arrays := self._arrays(fragment)) is not None:
            adopt_on_host(fragment, arrays, rule)
        else:
            values = self.read(fragment)
            parts = np.split(values, fragment.bounds[1:-1])
            adopt_on_host(fragment, parts, rule)
            self._source.write(fragment, values)

    def overwrite(self, fragment: Fragment, new: Copy) -> None:
        """Makes the parameters equal to a copy, whatever they were."""
        self._source.write(fragment, new.values)

    def _views(self, fragment: Fragment) -> list[Any]:
        return [self._source.view(piece) for piece in fragment.pieces]

    def _arrays(self, fragment: Fragment) -> list[F32] | None:
        """The pieces as float32 arrays that share the parameters' memory; None: they cannot."""
        arrays: list[F32] = []
        for piece, view in zip(fragment.pieces, self._views(fragment), strict=True):
            if not isinstance(view, np.ndarray):
                if view.device.type != "cpu" or self._source.dtype(piece) != "float32":
                    return None
                if view.shape != (piece.count,):
                    return None
                view = view.numpy()
            arrays.append(view)
        return arrays

    def _device(self, fragment: Fragment) -> torch.device | None:
        """The device where this fragment is coded and adopted; None: in host memory."""
        views = self._views(fragment)
        if self._on_device is False or any(isinstance(view, np.ndarray) for view in views):
            return None
        devices = {view.device for view in views}
        device: torch.device = views[0].device
        on_gpu = len(devices) == 1 and device.type == "cuda"
        return device if on_gpu or self._on_device else None
