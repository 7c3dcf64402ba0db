"""Learners that the watch suspects: named, and refused if the operator wants it. [pure]

This module alone writes `RunState.suspects`. The evidence is durable, the naming is not: after a
restart of the broker everybody is merged again, and the first bad round names a suspect anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.run import RunState, Suspect
from narrows.proto.errors import ErrorCode, RemoteProtocolError

TRUSTED_MIN = 2
"""Contributors of a round that are not suspected, without which nobody is excluded: of two, nobody
can say who is wrong."""


@dataclass
class Suspicion:
    """Names suspects once, and forgives them."""

    state: RunState

    def judge(self, event: ev.Merged, contributors: int) -> list[ev.Effect]:
        """Takes in what the watch says after a round of so many contributors."""
        suspects = self.state.suspects
        for name in event.forgiven & suspects.keys():
            if not suspects[name].is_excluded:
                del suspects[name]
        wanted = self.state.config.merge.quarantine == "exclude"
        is_excluded = wanted and contributors - len(event.suspects) >= TRUSTED_MIN
        new = [
            name
            for name in sorted(event.suspects)
            if name not in suspects or (is_excluded and not suspects[name].is_excluded)
        ]
        for name in new:
            suspects[name] = Suspect(event.suspects[name], is_excluded)
        return [ev.Note("warning", self._text(new, event))] if new else []

    def _text(self, names: list[str], event: ev.Merged) -> str:
        """The line for the operator."""
        who = " and ".join(names)
        reasons = "; ".join(f"{name}: {event.suspects[name]}" for name in names)
        if all(self.state.suspects[name].is_excluded for name in names):
            then = "its pushes are refused until the broker restarts"
        elif len(names) > 1:
            then = "which of them is wrong, nobody can say from their pushes"
        else:
            then = "see its data and its code, or set merge.quarantine = exclude"
        return f"{who} may poison the model ({reasons}); {then}"


def check_merged(state: RunState, name: str) -> None:
    """Raises RemoteProtocolError QUARANTINED if a learner's contributions are not merged."""
    suspect = state.suspects.get(name)
    if suspect is not None and suspect.is_excluded:
        raise RemoteProtocolError(
            ErrorCode.QUARANTINED,
            f"pushes of {name} are not merged",
            expected="outer gradients like those of the others",
            got=suspect.reason,
            remedy="check its data and its code, then ask the operator of the broker to restart it",
        )
