"""Version 0: which learner sends layout and parameters, and what is still missing of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.stages import RunPhase
from narrows.broker.syncer.state import State, fault
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError
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
    """Has version 0 made: by the learner that the operator named, or by the first that joins.

    With an initial file the learner sends the layout only.
    """

    state: State
    _seeder: str = ""
    """Incarnation of the learner that is asked; "" while there is none."""
    _transfers: list[Transfer] = field(default_factory=list[Transfer])
    """That of the layout; once it is here, those of version 0, per fragment."""
    _making: bool = False
    """Everything is here; the host makes version 0 durable, or has done so."""

    @property
    def seeder(self) -> Member | None:
        return self.state.members.of(self._seeder) if self._seeder else None

    def asked(self, incarnation: str) -> Member | None:
        """This learner, if it is asked for version 0, and nothing of it is being made yet."""
        seeder = self.seeder
        is_asked = seeder and seeder.incarnation == incarnation and not self._making
        return seeder if is_asked else None

    def role(self, member: Member) -> msg.Role:
        """The first thing that a learner is to do."""
        if self.state.is_open:
            return msg.Role.ADOPT
        # With an initial file the parameters are here, so the layout alone is fetched.
        seeds = self.asked(member.incarnation) and not self.state.config.broker.init
        return msg.Role.SEED if seeds else msg.Role.WAIT

    def pick(self, now: float) -> Member | None:
        """The learner that is asked from now on, if that has to change."""
        if self._making or self.state.heads:
            return None
        seeder = self.seeder
        if seeder is not None and seeder.is_heard(now):
            return None
        if self._seeder and (seeder is None or not seeder.is_connected):
            self._drop()
        named = self.state.config.run.seeder
        able = [each for each in self.state.members.heard(now) if named in ("", each.name)]
        if not able:
            return None  # The one that is silent may come back and go on.
        self._drop()
        seeder = able[0]
        # With an initial file its role is to wait, so it sends the layout only when it is asked.
        unasked = not self.state.config.broker.init
        self._seeder, self._transfers = seeder.incarnation, [Transfer(1, now, unasked=unasked)]
        self.state.note("seeding", f"{seeder.name} is asked for version 0", learner=seeder.name)
        return seeder

    def give_way(self, hello: msg.Hello, now: float) -> None:
        """A learner that is asked and silent does not keep out one that brings another model."""
        seeder = self.seeder
        if self._making or self.state.heads or hello.incarnation == self._seeder:
            return
        if seeder is None or not seeder.is_heard(now):
            self._drop()

    def layout(self, incarnation: str, layout: msg.Layout, now: float) -> None:
        """Takes the layout in and begins to wait for its chunks; refuses one that cannot be."""
        state, seeder = self.state, self.asked(incarnation)
        if seeder is None:
            return
        seeder.heard_at = seeder.moved_at = now
        if state.layout is not None:
            return  # It was asked for twice.
        try:
            check_layout(layout)
            if fingerprint(layout) != seeder.fingerprint:
                expected = f"the one that Hello told, {seeder.fingerprint}"
                remedy = "build the model before the learner, and do not change it after that"
                raise fault("layout", expected, fingerprint(layout), remedy)
            state.set_layout(layout)
            if (chunks := sum(state.push_chunks) + sum(state.state_chunks)) > CHUNKS_MAX:
                got, remedy = f"{chunks} chunks", "train a smaller model, or raise the rates"
                raise fault("size of the model", f"at most {CHUNKS_MAX} chunks", got, remedy)
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

    def chunk(self, header: msg.Header, now: float) -> bool:
        """True if the chunk belongs to version 0 and is not here yet."""
        if (seeder := self.asked(header.incarnation)) is None:
            return False
        seeder.heard_at = seeder.moved_at = seeder.data_at = now
        if self.state.layout is None:
            return False  # What came before the layout is asked for again.
        if header.epoch != self.state.epoch or header.fragment >= len(self._transfers):
            return False
        transfer = self._transfers[header.fragment]
        wanted = transfer.add(header.chunk, now)
        if wanted and transfer.complete and all(each.complete for each in self._transfers):
            self._make()
        return wanted

    def _make(self) -> None:
        assert self.state.layout is not None
        self._making = True
        self.state.effects.append(ev.Seed(self._seeder, self.state.layout))

    def seeded(self) -> None:
        """Version 0 is durable."""
        assert self._making and not self.state.heads
        self.state.heads = [0] * self.state.settings.fragments
        self._transfers = []
        self.state.note("seeded", "version 0 is durable")

    def failed(self, error: NarrowsError) -> None:
        """Refuses the learner whose layout or parameters cannot become version 0."""
        assert not self.state.heads
        seeder = self.seeder
        self._drop()
        if seeder is not None and seeder.is_connected:
            self.state.refuse(seeder.peer, error, name=seeder.name)
            self.state.members.disconnect(seeder)

    def _drop(self) -> None:
        """Forgets what came from the learner that was asked; another may bring another model."""
        for fragment, transfer in enumerate(self._transfers):
            if transfer.here:
                self.state.effects.append(ev.Drop(fragment, self._seeder, 0))
        self._seeder, self._transfers, self._making = "", [], False
        self.state.set_layout(None)

    def advance(self, now: float) -> Member | None:
        """Asks for what is missing. Returns a learner that is newly asked, for its Welcome."""
        picked, seeder = self.pick(now), self.seeder
        if seeder is None or not seeder.is_connected or self._making:
            return None
        window = self.state.settings.window_messages
        kind = msg.DataKind.LAYOUT if self.state.layout is None else msg.DataKind.SEED
        for fragment, transfer in enumerate(self._transfers):
            if chunks := transfer.ask(now, seeder.heard_at, window):
                self.state.send(seeder, msg.Fetch(kind, fragment, 0, 0, chunks))
        return picked

    def begin(self, now: float) -> bool:
        """Begins the run once version 0 is durable and enough learners have joined."""
        state = self.state
        joined = len(state.members.heard(now))
        if not state.heads or state.is_open or joined < state.config.run.learners_at_start:
            return False
        state.turn(RunPhase.RUNNING)
        state.note("begun", f"the run begins with {joined} learner{'s' * (joined != 1)}")
        return True

    def waiting_for(self, now: float) -> str:
        """Words for the status."""
        state = self.state
        if state.heads:
            wanted = state.config.run.learners_at_start
            return f"learners: {len(state.members.heard(now))} of {wanted} have joined"
        if self._making:
            return "the disk: version 0 is being written"
        if (seeder := self.seeder) is None:
            named = state.config.run.seeder
            return f"{named or 'a learner'} to join and send version 0"
        if state.layout is None:
            return f"version 0 from {seeder.name}: its layout is not here yet"
        here = sum(transfer.here for transfer in self._transfers)
        total = sum(transfer.chunks for transfer in self._transfers)
        return f"version 0 from {seeder.name}: {100 * here // total}% is here"

    def refuse_layout(self, peer: str, name: str, got: str) -> None:
        """Refuses a learner with another model, and sends the run's layout for comparison."""
        assert self.state.layout is not None
        packed = pack_layout(self.state.layout)
        error = fault(
            "this learner's model is not the run's",
            f"layout {self.state.fingerprint}", f"layout {got}",
            "start every learner with the same model code and configuration; another model needs "
            "a broker with another --state-dir", ErrorCode.LAYOUT_DIFFERS,
        )  # fmt: skip
        layout = packed if len(packed) <= LAYOUT_BYTES_MAX else b""
        self.state.refuse(peer, error, name=name, layout=layout)
