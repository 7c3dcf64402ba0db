"""An island's side of a run, as the training thread of each rank calls it.

All ranks call the same methods in the same order. What they agree on at one boundary was begun at
the one before, so that its answer comes during the step and costs the boundary next to nothing:

    boundary k    sums what was begun at boundary k - 1; begins the next vector
    ... if the leader said there that this boundary exchanges something, or waits: all ranks meet,
        and the leader tells operation by operation what they do, until it is done

So ranks meet before the leader locks its link, and a rank that hangs in training holds nobody's
reports up. Tokens of a step count one boundary late, or at once where ranks meet: a push says
exactly what it took.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from narrows.learner.exchange import Exchange
from narrows.learner.island import HostIsland
from narrows.learner.ranks.agreement import (
    HEALTHS,
    NO_ORDER,
    NOTHING_SAID,
    Act,
    Doing,
    Order,
    Said,
    led,
    read_vector,
    vector_of,
)
from narrows.learner.ranks.meeting import LEADER, NOTHING, TIMEOUT, Ranks, Sum, encoded
from narrows.learner.session import View
from narrows.proto import errors
from narrows.proto.codec import F32
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.layout import Fragment
from narrows.proto.ports import Prepared

LINGER: Final = timedelta(seconds=2)
"""A rank that breaks off waits so long for the others to hear of it."""
MISSING: Final = object()
"""In the place of a batch: there is none."""

Batch = TypeVar("Batch")
_log = logging.getLogger("narrows.learner")


class RanksIsland(HostIsland):
    """The parameters of all ranks, as the leader's host uses them: the port Island."""

    def __init__(self, ranks: Ranks, tell: Callable[[Act, Fragment, float], None]) -> None:
        super().__init__(ranks.parameters, self._hand_over_everywhere)
        self._ranks = ranks
        self._tell = tell

    def read(self, fragment: Fragment) -> F32:
        """Gathers the parameters (n,)."""
        with self._ranks.in_one_piece():  # From the order on: nobody can be told of an error.
            if self._ranks.provides(fragment):
                self._tell(Act.READ, fragment, 0.0)
            return self._ranks.gather(fragment)

    def adopt(self, fragment: Fragment, prepared: Prepared) -> None:
        """Every rank moves what it holds."""
        with self._ranks.in_one_piece():
            self._tell(Act.MOVE, fragment, prepared.keep)
            self._ranks.scatter(fragment, prepared.out, prepared.keep)
            self._turn_momentum(fragment, prepared)

    def _hand_over_everywhere(self, fragment: Fragment, movement: F32, share: float) -> None:
        self._tell(Act.HAND_OVER, fragment, share)
        self._ranks.hand_over(fragment, movement, share)


