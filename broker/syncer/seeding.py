"""Version 0, with which the run begins: the learner that sends it, its layout and its chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.state import State
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError, fault
from narrows.proto.flow.transfer import Transfer
from narrows.proto.layout import check_layout, fingerprint
from narrows.proto.wire import pack_layout

LAYOUT_BYTES_MAX: Final = 2 << 20
"""A refusal carries the run's layout up to this size."""

CHUNKS_MAX: Final = 1 << 24
"""Chunks of a model, of pushes and of states together: a bitmap has a byte for each. At the least
size of chunks they are those of 8 billion parameters, at the usual one of two trillion."""


@dataclass(eq=False)
class Seeding:
    """Has version 0 made: by the learner that the operator named, or by the first that joins. With
    an initial file that learner sends the layout only."""

    state: State
    seeder: Member | None = None
    """The learner that is asked for version 0."""
    asked_at: float = 0.0
    """Since when."""
    _transfers: list[Transfer] = field(default_factory=list[Transfer])
    """That of the layout; once it is here, those of version 0, per fragment."""
    _making: bool = False
    """Everything is here; the host makes version 0 durable, or has done so."""

    # The learner that is asked.

    def asked(self, incarnation: str) -> Member | None:
        """This learner, if it is asked for version 0, and nothing of it is being made yet."""
        seeder = self.seeder
        if seeder is None or seeder.incarnation != incarnation or self._making:
            return None
        return seeder

    def may_pick(self, now: float) -> bool:
        """Another learner may be asked: nothing is made yet, and the one that is asked is away."""
        is_here = self.seeder is not None and self.seeder.is_heard(now)
        return not (is_here or self._making or self.state.heads)

    def pick(self, now: float) -> Member | None:
        """The learner that is asked from now on, if that has to change."""
        if not self.may_pick(now):
            return None
        named = self.state.config.run.seeder
        able = [each for each in self.state.members.heard(now) if named in ("", each.name)]
        if not able:
            return None  # The one that is silent may come back and go on.
        self.drop()
        self.seeder = able[0]
        self.asked_at = now
        # With an initial file its role is to wait, so it sends the layout only when it is asked.
        self._transfers = [Transfer(1, now, unasked=not self.state.config.broker.init)]
        self.state.note(
            "seeding",
            f"{self.seeder.name} is asked for version 0",
            learner=self.seeder.name,
        )
        return self.seeder

    def drop(self) -> None:
        """Forgets what came from the learner that was asked; another may bring another model."""
        for fragment, transfer in enumerate(self._transfers):
            if self.seeder is not None and transfer.here:
                self.state.effects.append(ev.Drop(fragment, self.seeder.incarnation, 0))
        self.seeder = None
        self._transfers = []
        self._making = False
        self.state.set_layout(None)

    # What it sends.

    def layout(self, incarnation: str, layout: msg.Layout, now: float) -> None:
        """Takes the layout in and begins to wait for its chunks; refuses one that cannot be."""
        state = self.state
        seeder = self.asked(incarnation)
        if seeder is None:
            return
        seeder.heard_at = seeder.moved_at = seeder.data_at = now
        if state.layout is not None:
            return  # It was asked for twice.
        try:
            self._take_layout(layout, expected=seeder.fingerprint)
        except NarrowsError as error:
            self.failed(error)
            return
        for member in state.members.connected():
            if member.fingerprint != state.fingerprint:
                self.refuse_layout(member.peer, member.name, member.fingerprint)
                state.members.disconnect(member)
        if state.config.broker.init:
            self._make()
        else:
            self._transfers = [Transfer(each, now, unasked=True) for each in state.state_chunks]

    def _take_layout(self, layout: msg.Layout, expected: str) -> None:
        """Raises NarrowsError for one that cannot be the run's. `expected` is its fingerprint."""
        check_layout(layout)
        if fingerprint(layout) != expected:
            raise fault(
                "layout",
                expected=f"the one that Hello told, {expected}",
                got=fingerprint(layout),
                remedy="build the model before the learner, and do not change it after that",
            )
        self.state.set_layout(layout)
        chunks = sum(self.state.push_chunks) + sum(self.state.state_chunks)
        if chunks > CHUNKS_MAX:
            raise fault(
                "size of the model",
                expected=f"at most {CHUNKS_MAX} chunks",
                got=f"{chunks} chunks",
                remedy="train a smaller model, or raise the rates",
            )

    def refuse_layout(self, peer: str, name: str, got: str) -> None:
        """Refuses a learner with another model, and sends the run's layout for comparison."""
        assert self.state.layout is not None
        packed = pack_layout(self.state.layout)
        error = fault(
            "this learner's model is not the run's",
            expected=f"layout {self.state.fingerprint}",
            got=f"layout {got}",
            remedy="start every learner with the same model code and configuration; another model "
            "needs a broker with another --state-dir",
            code=ErrorCode.LAYOUT_DIFFERS,
        )
        if len(packed) > LAYOUT_BYTES_MAX:
            packed = b""
        self.state.refuse(peer, error, name=name, layout=packed)

    def chunk(self, header: msg.Header, now: float) -> bool:
        """True if a chunk of this life's epoch belongs to version 0 and is not here yet."""
        seeder = self.asked(header.incarnation)
        if seeder is None:
            return False
        # As if merged: it counts in the shares of the uplink, however many learners its site has.
        seeder.heard_at = seeder.moved_at = seeder.data_at = seeder.merged_at = now
        # Chunks that came before the layout are asked for again.
        if self.state.layout is None or header.fragment >= len(self._transfers):
            return False
        transfer = self._transfers[header.fragment]
        is_new = transfer.add(header.chunk, now)
        if is_new and transfer.complete and all(each.complete for each in self._transfers):
            self._make()
        return is_new

    def ask(self, now: float) -> None:
        """Asks for what is missing of version 0."""
        seeder = self.seeder
        if seeder is None or not seeder.is_connected or self._making:
            return
        kind = msg.DataKind.LAYOUT if self.state.layout is None else msg.DataKind.SEED
        window = self.state.settings.window_messages
        for fragment, transfer in enumerate(self._transfers):
            if missing := transfer.ask(now, seeder.heard_at, window):
                self.state.send(seeder, msg.Fetch(kind, fragment, 0, 0, missing))

    # The disk.

    def _make(self) -> None:
        assert self.state.layout is not None
        self._making = True
        self.state.effects.append(ev.Seed(self.state.layout))

    def seeded(self) -> None:
        """Version 0 is durable."""
        assert self._making and self.seeder is not None and not self.state.heads
        self.seeder.merged_at = float("-inf")
        self.state.heads = [0] * self.state.settings.fragments
        self._transfers = []
        self.state.note("seeded", "version 0 is durable")

    def failed(self, error: NarrowsError) -> None:
        """Refuses the learner whose layout or parameters cannot become version 0."""
        assert not self.state.heads
        seeder = self.seeder
        self.drop()
        if seeder is not None and seeder.is_connected:
            self.state.refuse(seeder.peer, error, name=seeder.name)
            self.state.members.disconnect(seeder)

    def waiting_for(self, now: float) -> str:
        """Words for the status: on whom, or on what, the beginning of the run waits."""
        if self.state.heads:
            return (
                f"learners: {len(self.state.members.heard(now))} of "
                f"{self.state.config.run.learners_at_start} have joined"
            )
        if self._making:
            return "the disk: version 0 is being written"
        if self.seeder is None or not self.seeder.is_connected:
            return f"{self.state.config.run.seeder or 'a learner'} to join and send version 0"
        here = sum(transfer.here for transfer in self._transfers)
        total = sum(transfer.chunks for transfer in self._transfers)
        return f"version 0 from {self.seeder.name}: {100 * here // total}% is here"
