"""Fit of the rates to the sync period: bits per parameter that they allow, and warnings. [pure]"""

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
"""Fewest bits per parameter of codec auto. Below, fragments are exchanged later instead."""

NEARLY: Final = 0.1
"""Relative change of the bits below which nothing is sent: step times swing."""

OVERHEAD: Final = 1.08
"""Bytes on the line per byte of payload: headers, packets, acknowledgements, control."""


@dataclass
class Need:
    """Compares the rate that the fragments need with the budget; warns once per direction."""

    state: RunState
    _named: set[str] = field(default_factory=set[str])

    def forget(self) -> None:
        """Lets every warning come again: the rates have changed."""
        self._named.clear()

    def affordable(self) -> RunSettings:
        """Settings with the bits per parameter that the rates allow under codec auto.

        The operator's setting is the upper limit. The present bits stay as long as they are nearly
        right: each change is sent to all learners.
        """
        settings, codec = self.state.settings, self.state.config.codec
        # Both directions are looked at alone: lines are often asymmetric.
        up, down = self._rates()
        return structs.replace(
            settings,
            push_bits=self._bits(settings.push_codec, settings.push_bits, codec.push_bits, up),
            publish_bits=self._bits(
                settings.publish_codec, settings.publish_bits, codec.publish_bits, down
            ),
        )

    def _bits(self, setting: str, present: float, most: float, rate: float) -> float:
        step_s, elements = self.state.step_s(), self._elements()
        if setting != AUTO or not step_s or not elements:
            return present
        period_s = self.state.settings.sync_period_steps * step_s
        # Each fragment travels once per period, so all elements share the rate of one period.
        allowed = rate * SHARE_USED * period_s / (elements * OVERHEAD) if rate else most
        bits = min(most, max(BITS_MIN, allowed))
        assert bits > 0.0
        return present if abs(bits - present) <= NEARLY * present else bits

    def _elements(self) -> int:
        return sum(fragment.elements for fragment in self.state.table)

    def _rates(self) -> tuple[float, float]:
        """Rates of one learner up and down while all send; 0: no limit."""
        # The worst case: in the lockstep modes all send at once.
        wan, count = self.state.config.wan, max(1, len(self.state.roster.ready()))
        up = _narrower(wan.up, wan.total_up / count)
        down = _narrower(wan.down, wan.total_down / count)
        assert up >= 0.0 and down >= 0.0
        return up, down

    def warn(self) -> list[ev.Effect]:
        """Returns a line for the log for each direction that is too narrow."""
        settings, step_s = self.state.settings, self.state.step_s()
        if not step_s:
            return []
        rate_up, rate_down = self._rates()
        up = expected_bits(settings.push_codec, rho=settings.push_rho, bits=settings.push_bits)
        down = expected_bits(
            settings.publish_codec, rho=settings.publish_rho, bits=settings.publish_bits
        )
        return [
            *self._warn("up", up, rate_up, step_s),
            *self._warn("down", down, rate_down, step_s),
        ]

    def _warn(self, way: str, bits: float, rate: float, step_s: float) -> list[ev.Effect]:
        assert way in ("up", "down") and bits > 0.0 and step_s > 0.0
        period = self.state.settings.sync_period_steps
        model_bits = self._elements() * bits * OVERHEAD
        needed = model_bits / (period * step_s) / SHARE_USED
        if not rate or needed <= rate or way in self._named:
            return []
        # Step times swing: without memory the same line would come every second.
        self._named.add(way)
        steps = math.ceil(period * needed / rate)
        assert steps >= period, "the line is too narrow, so an exchange takes no less"
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
        """Advice that makes fewer bits be sent; empty if no fewer can be."""
        name = getattr(self.state.settings, f"{what}_codec")
        if name == AUTO:
            return ""
        coarser = f"a larger codec.{what}_rho or " if codec(name).quantised else ""
        return f', or have fewer bits sent: {coarser}codec.{what} = "{AUTO}"'


def _narrower(*rates: float) -> float:
    """Smallest of the rates that are limits; 0 if none is a limit."""
    return min((rate for rate in rates if rate), default=0.0)
