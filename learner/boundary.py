"""The training thread's part between two inner steps: performs what the host asks for.

Nobody else touches parameters. A host answers each call with tasks; this module performs them one
by one and hands each result back. After the last one the host lets go what waited for them, such
as the Report of a new base. An exception may come out of the middle, as that of a signal or of a
full GPU: then the session hears what was not done, and the exception goes on.
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

    def perform(self, decide: Callable[[], list[do.Task]], now: float) -> None:
        """`decide` calls the host, whose answer is performed. The exchange takes no other time from
        training. The caller holds the learner's lock."""
        decided = False
        try:
            tasks = decide()
            decided = True
            for task in tasks:
                self._do(task)
            self._host.exchanged(now)
        except BaseException as error:
            self._host.session.broken_off(type(error).__name__, decided=decided)
            raise

    def _do(self, task: do.Task) -> None:
        """The host hears of a task last: what it has not heard of counts as half done."""
        host = self._host
        match task:
            case do.Move(effect, fragment, rule):
                self.adopting(effect)
                host.island.adopt(fragment, rule)
                host.adopted(effect, rule.new)
            case do.Overwrite(effect, fragment, new):
                self.adopting(effect)
                host.island.overwrite(fragment, new)
                host.adopted(effect, new)
            case do.TakeSnapshot(effect, fragment, base):
                host.snapshot_taken(effect, host.island.snapshot(fragment, base))
            case do.Read(fragment):
                host.seed_read(fragment, host.island.read(fragment))
