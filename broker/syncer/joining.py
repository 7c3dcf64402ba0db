"""Joining: who is admitted, what a learner is told, and version 0, with which the run begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import NAMES_MAX, Member
from narrows.broker.syncer.pushes import Pushes
from narrows.broker.syncer.state import State, fault
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError, short
from narrows.proto.flow.transfer import Transfer
from narrows.proto.layout import check_layout, fingerprint
from narrows.proto.timing import HEARD_S
from narrows.proto.wire import name_of, pack_layout, speaks_for

LAYOUT_BYTES_MAX: Final = 2 << 20
"""A refusal carries the run's layout up to this size."""

CHUNKS_MAX: Final = 1 << 24
"""Chunks of a model, of pushes and of states together: a bitmap has a byte for each. At the least
size of chunks they are those of 8 billion parameters, at the usual one of two trillion."""


STRANGER_S: Final = 60.0
"""A learner of another run is told of for this long after its newest Hello."""


@dataclass(eq=False)
class Joining:
    """Admits learners, and has version 0 made: by the learner that the operator named, or by the
    first that joins. With an initial file that learner sends the layout only."""

    state: State
    pushes: Pushes
    _seeder: Member | None = None
    """The learner that is asked for version 0."""
    _transfers: list[Transfer] = field(default_factory=list[Transfer])
    """That of the layout; once it is here, those of version 0, per fragment."""
    _making: bool = False
    """Everything is here; the host makes version 0 durable, or has done so."""

    def hello(self, peer: str, site: str | None, hello: msg.Hello, now: float) -> None:
        """Admits a learner. `site`: whom its key may speak for; None: no keys.

        Raises RemoteProtocolError for one that is not admitted.
        """
        state, seeder = self.state, self._seeder
        self._check(site, hello, now)
        is_other = seeder is not None and seeder.incarnation != hello.incarnation
        if is_other and self._may_pick(now):
            self._drop()  # Who is asked and silent does not keep out one with another model.
        if state.layout is not None and hello.fingerprint != state.fingerprint:
            self._refuse_layout(peer, hello.name, hello.fingerprint)
            return
        self._check_place(hello.name, site)
        go_back = self._go_back(hello)
        member = self._member(hello, go_back, now)
        # The process that had this name, and whose connection speaks for another now.
        for other in (state.members.by_name.get(hello.name), state.members.by_peer.get(peer)):
            if other is not None and other is not member:
                self.pushes.disconnect(other)
        state.members.connect(member, peer, now)
        picked = self._pick(now)
        state.share_uplink(now, member)
        self.welcome(member, now, go_back)
        if picked is not None and picked is not member:
            self.welcome(picked, now)

    def welcome(self, member: Member, now: float, go_back: tuple[int, ...] = ()) -> None:
        """Tells a learner everything that the group shares."""
        state, role = self.state, msg.Role.WAIT
        if state.is_open:
            role = msg.Role.ADOPT
        elif self.asked(member.incarnation) and not state.config.broker.init:
            role = msg.Role.SEED  # With an initial file the layout alone is fetched.
        beat = state.beat(member, now)
        told = msg.Welcome(state.run_id, role, state.settings, *state.ports, go_back, beat)
        state.send(member, told)

    def _check(self, site: str | None, hello: msg.Hello, now: float) -> None:
        """Raises RemoteProtocolError if a learner is not admitted; its layout aside."""
        state, name, count = self.state, hello.name, self.state.settings.fragments
        if hello.protocol != msg.PROTOCOL:
            raise fault(
                "another version of the wire format", str(msg.PROTOCOL), str(hello.protocol),
                "install the same version of narrows on both sides", ErrorCode.PROTOCOL_VERSION,
            )  # fmt: skip
        if site is not None and not speaks_for(site, name):
            raise fault(
                "this key may not speak for this name", f"{site} or {site}/...", name,
                "start the learner with a name of its key's site, or with that site's key",
                ErrorCode.KEY_NAME,
            )  # fmt: skip
        if name_of(hello.incarnation) != name:
            raise fault(
                "incarnation", f"{name}. and eight hex digits", hello.incarnation,
                "make the incarnation of the learner's own name", ErrorCode.BAD_NAME,
            )  # fmt: skip
        holder = state.members.by_name.get(name)
        if holder and holder.incarnation != hello.incarnation and holder.is_heard(now):
            raise fault(
                f"another process is {name}",
                f"a name that nobody has used in the last {HEARD_S:g} s",
                f"{name}, heard {now - holder.heard_at:.1f} s ago",
                "choose another name, or stop the other process first", ErrorCode.NAME_IN_USE,
            )  # fmt: skip
        if hello.run_id not in ("", state.run_id):
            self._meet_stranger(hello, now)
            raise fault(
                "this broker holds another run than this learner belongs to",
                f"run {state.run_id}", f"run {short(hello.run_id)}",
                "if the broker's state directory was lost, or is not mounted, stop this broker and "
                "start it with the right --state-dir: the learner trains on and comes back. To "
                "join this run instead, start the learner again", ErrorCode.WRONG_RUN,
            )  # fmt: skip
        if len(hello.copies) not in (0, count):
            raise fault(
                "this learner's model is cut into another number of fragments",
                f"{count} fragments, or none", str(len(hello.copies)),
                "start the learner again: the run's number of fragments has changed",
                ErrorCode.LAYOUT_DIFFERS,
            )  # fmt: skip

    def _meet_stranger(self, hello: msg.Hello, now: float) -> None:
        """Names a learner of another run once: it says Hello on, each second."""
        state, name = self.state, hello.name
        mine = f"is at version {max(state.heads)}" if state.heads else "is empty"
        text = (
            f"{name} belongs to run {short(hello.run_id)}, and this broker holds run "
            f"{state.run_id}, which {mine}: was the state directory lost, or is it not mounted?"
        )
        _, seen_at = state.strangers.pop(name, ("", -STRANGER_S))
        state.strangers[name] = (text, now)
        if now >= seen_at + STRANGER_S:
            state.note("other_run", text, warning=True, learner=name)
        if len(state.strangers) > NAMES_MAX:
            del state.strangers[next(iter(state.strangers))]

    def _check_place(self, name: str, site: str | None) -> None:
        """Raises RemoteProtocolError if there is no place for a learner.

        While another site is here, a site has half of the places at most. Without keys a name does
        not say who speaks, so this would keep nobody away. Who is here keeps its place.
        """
        here = self.state.members.connected()
        if any(each.name == name for each in here):
            return
        half, places = msg.LEARNERS_MAX // 2, sum(each.site == site for each in here)
        if half <= places < len(here):
            raise fault(
                f"{site} has no place left while other sites are here",
                f"half of the places, {half}, for one site", "one more",
                f"wait until a learner of {site} leaves", ErrorCode.OVER_CAPACITY,
            )  # fmt: skip
        if len(here) >= msg.LEARNERS_MAX:
            raise fault(
                "the run is full", f"at most {msg.LEARNERS_MAX} learners", "one more",
                "wait until a learner leaves", ErrorCode.OVER_CAPACITY,
            )  # fmt: skip

    def _refuse_layout(self, peer: str, name: str, got: str) -> None:
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

    def _go_back(self, hello: msg.Hello) -> tuple[int, ...]:
        """Fragments whose copy is not part of this history: the state directory is an older copy.

        Within one epoch a publication may overtake a Welcome, and that is no step back.
        """
        state = self.state
        if hello.epoch == state.epoch:
            return ()
        ahead, go_back = 0, []
        for fragment, copy in enumerate(hello.copies):
            if copy.version < 0:
                continue
            # Without a head the directory is a copy from before version 0: seed the run anew.
            head = state.heads[fragment] if state.heads else -1
            ahead += max(0, copy.version - head)
            known = state.published_digest(fragment, copy.version) if copy.version <= head else None
            if known != copy.digest:
                go_back.append(fragment)
        if ahead:
            text = f"{hello.name} holds {ahead} versions that this state directory has not: it is "
            text += "an older copy. The learner goes back to it"
            state.note("history_lost", text, warning=True, learner=hello.name, versions=ahead)
        return tuple(go_back)

    def _member(self, hello: msg.Hello, go_back: tuple[int, ...], now: float) -> Member:
        """The member of an incarnation: the known one, or a new one in place of the last."""
        state, name = self.state, hello.name
        bases = [each.version for each in hello.copies] or [-1] * state.settings.fragments
        for fragment in go_back:
            bases[fragment] = -1
        if state.heads:
            bases = list(map(min, bases, state.heads))
        holder = state.members.by_name.get(name)
        if holder is not None and holder.incarnation == hello.incarnation:
            holder.bases = tuple(bases)
            state.note("rejoined", f"{name} is back", learner=name)
            return holder
        member = Member(name, hello.incarnation, hello.fingerprint, now, now, bases=tuple(bases))
        if state.resumed is not None:
            member.merged_tokens = state.resumed.merged_tokens.get(hello.incarnation, 0)
        if holder is None:
            state.note("joined", f"{name} has joined", learner=name)
        else:
            member.up_in_force = holder.up_in_force
            state.note("rejoined", f"{name} was started again", learner=name)
        return member

    # Version 0.

    def asked(self, incarnation: str) -> Member | None:
        """This learner, if it is asked for version 0, and nothing of it is being made yet."""
        seeder = self._seeder
        is_asked = seeder and seeder.incarnation == incarnation and not self._making
        return seeder if is_asked else None

    def _may_pick(self, now: float) -> bool:
        """Another learner may be asked: nothing is made yet, and nobody is here who is asked."""
        is_here = self._seeder is not None and self._seeder.is_heard(now)
        return not (is_here or self._making or self.state.heads)

    def _pick(self, now: float) -> Member | None:
        """The learner that is asked from now on, if that has to change."""
        state, named = self.state, self.state.config.run.seeder
        if not self._may_pick(now):
            return None
        able = [each for each in state.members.heard(now) if named in ("", each.name)]
        if not able:
            return None  # The one that is silent may come back and go on.
        self._drop()
        self._seeder = seeder = able[0]
        # With an initial file its role is to wait, so it sends the layout only when it is asked.
        self._transfers = [Transfer(1, now, unasked=not state.config.broker.init)]
        state.note("seeding", f"{seeder.name} is asked for version 0", learner=seeder.name)
        return seeder

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
                self._refuse_layout(member.peer, member.name, member.fingerprint)
                state.members.disconnect(member)
        if state.config.broker.init:
            self._make()
        else:
            self._transfers = [Transfer(each, now, unasked=True) for each in state.state_chunks]

    def chunk(self, header: msg.Header, now: float) -> bool:
        """True if the chunk belongs to version 0 and is not here yet."""
        if (seeder := self.asked(header.incarnation)) is None:
            return False
        # It counts in the shares of the uplink, however many learners its site has.
        seeder.heard_at = seeder.moved_at = seeder.data_at = seeder.merged_at = now
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
        assert self._seeder is not None and self.state.layout is not None
        self._making = True
        self.state.effects.append(ev.Seed(self._seeder.incarnation, self.state.layout))

    def seeded(self) -> None:
        """Version 0 is durable."""
        assert self._making and self._seeder is not None and not self.state.heads
        self._seeder.merged_at = float("-inf")
        self.state.heads = [0] * self.state.settings.fragments
        self._transfers = []
        self.state.note("seeded", "version 0 is durable")

    def failed(self, error: NarrowsError) -> None:
        """Refuses the learner whose layout or parameters cannot become version 0."""
        assert not self.state.heads
        seeder = self._seeder
        self._drop()
        if seeder is not None and seeder.is_connected:
            self.state.refuse(seeder.peer, error, name=seeder.name)
            self.state.members.disconnect(seeder)

    def _drop(self) -> None:
        """Forgets what came from the learner that was asked; another may bring another model."""
        for fragment, transfer in enumerate(self._transfers):
            if self._seeder is not None and transfer.here:
                self.state.effects.append(ev.Drop(fragment, self._seeder.incarnation, 0))
        self._seeder, self._transfers, self._making = None, [], False
        self.state.set_layout(None)

    def advance(self, now: float) -> bool:
        """Asks for what is missing of version 0. True: the run begins, because version 0 is durable
        and enough learners have joined."""
        state, picked = self.state, self._pick(now)
        if picked is not None:
            self.welcome(picked, now)
        if (seeder := self._seeder) and seeder.is_connected and not self._making:
            kind = msg.DataKind.LAYOUT if state.layout is None else msg.DataKind.SEED
            for fragment, transfer in enumerate(self._transfers):
                if chunks := transfer.ask(now, seeder.heard_at, state.settings.window_messages):
                    state.send(seeder, msg.Fetch(kind, fragment, 0, 0, chunks))
        joined = len(state.members.heard(now))
        if not state.heads or joined < state.config.run.learners_at_start:
            return False
        state.turn(msg.Phase.RUNNING)
        state.note("begun", f"the run begins with {joined} learner{'s' * (joined != 1)}")
        for member in state.members.connected():
            self.welcome(member, now)
        return True

    def waiting_for(self, now: float) -> str:
        """Words for the status."""
        state, seeder = self.state, self._seeder
        if state.heads:
            wanted = state.config.run.learners_at_start
            return f"learners: {len(state.members.heard(now))} of {wanted} have joined"
        if self._making:
            return "the disk: version 0 is being written"
        if seeder is None or not seeder.is_connected:
            return f"{state.config.run.seeder or 'a learner'} to join and send version 0"
        here = sum(transfer.here for transfer in self._transfers)
        total = sum(transfer.chunks for transfer in self._transfers)
        return f"version 0 from {seeder.name}: {100 * here // total}% is here"
