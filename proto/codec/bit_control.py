"""Rate control: chooses the quantisation step that yields the bits asked for. [pure]

The entropy of a quantised value falls by one bit each time the step doubles, whatever the data's
distribution, as long as the step is small. So the step follows the target in the logarithm. The
step travels as the scales of the payload and the codec in the header: a receiver needs no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from narrows.proto.codec.codecs import codec_names

AUTO: Final = "auto"
"""The setting that names no codec: a bit rate decides, push by push."""

FINE, COARSE = "int8-zstd", "int4-zstd"

GAUSSIAN_BITS: Final = 0.5 * math.log2(2 * math.pi * math.e)
"""Entropy in bits of Gaussian data at a step of one rms, for small steps. The search begins
there."""

GAIN: Final = 0.5
"""Share of the error that one observation corrects. Half, so that noise does not make the step
swing."""

RHO_MIN, RHO_MAX = 1 / 64, 4.0
"""Below the smallest step int8 has no codes left; above the largest hardly any value is sent."""

CLIPPED_FROM: Final = 1.5
"""Ratio of the error to the part that the steps explain, from which on clipping causes much of
it."""

BACK_OFF: Final = 1.25
"""Factor by which the step grows where even int8 clips too much."""

SINK: Final = 0.99
"""Factor of the floor per exchange: it sinks slowly, so that a smaller step is tried again."""

FINE_BELOW, COARSE_ABOVE = 0.40, 0.48
"""Steps at which the codec changes. int4 clips values beyond 7 steps, which is too many of them
below a step of 0.4. Two bounds, so that the codec does not alternate."""


@dataclass
class BitControl:
    """Codec and step of one fragment in one direction."""

    codec: str
    rho: float
    target_bits: float | None
    """Bits per parameter on the wire; None: codec and step are fixed."""
    is_wide: bool = False
    """True once int4 has clipped too much of this fragment: its values vary too widely."""
    rho_floor: float = RHO_MIN
    """Smallest step: below it even int8 has clipped too much."""

    def observe(self, bits_per_param: float, error_ratio: float) -> None:
        """Takes in the bits of an exchange, so that the next one comes closer to the target.

        `error_ratio` is transfer.error_ratio. Where clipping causes most of the error, a smaller
        step takes fewer bits and loses more, so the usual correction would run away. Then the
        codec with the wider range comes first, and after it a larger step.
        """
        assert bits_per_param >= 0 and error_ratio >= 0, (bits_per_param, error_ratio)
        if self.target_bits is None:
            return
        self.rho_floor *= SINK
        if error_ratio >= CLIPPED_FROM:
            if self.codec == FINE:
                self.rho_floor = self.rho * BACK_OFF
            self.is_wide = True
        error = min(max(bits_per_param - self.target_bits, -1.0), 1.0)
        self.set_rho(self.rho * 2.0 ** (GAIN * error))

    def aim(self, bits: float) -> None:
        """Sets another target, if this control aims at one."""
        if self.target_bits is not None:
            self.target_bits = bits

    def resume(self, codec: str, rho: float) -> None:
        """Goes on from a step that was used before. A fixed one stays as it is."""
        if self.target_bits is not None and codec in codecs_of(AUTO):
            self.is_wide |= codec == FINE and rho > COARSE_ABOVE
            self.codec, self.rho = codec, rho

    def set_rho(self, rho: float) -> None:
        """The step, within bounds, and the codec that suits it."""
        self.rho = min(max(rho, self.rho_floor, RHO_MIN), RHO_MAX)
        if self.is_wide or self.rho < FINE_BELOW:
            self.codec = FINE
        elif self.rho > COARSE_ABOVE:
            self.codec = COARSE
        assert RHO_MIN <= self.rho <= RHO_MAX, self


def make_bit_control(setting: str, *, rho: float, bits: float) -> BitControl:
    """For a codec's name: fixed, with this `rho`. For AUTO: aims at `bits` per parameter."""
    if setting != AUTO:
        return BitControl(setting, rho, None)
    control = BitControl(COARSE, 1.0, bits)
    control.set_rho(2.0 ** (GAUSSIAN_BITS - bits))
    return control


def expected_bits(setting: str, *, rho: float, bits: float) -> float:
    """Bits per parameter of Gaussian data under a codec setting, headers left out."""
    if setting == AUTO:
        return bits
    assert rho > 0 and bits > 0, (rho, bits)
    fixed = {"bf16": 16.0, "raw32": 32.0, "f32-blosc2": 32.0}
    return fixed.get(setting) or max(0.1, GAUSSIAN_BITS - math.log2(rho))


def setting_names() -> tuple[str, ...]:
    """The values of a codec setting."""
    return (*codec_names(), AUTO)


def codecs_of(setting: str) -> frozenset[str]:
    """The codecs that may stand in a header under this setting."""
    return frozenset((FINE, COARSE) if setting == AUTO else (setting,))
