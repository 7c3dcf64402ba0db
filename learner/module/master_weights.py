"""Finds optimizers that keep master weights of their own and so undo what was adopted."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from narrows.proto.errors import ErrorCode, LocalProtocolError

if TYPE_CHECKING:
    from narrows.proto.fragments import Fragment, Piece

Samples: TypeAlias = list[Tensor]

SAMPLED_PIECES = 16
SAMPLED_ELEMENTS = 16
CLEARLY = 4.0
"""One distance is clearly larger than another from this ratio on."""
UNDONE_RUNNING = 2
"""Adoptions undone one after the other before it is called a fault."""
KEPT_ENOUGH = 8
"""Adoptions seen to last after which an optimizer is trusted and no longer watched."""


@dataclass
class _Adoption:
    """A few elements of an adopted fragment, followed over the next two steps."""

    pieces: Sequence[Piece]
    before: Samples
    adopted: Samples
    stepped: Samples | None = None


class MasterWeightsWatch:
    """Follows samples of what is adopted over the next two steps.

    A step from master weights leads back to where the weights were before the adoption, however
    far that had taken them. An honest step may do so by chance, if the adoption was only about one
    step long: therefore the step after it is the yardstick, and only two cases running raise.
    """

    def __init__(self, view: Callable[[Piece], Tensor]) -> None:
        self._view = view
        self._pending: dict[int, _Adoption] = {}
        self._undone_running = 0
        self._kept = 0

    @contextmanager
    def adoption(self, fragment: Fragment) -> Generator[None]:
        """Around the copying: samples the fragment before and after."""
        # To sample is to wait for the device: an optimizer that has proved itself is spared.
        if self._kept >= KEPT_ENOUGH:
            yield
            return
        pieces = fragment.pieces[:: math.ceil(len(fragment.pieces) / SAMPLED_PIECES)]
        before = self._sample(pieces)
        yield
        self._pending[fragment.index] = _Adoption(pieces, before, self._sample(pieces))

    def check(self) -> None:
        """Judges what was adopted two boundaries ago; the adoptions of one boundary as one."""
        back = away = step = 0.0
        for index, adoption in list(self._pending.items()):
            now = self._sample(adoption.pieces)
            if adoption.stepped is None:
                adoption.stepped = now
                continue
            # Together the fragments are less at the mercy of chance than each by itself.
            back += _square_distance(adoption.stepped, adoption.before)
            away += _square_distance(adoption.stepped, adoption.adopted)
            step += _square_distance(adoption.stepped, now)
            del self._pending[index]
        if max(back, step) * CLEARLY**2 < away:
            self._undone_running += 1
        elif away * CLEARLY**2 < back:
            self._undone_running = 0
            self._kept += 1
        if self._undone_running >= UNDONE_RUNNING:
            raise LocalProtocolError(
                ErrorCode.MISUSE,
                "the optimizer's step took back what was adopted, twice running: it seems to keep"
                " master weights of its own and to copy them over the model's parameters",
                expected="steps that start from the values of the model's parameters",
                remedy="Use an optimizer that updates the model's parameters themselves, for"
                " instance on a float32 model under torch.autocast.",
            )

    def _sample(self, pieces: Sequence[Piece]) -> Samples:
        return [_sampled(self._view(piece)) for piece in pieces]


def _sampled(view: Tensor) -> Tensor:
    """At most SAMPLED_ELEMENTS elements as a float32 copy on the same device."""
    while view.dim() > 1:
        view = view[view.shape[0] // 2]
    stride = math.ceil(view.numel() / SAMPLED_ELEMENTS)
    return view[::stride].to(torch.float32, copy=True)


def _square_distance(ours: Samples, theirs: Samples) -> float:
    return sum(float((a - b).square().sum()) for a, b in zip(ours, theirs, strict=True))
