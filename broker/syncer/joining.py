"""Admits learners, and tells each of them everything that the group shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from narrows.broker.syncer.members import NAMES_MAX, Member
from narrows.broker.syncer.pushes import Pushes
from narrows.broker.syncer.seeding import Seeding
from narrows.broker.syncer.state import State
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, fault, short
from narrows.proto.timing import HEARD_S
from narrows.proto.units import counted
from narrows.proto.wire import name_of, speaks_for

STRANGER_S: Final = 60.0
"""Log and status name a learner of another run for this long after its newest Hello."""


@dataclass(eq=False)
class Joining:
    """Admits learners, and begins the run when enough of them are here."""

    state: State
    pushes: Pushes
    seeding: Seeding

    def hello(self, peer: str, site: str | None, hello: msg.Hello, now: float) -> None:
        """Admits a learner. Its key may speak for `site`; None: the broker has no keys.

        Raises RemoteProtocolError for one that is not admitted.
        """
        state = self.state
        self._check(site, hello, now)
        seeder = self.seeding.seeder
        is_other = seeder is not None and seeder.incarnation != hello.incarnation
        if is_other and self.seeding.may_pick(now):
            self.seeding.drop()  # A silent seeder does not keep out a learner of another model.
        if state.layout is not None and hello.fingerprint != state.fingerprint:
            self.seeding.refuse_layout(peer, hello.name, hello.fingerprint)
            return
        self._check_place(hello.name, site)

        state.strangers.pop(hello.name, None)
        go_back = self._go_back(hello)
        member = self._member(hello, go_back, now)
        # Another process may have had this name, and another learner this connection.
        for other in (state.members.by_name.get(hello.name), state.members.by_peer.get(peer)):
            if other is not None and other is not member:
                self.pushes.disconnect(other)
        state.members.connect(member, peer, now)
        picked = self.seeding.pick(now)
        state.share_uplink(now, newcomer=member)
        self._welcome(member, now, go_back)
        if picked is not None and picked is not member:
            self._welcome(picked, now)

    def advance(self, now: float) -> bool:
        """Goes on with version 0. True: the run begins, because version 0 is durable and enough
        learners have joined."""
        picked = self.seeding.pick(now)
        if picked is not None:
            self._welcome(picked, now)
        self.seeding.ask(now)
        joined = len(self.state.members.heard(now))
        if not self.state.heads or joined < self.state.config.run.learners_at_start:
            return False
        self.state.enter(msg.Phase.RUNNING)
        learners = "learner" if joined == 1 else "learners"
        self.state.note("begun", f"the run begins with {joined} {learners}")
        for member in self.state.members.connected():
            self._welcome(member, now)
        return True

    def _welcome(self, member: Member, now: float, go_back: tuple[int, ...] = ()) -> None:
        """Tells a learner everything that the group shares."""
        state = self.state
        role = msg.Role.WAIT
        if state.is_open:
            role = msg.Role.ADOPT
        elif self.seeding.asked(member.incarnation) and not state.config.broker.init:
            role = msg.Role.SEED  # With an initial file the layout alone is fetched.
        uplink_port, downlink_port = state.ports
        state.send(
            member,
            msg.Welcome(
                run_id=state.run_id,
                role=role,
                settings=state.settings,
                uplink_port=uplink_port,
                downlink_port=downlink_port,
                go_back=go_back,
                beat=state.beat(member, now),
            ),
        )

    def _check(self, site: str | None, hello: msg.Hello, now: float) -> None:
        """Raises RemoteProtocolError if a learner is not admitted; its layout aside."""
        name = hello.name
        if hello.protocol != msg.PROTOCOL:
            raise fault(
                "another version of the wire format",
                expected=str(msg.PROTOCOL),
                got=str(hello.protocol),
                remedy="install the same version of narrows on both sides",
                code=ErrorCode.PROTOCOL_VERSION,
            )
        if site is not None and not speaks_for(site, name):
            raise fault(
                "this key may not speak for this name",
                expected=f"{site} or {site}/...",
                got=name,
                remedy="start the learner with a name of its key's site, or with that site's key",
                code=ErrorCode.KEY_NAME,
            )
        if name_of(hello.incarnation) != name:
            raise fault(
                "incarnation",
                expected=f"{name}. and eight hex digits",
                got=hello.incarnation,
                remedy="make the incarnation of the learner's own name",
                code=ErrorCode.BAD_NAME,
            )
        holder = self.state.members.by_name.get(name)
        if holder and holder.incarnation != hello.incarnation and holder.is_heard(now):
            raise fault(
                f"another process is {name}",
                expected=f"a name that nobody has used in the last {HEARD_S:g} s",
                got=f"{name}, heard {now - holder.heard_at:.1f} s ago",
                remedy="choose another name, or stop the other process first",
                code=ErrorCode.NAME_IN_USE,
            )
        if hello.run_id not in ("", self.state.run_id):
            self._meet_stranger(hello, now)
            raise fault(
                "this broker holds another run than this learner belongs to",
                expected=f"run {self.state.run_id}",
                got=f"run {short(hello.run_id)}",
                remedy="if the broker's state directory was lost, or is not mounted, stop this "
                "broker and start it with the right --state-dir: the learner trains on and comes "
                "back. To join this run instead, start the learner again",
                code=ErrorCode.WRONG_RUN,
            )
        count = self.state.settings.fragments
        if len(hello.copies) not in (0, count):
            raise fault(
                "this learner's model is cut into another number of fragments",
                expected=f"{count} fragments, or none",
                got=str(len(hello.copies)),
                remedy="start the learner again: the run's number of fragments has changed",
                code=ErrorCode.LAYOUT_DIFFERS,
            )

    def _meet_stranger(self, hello: msg.Hello, now: float) -> None:
        """Names a learner of another run once, though it says Hello each second."""
        state = self.state
        mine = f"is at version {max(state.heads)}" if state.heads else "is empty"
        what = (
            f"belongs to run {short(hello.run_id)}, and this broker holds run {state.run_id}, "
            f"which {mine}"
        )
        # The newest Hello stands last.
        _, seen_at, times = state.strangers.pop(hello.name, ("", -STRANGER_S, 0))
        told = (
            f"{hello.name}: it {what} (expected run {state.run_id}). Start the broker with the "
            "state directory of that run, which was lost or is not mounted; if that run is over, "
            f"stop {hello.name}"
        )
        state.strangers[hello.name] = (told, now, times + 1)
        if now >= seen_at + STRANGER_S:
            state.note(
                "other_run",
                f"{hello.name} {what}: was the state directory lost, or is it not mounted?",
                warning=True,
                learner=hello.name,
            )
        if len(state.strangers) > NAMES_MAX:
            del state.strangers[next(iter(state.strangers))]

    def _check_place(self, name: str, site: str | None) -> None:
        """Raises RemoteProtocolError if there is no place for a learner.

        While another site is here, a site has half of the places at most. Without keys a name does
        not say who speaks, so this would keep nobody away. A learner that is here keeps its place.
        """
        here = self.state.members.connected()
        if any(each.name == name for each in here):
            return
        half = msg.LEARNERS_MAX // 2
        taken = sum(each.site == site for each in here)
        if half <= taken < len(here):
            raise fault(
                f"{site} has no place left while other sites are here",
                expected=f"half of the places, {half}, for one site",
                got="one more",
                remedy=f"wait until a learner of {site} leaves",
                code=ErrorCode.OVER_CAPACITY,
            )
        if len(here) >= msg.LEARNERS_MAX:
            raise fault(
                "the run is full",
                expected=f"at most {msg.LEARNERS_MAX} learners",
                got="one more",
                remedy="wait until a learner leaves",
                code=ErrorCode.OVER_CAPACITY,
            )

    def _go_back(self, hello: msg.Hello) -> tuple[int, ...]:
        """Fragments whose copy is not part of this history: the state directory is an older copy.

        Asked only of a learner of another epoch: within one, copies are of this history.
        """
        state = self.state
        if hello.epoch == state.epoch:
            return ()
        go_back: list[int] = []
        versions_ahead = 0
        for fragment, copy in enumerate(hello.copies):
            if copy.version < 0:
                continue
            # Without a head the directory is a copy from before version 0: seed the run anew.
            head = state.heads[fragment] if state.heads else -1
            versions_ahead += max(0, copy.version - head)
            known = state.published_digest(fragment, copy.version) if copy.version <= head else None
            if known != copy.digest:
                go_back.append(fragment)
        if versions_ahead:
            ahead = counted(versions_ahead, "version")
            state.note(
                "history_lost",
                f"{hello.name} holds {ahead} that this state directory has not: it is an older "
                "copy. The learner goes back to it",
                warning=True,
                learner=hello.name,
                versions=versions_ahead,
            )
        return tuple(go_back)

    def _member(self, hello: msg.Hello, go_back: tuple[int, ...], now: float) -> Member:
        """The member of an incarnation: the known one, or a new one in place of the last."""
        state = self.state
        name = hello.name
        bases = [copy.version for copy in hello.copies] or [-1] * state.settings.fragments
        for fragment in go_back:
            bases[fragment] = -1
        if state.heads:
            # No copy of this history is ahead of its head, whatever a Hello claims.
            bases = list(map(min, bases, state.heads))
        holder = state.members.by_name.get(name)
        if holder is not None and holder.incarnation == hello.incarnation:
            holder.stand_on(tuple(bases), state.heads)
            state.note("rejoined", f"{name} is back", learner=name)
            return holder
        member = Member(name, hello.incarnation, hello.fingerprint, now, now)
        member.stand_on(tuple(bases), state.heads)
        member.merged_tokens = state.tokens_before.get(hello.incarnation, 0)
        if holder is None:
            state.note("joined", f"{name} has joined", learner=name)
        else:
            member.up_in_force = holder.up_in_force
            state.note("rejoined", f"{name} was started again", learner=name)
        return member
