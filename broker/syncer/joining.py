"""Hello and Welcome: who may join, what a learner is told, and whether its history is ours."""

from __future__ import annotations

from dataclasses import dataclass

from narrows.broker.syncer import events as ev
from narrows.broker.syncer import shares
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.pushes import Pushes
from narrows.broker.syncer.seeding import Seeding
from narrows.broker.syncer.state import State, fault
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, printable
from narrows.proto.timing import HEARD_S
from narrows.proto.wire import name_of, speaks_for


@dataclass(eq=False)
class Joining:
    """Admits learners."""

    state: State
    seeding: Seeding
    pushes: Pushes

    def hello(self, peer: str, site: str | None, hello: msg.Hello, now: float) -> None:
        """Admits a learner. `site`: whom its key may speak for; None: no keys.

        Raises RemoteProtocolError for one that is not admitted.
        """
        state = self.state
        if state.stopping:
            state.effects.append(ev.Send(peer, msg.Bye(state.stopping)))
            return
        self._check(site, hello, now)
        self.seeding.give_way(hello, now)
        if state.layout is not None and hello.fingerprint != state.fingerprint:
            self.seeding.refuse_layout(peer, hello.name, hello.fingerprint)
            return
        go_back = self._go_back(hello)
        other = state.members.by_peer.get(peer)
        if other is not None and other.incarnation != hello.incarnation:
            self.pushes.drop_incomplete(other.incarnation)  # Its connection speaks for another now.
        member = self._member(hello, go_back, now)
        state.members.connect(member, peer, now)
        self.seeding.pick(now)
        shares.advance(state, now, member)
        self.welcome(member, now, go_back)

    def welcome(self, member: Member, now: float, go_back: tuple[int, ...] = ()) -> None:
        """Tells a learner everything that the group shares."""
        state = self.state
        state.send(
            member,
            msg.Welcome(
                run_id=state.run_id,
                role=self.seeding.role(member),
                settings=state.settings,
                uplink_port=state.ports[0],
                downlink_port=state.ports[1],
                go_back=go_back,
                beat=state.beat(member, now),
            ),
        )

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
                "choose another --name, or stop the other process first", ErrorCode.NAME_IN_USE,
            )  # fmt: skip
        if hello.run_id not in ("", state.run_id):
            raise fault(
                "this learner belongs to another run",
                f"run {state.run_id}", f"run {printable(hello.run_id)}",
                "start the learner again: it joins this run with this run's model",
                ErrorCode.WRONG_RUN,
            )  # fmt: skip
        if len(hello.held) not in (0, count):
            raise fault(
                "this learner's model is cut into another number of fragments",
                f"{count} fragments, or none", str(len(hello.held)),
                "start the learner again: the run's number of fragments has changed",
                ErrorCode.WRONG_RUN,
            )  # fmt: skip
        if sum(each.name != name for each in state.members.connected()) >= msg.LEARNERS_MAX:
            raise fault(
                "the run is full", f"at most {msg.LEARNERS_MAX} learners", "one more",
                "wait until a learner leaves", ErrorCode.OVER_CAPACITY,
            )  # fmt: skip

    def _go_back(self, hello: msg.Hello) -> tuple[int, ...]:
        """Fragments whose copy is not part of this history: the state directory is an older copy.

        Within one epoch a publication may overtake a Welcome, and that is no step back.
        """
        state = self.state
        if hello.epoch == state.epoch:
            return ()
        ahead, go_back = 0, []
        for fragment, held in enumerate(hello.held):
            if held.version < 0:
                continue
            # Without a head the directory is a copy from before version 0: seed the run anew.
            head = state.heads[fragment] if state.heads else -1
            ahead += max(0, held.version - head)
            known = state.published_digest(fragment, held.version) if held.version <= head else None
            if known != held.digest:
                go_back.append(fragment)
        if ahead:
            text = f"{hello.name} holds {ahead} versions that this state directory has not: it is "
            text += "an older copy. The learner goes back to it"
            state.note("history_lost", text, warning=True, learner=hello.name, versions=ahead)
        return tuple(go_back)

    def _member(self, hello: msg.Hello, go_back: tuple[int, ...], now: float) -> Member:
        """The member of an incarnation: the known one, or a new one in place of the last."""
        state, name = self.state, hello.name
        held = [each.version for each in hello.held] or [-1] * state.settings.fragments
        for fragment in go_back:
            held[fragment] = -1
        if state.heads:
            held = list(map(min, held, state.heads))
        holder = state.members.by_name.get(name)
        if holder is not None and holder.incarnation == hello.incarnation:
            holder.held = tuple(held)
            state.note("rejoined", f"{name} is back", learner=name)
            return holder
        member = Member(name, hello.incarnation, hello.fingerprint, now, now, held=tuple(held))
        member.merged_tokens = state.merged_tokens.get(hello.incarnation, 0)
        if holder is None:
            state.note("joined", f"{name} has joined", learner=name)
        else:
            # What the process before it has pushed completely still counts; the rest never comes.
            self.pushes.drop_incomplete(holder.incarnation)
            member.up_in_force = holder.up_in_force
            state.note("rejoined", f"{name} was started again", learner=name)
        return member
