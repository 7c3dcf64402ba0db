"""Whether the rates suffice for the sync period, and how many bits they allow. [pure]"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.run import RunState
from narrows.proto.codec import AUTO, codec, expected_bits
from narrows.proto.flow import SHARE_USED
from narrows.proto.messages import RunSettings
from narrows.proto.units import format_bits_per_s, format_duration_s

BITS_MIN: Final = 1.0
"""Codec auto goes no lower: below, fragments are exchanged later instead."""

NEARLY: Final = 0.1
"""Smaller changes of the bits are not told: step times swing."""

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

    def affordable(self) -> RunSettings:
        """The settings with the bits per parameter that the rates allow under codec auto, at most
        what the operator asked for; those that are told as long as they are nearly that."""
        told, codec = self.state.settings, self.state.config.codec
        up, down = self._rates()
        return structs.replace(
            told,
            push_bits=self._bits(told.push_codec, told.push_bits, codec.push_bits, up),
            publish_bits=self._bits(
                told.publish_codec, told.publish_bits, codec.publish_bits, down
            ),
        )

    def _bits(self, setting: str, told: float, most: float, rate: float) -> float:
        step_s, elements = self.state.roster.step_s(), self._elements()
        if setting != AUTO or not step_s or not elements:
            return told
        period_s = self.state.settings.sync_period_steps * step_s
        allowed = rate * SHARE_USED * period_s / (elements * OVERHEAD) if rate else most
        bits = min(most, max(BITS_MIN, allowed))
        return told if abs(bits - told) <= NEARLY * told else bits

    def _elements(self) -> int:
        return sum(part.elements for part in self.state.table)

    def _rates(self) -> tuple[float, float]:
        """What one learner has up and down while all send; 0: no limit."""
        wan, count = self.state.config.wan, max(1, len(self.state.roster.ready()))
        up = _narrower(wan.up, wan.total_up / count)
        return up, _narrower(wan.down, wan.total_down / count)

    def warn(self) -> list[ev.Effect]:
        """A line for the log for each direction that is too narrow."""
        told, step_s = self.state.settings, self.state.roster.step_s()
        if not step_s:
            return []
        rate_up, rate_down = self._rates()
        up = expected_bits(told.push_codec, rho=told.push_rho, bits=told.push_bits)
        down = expected_bits(told.publish_codec, rho=told.publish_rho, bits=told.publish_bits)
        return [
            *self._warn("up", up, rate_up, step_s),
            *self._warn("down", down, rate_down, step_s),
        ]

    def _warn(self, way: str, bits: float, rate: float, step_s: float) -> list[ev.Effect]:
        period = self.state.settings.sync_period_steps
        model_bits = self._elements() * bits * OVERHEAD
        needed = model_bits / (period * step_s) / SHARE_USED
        if not rate or needed <= rate or way in self._said:
            return []
        self._said.add(way)
        steps = math.ceil(period * needed / rate)
        fewer = self._fewer_bits("push" if way == "up" else "publish")
        text = (
            f"wan.{way} or wan.total_{way} is too little: {bits:.1f} bits per parameter every"
            f" {period} steps of {format_duration_s(step_s)} need {format_bits_per_s(needed)} per"
            f" learner, the budget gives {format_bits_per_s(rate)}: fragments are exchanged every"
            f" {steps} steps instead. Give more, or set fragments.sync_period_steps = {steps}"
            f"{fewer}"
        )
        return [ev.Note("warning", text)]

    def _fewer_bits(self, what: str) -> str:
        """What sends fewer bits; "" if as few are sent as can be."""
        name = getattr(self.state.settings, f"{what}_codec")
        if name == AUTO:
            return ""
        coarser = f"a larger codec.{what}_rho or " if codec(name).quantised else ""
        return f', or have fewer bits sent: {coarser}codec.{what} = "{AUTO}"'


def _narrower(*rates: float) -> float:
    """The smallest of the rates that are limits; 0 if none is."""
    return min((rate for rate in rates if rate), default=0.0)