class RanksExchange:
    """One rank's side of the run; the methods of `Exchange`, for all ranks.

    `make` builds the leader's exchange over an island. `adopting` is called before parameters move
    on this rank.
    """

    def __init__(
        self,
        ranks: Ranks,
        make: Callable[[HostIsland], Exchange],
        adopting: Callable[[], None],
    ) -> None:
        self._ranks = ranks
        self._adopting = adopting
        self._exchange: Exchange | None = None
        self._steps = 0
        self._said = NOTHING_SAID
        """The newest that all ranks have agreed on."""
        self._coming: Callable[[], Said] | None = None
        """Ends the agreement that the last boundary has begun."""
        self._begun: list[Sum] = []
        """Sums that nobody here has looked at yet."""
        self._lead(lambda: self._build(make))

    def _build(self, make: Callable[[HostIsland], Exchange]) -> None:
        self._exchange = make(RanksIsland(self._ranks, self._tell_fragment))

    @property
    def leads(self) -> bool:
        """Whether this rank has the session and the sockets."""
        return self._ranks.rank == LEADER

    def view(self) -> View:
        """Answers what the training loop asks, with the same on all ranks."""
        return self._said.view(self._steps)

    # The training thread.

    def join(self, ramp_steps: int) -> None:
        """Returns once every rank has every fragment. Raises what `Exchange.join` does."""
        self._meet(Doing.ENTERING)
        self._lead(lambda: self._leader.join(ramp_steps))
        self._coming = self._begin(Doing.STEPPING)

    def boundary(self, tokens: int, loss: float | None) -> None:
        """After an inner step. Raises what `Exchange.boundary` does, on all ranks. Once the learner
        has left it does nothing."""
        if self._coming is None:
            return
        late = self._agreed()
        self._steps += 1
        if late.due:
            said = self._meet(Doing.STEPPING, tokens, loss)
            # Of two steps, the one before and this one, unless ranks have met there, too.
            both = Said(*map(sum, zip(late, said, strict=True)))
            self._lead(lambda: self._leader.boundary(int(both.tokens), both.loss))
            self._coming = self._begin(Doing.STEPPING)
        else:
            if self._exchange is not None:
                self._exchange.boundary(int(late.tokens), late.loss, exchanges=False)
            self._coming = self._begin(Doing.STEPPING, tokens, loss)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches until that of any rank ends, or the run does."""
        if self.view().stopping:
            return
        batches = iter(loader)
        batch: Any = next(batches, MISSING)
        all_have = self._ask(batch)
        while all_have():
            # One batch ahead, so that the answer comes during the step.
            coming: Any = next(batches, MISSING)
            all_have = self._ask(coming)
            yield batch
            if self.view().stopping:
                return
            batch = coming

    def set_paused(self, reason: str | None) -> None:
        """No steps are made for a while; None: they are made again. The leader's word counts."""
        if self._exchange is not None:
            self._exchange.set_paused(reason)

    def finish(self, timeout_s: float | None, *, disowned: bool = False) -> None:
        """Leaves, as `Exchange.finish` does. The loops of all ranks have ended at the same step;
        the parameters are disowned if one rank says so."""
        late = self._agreed()
        self._coming = self._start(Doing.LEAVING, Said(disowned=disowned))
        is_disowned = bool(self._agreed().disowned)
        self._lead(lambda: self._leave(int(late.tokens), timeout_s, is_disowned))
        self._coming = None
        self._ranks.leave(together=True)

    def _leave(self, late_tokens: int, timeout_s: float | None, disowned: bool) -> None:
        self._leader.count(late_tokens)
        self._leader.finish(timeout_s, disowned=disowned)

    def abort(self) -> None:
        """Leaves at once, whatever is on its way, and tells the others if they come to hear of it.
        What they have told meanwhile may be the reason: it is logged. A second call is harmless."""
        if self._exchange is not None:
            self._exchange.abort()
        if self._coming is None:
            self._ranks.leave()
            return
        self._coming = None
        self._said = self._said._replace(health=max(self._said.health, HEALTHS.index("ended")))
        cause = sys.exception()
        if cause is not None:
            _log.warning(
                "rank %d breaks off after %d steps (%s), and the other ranks end with it",
                self._ranks.rank,
                self._steps,
                type(cause).__name__,
            )
        try:
            # In the middle of an exchange the others do not listen.
            if not self._ranks.apart:
                self._begun.append(self._ranks.start_sum(self._vector(Doing.BREAKING_OFF)))
            for each in self._begun:
                read_vector(each(LINGER))
        except NarrowsError as error:
            # That the others do not answer is no cause: they are still in training's collectives.
            if not self._ranks.apart and error.code is not ErrorCode.RANK_LOST:
                _log.error("%s", error)
        finally:
            self._ranks.leave()

    def write_inputs(self) -> None:
        """As `Link.write_inputs`; the leader alone has inputs."""
        if self._exchange is not None:
            self._exchange.write_inputs()

    def metadata(self) -> dict[str, str]:
        """As `Exchange.metadata`; empty at all ranks but the leader."""
        return {} if self._exchange is None else self._exchange.metadata()

    def stats(self) -> dict[str, Any]:
        """Counters of the incarnation at the leader; at the others their place alone."""
        own = {"rank": self._ranks.rank, "ranks": self._ranks.size}
        return own if self._exchange is None else own | self._exchange.stats()

    # How ranks agree.

    def _begin(
        self, doing: Doing, tokens: int = 0, loss: float | None = None
    ) -> Callable[[], Said]:
        """Begins to agree on what the leader says now. `tokens` and the mean `loss` are this
        rank's."""
        said = self._leaders_part()
        if self._ranks.counts:
            said = said._replace(tokens=tokens)
            if loss is not None:
                said = said._replace(loss_sum=loss * tokens, loss_tokens=tokens)
        return self._start(doing, said)

    def _agreed(self) -> Said:
        assert self._coming is not None, "not between join and finish"
        self._said = self._coming()
        return self._said

    def _meet(self, doing: Doing, tokens: int = 0, loss: float | None = None) -> Said:
        self._coming = self._begin(doing, tokens, loss)
        return self._agreed()

    def _ask(self, batch: object) -> Callable[[], bool]:
        """Begins to ask whether all ranks have a batch. Once this one has left nobody answers."""
        if self._coming is None:
            return lambda: batch is not MISSING
        said = self._start(Doing.ASKING, Said(exhausted=batch is MISSING))
        return lambda: not said().exhausted

    def _start(self, doing: Doing, said: Said) -> Callable[[], Said]:
        summed = self._sum(self._vector(doing, said))
        return lambda: summed()[1]

    def _sum(self, vector: NDArray[np.float64]) -> Callable[[], tuple[Order, Said]]:
        """Begins to sum what all ranks say."""
        begun = self._ranks.start_sum(vector)
        self._begun.append(begun)

        def summed() -> tuple[Order, Said]:
            values = begun(TIMEOUT)
            if begun in self._begun:
                self._begun.remove(begun)
            return read_vector(values)

        return summed

    def _vector(
        self, doing: Doing, said: Said = NOTHING_SAID, order: Order = NO_ORDER
    ) -> NDArray[np.float64]:
        return vector_of(said, self._ranks.rank, self._ranks.size, self._steps, doing, order)

    def _leaders_part(self) -> Said:
        if self._exchange is None:
            return NOTHING_SAID
        return led(self._exchange.view(), due=self._exchange.due())

    # How the others obey.

    @property
    def _leader(self) -> Exchange:
        assert self._exchange is not None, "rank 0 leads"
        return self._exchange

    def _lead(self, work: Callable[[], None]) -> None:
        """The leader works; the others do what it tells meanwhile, and raise what it raises."""
        if not self.leads:
            self._obey()
            return
        try:
            work()
        except BaseException as error:
            if not self._ranks.apart:
                with suppress(NarrowsError):  # Another rank may be gone, too.
                    self._tell_error(error)
            raise
        self._tell(Order(Act.DONE))

    def _obey(self) -> None:
        ranks = self._ranks
        while True:
            order = self._tell(NO_ORDER)
            if order.act == Act.DONE:
                return
            if order.act == Act.FAIL:
                raise _told(ranks.carry_error({}, int(order.number)), ranks.rank)
            fragment = ranks.fragment(int(order.number), int(order.fragments))
            if order.act == Act.READ:
                ranks.gather(fragment)
            elif order.act == Act.HAND_OVER:
                ranks.hand_over(fragment, NOTHING, order.keep)
            else:
                self._adopting()
                ranks.scatter(fragment, NOTHING, order.keep)

    def _tell(self, order: Order) -> Order:
        """All ranks hear the leader's order, and how it sees the run."""
        said = self._leaders_part()
        with self._ranks.exchanging():
            order, self._said = self._sum(self._vector(Doing.EXCHANGING, said, order))()
        return order

    def _tell_fragment(self, act: Act, fragment: Fragment, keep: float) -> None:
        self._tell(Order(act, fragment.index, self._leader.fragments, keep))

    def _tell_error(self, error: BaseException) -> None:
        fields = {"message": f"{type(error).__name__}: {error}"}
        if isinstance(error, NarrowsError):
            fields = {
                "kind": type(error).__name__, "code": error.code.value, "message": error.message,
                "expected": error.expected, "got": error.got, "remedy": error.remedy,
            }  # fmt: skip
        self._tell(Order(Act.FAIL, len(encoded(fields))))
        self._ranks.carry_error(fields, len(encoded(fields)))


def _told(fields: dict[str, str], rank: int) -> NarrowsError:
    """The leader's error as another rank raises it: of the same class, if it is one of ours."""
    kind = getattr(errors, fields.get("kind", ""), errors.LocalProtocolError)
    error: NarrowsError = kind.__new__(kind)
    NarrowsError.__init__(
        error,
        ErrorCode(fields.get("code", ErrorCode.MISUSE)),
        f"rank 0 has told rank {rank}: {fields['message']}",
        expected=fields.get("expected", ""),
        got=fields.get("got", ""),
        remedy=fields.get("remedy", "The log of rank 0 says more."),
    )
    return error
