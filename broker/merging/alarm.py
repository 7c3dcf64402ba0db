"""The alarm warns of a push that is far longer than its learner's pushes have been.

It clips nothing and changes no weight, and it compares nobody with anybody else: unequal learners
are no fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from narrows.broker.records import Version
from narrows.proto.messages import LEARNERS_MAX

RATIO: Final = 10.0
"""A push is told if it is so many times as long as its learner's running mean."""

PUSHES_MIN: Final = 4
"""The mean of a learner and fragment is trusted from so many pushes on."""

MEMORY: Final = 16
"""The running mean remembers about so many pushes."""


@dataclass(eq=False)
class Alarm:
    """Running means of norm / sqrt(steps), per fragment and learner: a random walk grows with the
    root of its steps."""

    _means: dict[int, dict[str, tuple[int, float]]] = field(default_factory=dict)
    """Fragment -> learner -> number of its pushes, MEMORY at most, and their mean."""

    def hear(self, version: Version) -> list[str]:
        """Takes in the pushes of a version; one line for each that is far too long."""
        lines: list[str] = []
        means = self._means.setdefault(version.state.fragment, {})
        for push, norm in zip(version.round_.contributions, version.norms, strict=True):
            count, mean = means.pop(push.learner, (0, 0.0))
            length = norm / math.sqrt(push.steps)
            if count >= PUSHES_MIN and length > RATIO * mean > 0.0:
                lines.append(
                    f"push {push.push_id} of {push.learner}, fragment {version.state.fragment}: "
                    f"norm {norm:.3g} in {push.steps} steps is {length / mean:.0f} times that "
                    "learner's mean. It was merged as it came: look at its loss and its data; a "
                    "start without its optimizer's state does this, too"
                )
                # Limited like this it cannot hide the next long push, yet the mean still moves to
                # a new level that lasts.
                length = RATIO * mean
            count = min(count + 1, MEMORY)
            means[push.learner] = count, mean + (length - mean) / count
            if len(means) > LEARNERS_MAX:
                del means[next(iter(means))]
        return lines
