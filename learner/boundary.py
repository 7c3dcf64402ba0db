"""The training thread's part between two inner steps: performs what the host asks for.

Nobody else touches parameters. The session decides, and its host makes tasks of that; this module
performs them one by one and hands each result back. After the last one the host lets go what waited
for them, such as the Report of a new base. An exception may come out of the middle, as that of a
signal or of a full GPU: then the session hears what was not done, and the exception goes on.
"""

from __future__ import annotations

from collections.abc import Callable

from narrows.learner import effects as do
from narrows.learner.host import LearnerHost


class Boundary:
    """The exchange of one learner as its training thread makes it.

    `adopting(effect)` is a hook, called before parameters move.
    """

    def __init__(self, host: LearnerHost) -> None:
        self.adopting: Callable[[do.Adopt], None] = lambda effect: None
        self._host = host

    def perform(
        self,
        decide: Callable[[], None],
        now: float,
        *,
        exchanges: bool = True,
        is_step: bool = False,
    ) -> None:
        """`decide` calls the session; the host makes tasks of its decisions, which are performed.
        The exchange takes no other time from training. The caller holds the learner's lock.

        Not `exchanges`: the ranks of an island have not met, so there is no task now. `is_step`:
        it comes after an inner step, and there are many of these. If nothing moved and nothing was
        decided, what time alone asks for is left to the loop, which looks at it all the time.
        """
        decided = False
        has_moved = False
        try:
            decide()
            decided = True
            if exchanges:
                for task in self._host.tasks():
                    self._do(task)
                    has_moved = True
            # A new base is reported at once: the broker may wait for it.
            if not is_step or has_moved or self._host.session.effects:
                self._host.perform(now)
        except BaseException as error:
            self._host.session.broken_off(type(error).__name__, decided=decided)
            raise

    def _do(self, task: do.Task) -> None:
        """The host hears of a task last: what it has not heard of counts as half done."""
        host = self._host
        match task:
            case do.Move(effect, fragment, rule, prepared):
                self.adopting(effect)
                if prepared is None:
                    prepared = host.island.prepare(fragment, rule)
                host.island.adopt(fragment, prepared)
                host.adopted(effect, rule.new)
            case do.TakeSnapshot(effect, fragment, published):
                settings = host.session.settings
                work = host.island.snapshot(fragment, published, effect.base, settings)
                host.snapshot_taken(effect, work)
            case do.Read(fragment):
                host.seed_read(fragment, host.island.read(fragment))
