"""Whether the rates suffice for the sync period, and what would. [pure]"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from narrows.broker import events as ev
from narrows.broker.state import RunState
from narrows.proto.budget import SHARE_USED
from narrows.proto.rate import expected_bits
from narrows.proto.units import format_bits_per_s, format_duration_s

OVERHEAD: Final = 1.08
"""Of headers, packets, acknowledgements and control over the payload."""


@dataclass
class Need:
    """Compares what the fragments need with what the budget gives; says it once."""

    state: RunState
    _said: set[str] = field(default_factory=set[str])

    def forget(self) -> None:
        """The rates are others now."""
        self._said.clear()

    def warn(self) -> list[ev.Effect]:
        """A line for the log for each direction that is too narrow."""
        wan, told, count = (
            self.state.config.wan,
            self.state.settings,
            len(self.state.roster.ready()),
        )
        step_s = self.state.roster.step_s()
        if not count or not step_s:
            return []
        up = expected_bits(told.push_codec, rho=told.push_rho, bits=told.push_bits)
        down = expected_bits(told.publish_codec, rho=told.publish_rho, bits=told.publish_bits)
        return [
            *self._warn("up", up, _narrower(wan.up, wan.total_up / count), step_s),
            *self._warn("down", down, _narrower(wan.down, wan.total_down / count), step_s),
        ]

    def _warn(self, way: str, bits: float, rate: float, step_s: float) -> list[ev.Effect]:
        period = self.state.settings.sync_period_steps
        model_bits = sum(part.elements for part in self.state.table) * bits * OVERHEAD
        needed = model_bits / (period * step_s) / SHARE_USED
        if not rate or needed <= rate or way in self._said:
            return []
        self._said.add(way)
        steps = math.ceil(period * needed / rate)
        text = (
            f"wan.{way} is too little: {bits:.1f} bits per parameter every"
            f" {period} steps of {format_duration_s(step_s)} need {format_bits_per_s(needed)} per"
            f" learner, the budget gives {format_bits_per_s(rate)}: fragments are exchanged every"
            f" {steps} steps instead. Give more, set fragments.sync_period_steps = {steps}, or"
            " have fewer bits sent (codec.push_rho and publish_rho, or codec auto)"
        )
        return [ev.Note("warning", text)]


def _narrower(*rates: float) -> float:
    """The smallest of the rates that are limits; 0 if none is."""
    return min((rate for rate in rates if rate), default=0.0)
