"""Warnings about history that learners have seen and the state directory lacks. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.config import BrokerSection
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.run import RunState
from narrows.proto import messages as msg
from narrows.proto.units import counted


@dataclass
class LostHistory:
    """Compares each Hello with the state, and warns of each loss once."""

    state: RunState
    _versions: dict[int, int] = field(default_factory=dict[int, int])
    """Newest version per fragment that the operator's log has as lost."""
    _copy: bool = False
    """The operator's log says that this state directory is an older copy."""

    def look(self, hello: msg.Hello) -> list[ev.Effect]:
        """Warns once if a learner has seen versions or epochs that this state directory lacks.

        The learner finds out from the Welcome and goes back by itself. A Hello that does not prove
        that a broker of this run has admitted its learner says nothing.
        """
        state = self.state
        if not state.is_proven(hello):
            return []
        here = state.versions or (-1,) * len(hello.versions)
        ahead = {
            index: (version, own)
            for index, (version, own) in enumerate(zip(hello.versions, here, strict=False))
            if version > own
        }
        # An epoch that this directory did not count before its own was counted in another copy.
        is_copy = hello.epoch[:2] >= state.epoch[:2] and hello.epoch != state.epoch
        if not (ahead or is_copy):
            return []
        named = self._versions
        news = is_copy and not self._copy
        news |= any(v > named.get(index, -1) for index, (v, _) in ahead.items())
        if not news:
            return []
        self._copy |= is_copy
        named |= {index: max(v, named.get(index, -1)) for index, (v, _) in ahead.items()}
        # With a journal nothing should be lost, unless an operator chose an older copy.
        broker = state.config.broker
        is_known = is_copy or broker.journal == "off" or broker.rollback_to >= 0
        level = "warning" if is_known else "error"
        why = _why_lost(hello, broker, is_copy=is_copy)
        return [
            ev.Note(
                level,
                f"history_lost: {why}. {_what_is_lost(hello.name, ahead)}",
                about=f"lost {hello.name}",
            )
        ]


def _why_lost(hello: msg.Hello, broker: BrokerSection, *, is_copy: bool) -> str:
    """Explains how a learner can have seen more than the state directory holds."""
    if is_copy:
        epoch = "{}.{}".format(*hello.epoch)
        return (
            "the state directory was restored from an older copy, it does not know the epoch"
            f" {epoch} that {hello.name} has followed"
        )
    if broker.rollback_to >= 0:
        return f"the run was rolled back to version {broker.rollback_to} at this start"
    if broker.journal == "off":
        return "what came after the last checkpoint is gone, there is no journal"
    why = "the state directory was restored from an older copy, or the disk has lost the end of"
    why += " the journal"
    if broker.journal_errors == "serve":
        why += ", or it was published while the journal could not be written"
    return why


def _what_is_lost(name: str, ahead: dict[int, tuple[int, int]]) -> str:
    """Lists lost versions; `ahead` has the learner's version and the broker's, by fragment."""
    assert all(version > own for version, own in ahead.values())
    if not ahead:
        return f"{name} holds no newer version; where its copies differ it takes the broker's"
    listed = [
        f"of fragment {index} by {version - own} ({version}, here {own if own >= 0 else 'none'})"
        for index, (version, own) in ahead.items()
    ]
    more = f" and of {counted(len(listed) - 3, 'other')}" if len(listed) > 3 else ""
    total = sum(version - own for version, own in ahead.values())
    return (
        f"{name} is ahead {', '.join(listed[:3])}{more}; versions lost: {total}. Learners go back"
        " to the broker's by themselves"
    )
