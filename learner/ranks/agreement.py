"""The ranks of an island tell each other one vector before each step, which is summed over all.

Everything that ranks may say out of step with each other is a vector of this one size, because gloo
ends the process when messages of two sizes meet. Each rank has a number of its own in it, which
tells where in its loop it is. So ranks that are not at the same place find out, and the error names
them all. Its parts:

    Order   what the leader tells the others to do with fragments, if they have met for that
    Said    what the ranks agree on
    places  a number of each rank
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrows.learner.session import View
from narrows.proto.errors import ErrorCode, LocalProtocolError

HEALTHS: Final = (
    "joining", "connected", "waiting", "blocked", "offline", "ended", "refused", "final",
)  # fmt: skip
"""The words of `View.health`; a vector holds their places here. Whoever breaks off has ended, if
nothing behind that word befell it before."""

RANKS_TOLD: Final = 8
"""An error names so many ranks of each place."""


class Doing(IntEnum):
    """Where in its loop a rank is, besides the number of its steps."""

    ENTERING = 0
    STEPPING = 1
    ASKING = 2
    EXCHANGING = 3
    LEAVING = 4
    BREAKING_OFF = 5


WORDS: Final = {
    Doing.ENTERING: "enters",
    Doing.STEPPING: "has made {} steps",
    Doing.ASKING: "asks for a batch after {} steps",
    Doing.EXCHANGING: "exchanges fragments after {} steps",
    Doing.LEAVING: "leaves after {} steps",
    Doing.BREAKING_OFF: "has broken off after {} steps",
}


class Act(IntEnum):
    """All ranks do this next, after they have met."""

    NONE = 0
    READ = 1
    """Gather a fragment at the leader."""
    MOVE = 2
    """Scatter a fragment from it, and adopt it."""
    HAND_OVER = 3
    """Scatter its published movement from there, and mend the optimizer's moments."""
    DONE = 4
    """Go on training."""
    FAIL = 5
    """Raise the leader's error."""


class Order(NamedTuple):
    """The leader's order to the others, in numbers."""

    act: float = Act.NONE
    number: float = 0.0
    """The fragment's index; the bytes of an error."""
    fragments: float = 0.0
    """Number of fragments of the run."""
    keep: float = 0.0
    """That of the adoption; the share of a hand-over."""


NO_ORDER: Final = Order()


class Said(NamedTuple):
    """The fields that all agree on: those that the leader says, then sums over ranks."""

    due: float = 0.0
    """The boundary after the coming step exchanges something, or waits."""
    stopping: float = 0.0
    run_tokens: float = 0.0
    step_tokens: float = 0.0
    goal_tokens: float = 0.0
    ramp_steps: float = 0.0
    health: float = 0.0
    """Place in HEALTHS."""
    tokens: float = 0.0
    """Those of the ranks that count."""
    loss_sum: float = 0.0
    """Losses times their tokens."""
    loss_tokens: float = 0.0
    """Tokens of the ranks that know a loss."""
    exhausted: float = 0.0
    """Ranks whose loader has no further batch."""
    disowned: float = 0.0
    """Ranks whose parameters others have changed at the end."""

    @property
    def loss(self) -> float | None:
        """The mean over tokens; None: no rank knows one."""
        return self.loss_sum / self.loss_tokens if self.loss_tokens else None

    def view(self, steps: int) -> View:
        """The loops of all ranks see this from now on, after so many steps."""
        return View(
            stopping=bool(self.stopping), run_tokens=self.run_tokens, step_tokens=self.step_tokens,
            goal_tokens=int(self.goal_tokens), steps=steps, ramp_steps=int(self.ramp_steps),
            health=HEALTHS[int(self.health)],
        )  # fmt: skip


def led(view: View, *, due: bool) -> Said:
    """The leader's part."""
    return Said(
        due=due, stopping=view.stopping, run_tokens=view.run_tokens, step_tokens=view.step_tokens,
        goal_tokens=view.goal_tokens, ramp_steps=view.ramp_steps,
        health=HEALTHS.index(view.health),
    )  # fmt: skip


NOTHING_SAID: Final = Said()

ORDER: Final = slice(0, len(Order._fields))
SAID: Final = slice(ORDER.stop, ORDER.stop + len(Said._fields))
PLACES: Final = slice(SAID.stop, None)


def vector_of(
    said: Said, rank: int, ranks: int, steps: int, doing: Doing, order: Order = NO_ORDER
) -> NDArray[np.float64]:
    """One rank's part of the sum."""
    values = np.zeros(SAID.stop + ranks)
    values[ORDER] = order
    values[SAID] = said
    values[PLACES][rank] = steps * len(Doing) + doing
    return values


def read_vector(values: NDArray[np.float64]) -> tuple[Order, Said]:
    """The sum. Raises LocalProtocolError MISUSE unless all ranks are at the same place."""
    check_places(values[PLACES].astype(int).tolist())
    return Order._make(values[ORDER].tolist()), Said._make(values[SAID].tolist())


def check_places(places: Sequence[int]) -> None:
    """`places` by rank. Raises LocalProtocolError MISUSE unless they are all the same."""
    if len(set(places)) == 1:
        return
    told: list[str] = []
    broken: list[int] = []
    for place in sorted(set(places)):
        ranks = [rank for rank, its in enumerate(places) if its == place]
        steps, doing = divmod(place, len(Doing))
        if doing == Doing.BREAKING_OFF:
            broken += ranks
        named = ", ".join(f"rank {rank}" for rank in ranks[:RANKS_TOLD])
        more = f" and {len(ranks) - RANKS_TOLD} more" if len(ranks) > RANKS_TOLD else ""
        told.append(f"{named}{more} {WORDS[Doing(doing)].format(steps)}")
    remedy = "Every rank makes the same steps: use learner.until_end(loader) on all of them."
    if broken:
        remedy = f"The log of rank {broken[0]} says why."
    raise LocalProtocolError(
        ErrorCode.MISUSE,
        f"the ranks are not at the same place: {'; '.join(told)}",
        remedy=remedy,
    )
