"""Syncer and Session by hand: builders and short-cuts for tests of single rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from narrows.broker.config import BrokerConfig, preset
from narrows.broker.syncer import events as bev
from narrows.broker.syncer.machine import Resumed, Syncer
from narrows.broker.syncer.member import Stepping
from narrows.broker.syncer.rounds import Round
from narrows.broker.syncer.run_secret import RunSecret
from narrows.learner.session import events as lev
from narrows.learner.session.identity import Identity
from narrows.learner.session.machine import Session
from narrows.proto import messages as msg
from narrows.proto.codec.codecs import codec_names
from narrows.proto.codec.transfer import STATE_CODEC
from narrows.proto.config import override
from narrows.proto.layout import fingerprint, split_layout
from narrows.proto.limits import PROTOCOL

RUN = "run"
EPOCH = (0, 1, 7)
NEXT_EPOCH = (0, 2, 3)
"""Epoch of the next life of the broker. Nonces are random: this one is lower."""
SECRET = RunSecret(b"s" * 32)
LAYOUT = (
    msg.LayoutEntry("weight", (25, 40), "float32", "rda"),
    msg.LayoutEntry("bias", (1000,), "float32", "mean"),
)
#: Two fragments: the weight and the bias.
ELEMENTS = (1000, 1000)

PARTS: dict[str, tuple[msg.LayoutPart, ...]] = {}
"""The layouts of all Hellos, by fingerprint."""

E = TypeVar("E")


def only(effects: Sequence[object], kind: type[E]) -> list[E]:
    """The effects, or the messages sent, of one type."""
    found = [effect for effect in effects if isinstance(effect, kind)]
    for effect in effects:
        if isinstance(effect, bev.Send | lev.Send) and isinstance(effect.message, kind):
            found.append(effect.message)
    return found


def make(kind: Callable[..., E], values: dict[str, object], fields: dict[str, object]) -> E:
    """A message with `fields` in place of some of the usual `values`."""
    return kind(**{**values, **fields})


def one(effects: Sequence[object], kind: type[E]) -> E:
    (found,) = only(effects, kind)
    return found


def incarnation_of(name: str, life: int = 1) -> str:
    return f"{life}{name.encode().hex():0>31}"[:32]


def hello(name: str, **fields: object) -> msg.Hello:
    """A valid first Hello but for `fields`: `layout` and `frozen_digest` for the fingerprint."""
    layout = cast(tuple[msg.LayoutEntry, ...], fields.pop("layout", LAYOUT))
    parts = split_layout(layout, cast(int, fields.pop("frozen_digest", 0)))
    told = fingerprint(layout, parts[0].frozen_digest if parts else 0)
    PARTS[told] = parts
    values: dict[str, object] = {
        "protocol": PROTOCOL,
        "name": name,
        "incarnation": incarnation_of(name),
        "run_id": "",
        "epoch": (0, 0, 0),
        "fingerprint": told,
        "codecs": codec_names(),
        "step": 0,
        "tokens": 0,
        "versions": (),
    }
    return make(msg.Hello, values, fields)


def config(mode: str = "decoupled", **settings: object) -> BrokerConfig:
    """Two fragments; settings as `section__key`."""
    values = {name.replace("__", "."): value for name, value in settings.items()}
    count = 1 if mode == "diloco" else 2
    base = override(override(BrokerConfig(), preset(mode)), {"fragments.count": count})
    return override(base, values)


class Desk:
    """A syncer whose learners are named; each has a peer of its own name."""

    def __init__(
        self,
        mode: str = "decoupled",
        *,
        resumed: Resumed | None = None,
        uplink_port: int = 0,
        **settings: object,
    ) -> None:
        self.now = 100.0
        self.handle = 0
        self.silent = False
        self.syncer = Syncer(
            config(mode, **{"fragments__sync_period_steps": 20, **settings}),
            run_id=RUN,
            epoch=EPOCH,
            secret=SECRET,
            now=self.now,
            resumed=resumed,
            uplink_port=uplink_port,
        )
        self.state = self.syncer.state

    def do(self, event: bev.Event, after_s: float = 0.0) -> list[bev.Effect]:
        """Handles an event. Learners tell their layouts at once, unless they are `silent`."""
        self.now += after_s
        effects = self.syncer.handle(event, now=self.now)
        self.check()
        asked = [each for each in effects if isinstance(each, bev.Send)]
        for send in asked:
            if isinstance(send.message, msg.AskLayout) and not self.silent:
                effects.remove(send)
                effects += self.tell_layout(send.peer, send.message.first)
        return effects

    def check(self) -> None:
        """The syncer's state fits together, after each event."""
        self.syncer.check()

    def tell_layout(self, peer: bytes, first: int) -> list[bev.Effect]:
        """A learner tells the part of its layout that it is asked for."""
        member = self.state.roster.by_peer(peer)
        assert member is not None
        return self.do(bev.Received(peer, PARTS[member.fingerprint][first]))

    def wait(self, seconds: float) -> list[bev.Effect]:
        """Lets time pass, waking the syncer whenever it wants to be."""
        effects: list[bev.Effect] = []
        until = self.now + seconds
        while (deadline := self.syncer.next_deadline()) is not None and deadline <= until:
            assert deadline > self.now or not effects, "busy loop"
            self.now = max(self.now, deadline)
            effects += self.do(bev.DeadlineReached())
        self.now = until
        return effects

    def say(
        self,
        name: str,
        message: msg.ControlMessage,
        after_s: float = 0.0,
        *,
        sent: tuple[int, ...] = (),
    ) -> list[bev.Effect]:
        """A learner speaks; its streams from the broker stand at `sent`."""
        return self.do(bev.Received(name.encode(), message, f"tcp://{name}", sent=sent), after_s)

    def found(self, *names: str) -> None:
        """The learners join, the first one founds, everybody adopts version 0."""
        for name in names:
            self.say(name, hello(name))
        for index, elements in enumerate(ELEMENTS[: len(self.state.table)]):
            total = elements if len(self.state.table) > 1 else sum(ELEMENTS)
            self.chunk(names[0], index, count=total, kind=msg.DataKind.FOUND, codec=STATE_CODEC)
        self.do(bev.Founded(tuple(range(len(self.state.table)))))
        self.do(bev.CheckpointWritten(0))
        for name in names:
            self.adopt(name)

    def adopt(self, name: str) -> None:
        """The learner holds every newest version, and has taken two steps of a second."""
        for index, head in enumerate(self.state.heads):
            self.say(name, msg.Adopted(index, head.version))
        self.report(name, step=2, tokens=200)

    def report(self, name: str, *, step: int, tokens: int, step_s: float = 1.0) -> list[bev.Effect]:
        """The broker has seen steps of `step_s` seconds, the last one now."""
        ledger = msg.TokenLedger()
        effects = self.say(name, msg.Report(step, tokens, step_s, None, (), ledger, 0.0))
        if (member := self.state.roster.get(name)) is not None and step_s > 0:
            member.stepping = Stepping(step - 1, self.now - step_s, step, self.now)
        return effects

    def steps(self, name: str, fragment: int) -> int:
        """Inner steps since the learner adopted the fragment, at one per second."""
        member = self.state.roster.get(name)
        assert member is not None
        adopted_at = member.copies.adopted_at[fragment]
        return max(1, int(self.now - adopted_at)) if adopted_at is not None else 1

    def count(self, tokens: int) -> None:
        """So many tokens have been merged."""
        clock = self.state.clock
        clock.units = max(clock.units, tokens * clock.fragments)

    def running(self, *names: str) -> Desk:
        """Founded, and the first round is open."""
        self.found(*names)
        spacing = self.state.settings.sync_period_steps / len(self.state.heads)
        for _ in range(int(spacing) + 1):
            self.wait(1.0)
            for name in names:
                self.say(name, msg.Alive(0))
        assert self.state.open_rounds()
        return self

    @property
    def round(self) -> Round:
        """The oldest open round."""
        return min(self.state.rounds.values(), key=lambda round_: round_.opened_at)

    def _version(self, fragment: int) -> int:
        return self.state.heads[fragment].version if fragment < len(self.state.heads) else 0

    def header(self, name: str, fragment: int, **fields: object) -> msg.Header:
        values: dict[str, object] = {
            "protocol": PROTOCOL,
            "run_id": RUN,
            "epoch": EPOCH,
            "kind": msg.DataKind.PUSH,
            "learner": name,
            "incarnation": incarnation_of(name),
            "fragment": fragment,
            "version": self._version(fragment),
            "push_id": 1,
            "offset": 0,
            "count": ELEMENTS[fragment] if fragment < len(ELEMENTS) else 1,
            "codec": self.state.settings.push_codec,
            "payload_digest": 1,
            "result_digest": 0,
            "stream": 0,
            "position": 1000,
        }
        if fields.get("kind") is msg.DataKind.FOUND:
            values["push_id"] = 0
        return make(msg.Header, values, fields)

    def chunk(
        self, name: str, fragment: int, *, size_bytes: int = 0, **fields: object
    ) -> list[bev.Effect]:
        """A chunk arrives; if it is accepted, it is unpacked at once."""
        self.handle += 1
        header = self.header(name, fragment, **fields)
        effects = self.do(bev.ChunkArrived(header, self.handle, size_bytes))
        if only(effects, bev.Unpack):
            effects += self.do(bev.ChunkUnpacked(header, self.handle))
        return effects

    def push(self, name: str, fragment: int = 0, **fields: object) -> list[bev.Effect]:
        """Announces a push with its one chunk still to come."""
        values: dict[str, object] = {
            "fragment": fragment,
            "base_version": self._version(fragment),
            "attempt": 1,
            "push_id": 1,
            "elements": ELEMENTS[fragment],
            "tokens": 100,
            "steps": 1,
        }
        return self.say(name, make(msg.Push, values, fields))

    def contribute(
        self, name: str, fragment: int = 0, push_id: int = 1, steps: int = 1
    ) -> list[bev.Effect]:
        """A complete push."""
        effects = self.push(name, fragment, push_id=push_id, steps=steps)
        return effects + self.chunk(name, fragment, push_id=push_id)


SETTINGS = msg.RunSettings(
    mode=msg.Mode.DECOUPLED,
    fragment_count=2,
    sync_period_steps=4,
    overlap_steps=1,
    push_codec="int4-zstd",
    publish_codec="int4-zstd",
    push_rho=0.5,
    publish_rho=0.5,
    push_bits=3.0,
    publish_bits=3.0,
    chunk_elements=65536,
    message_bytes=1 << 20,
    streams=1,
    error_feedback=True,
    tokens_per_run_step=0,
    goal_tokens=0,
    max_offline_s=3600.0,
)


class Seat:
    """A session with a broker played by the test."""

    def __init__(self, *, settings: msg.RunSettings = SETTINGS, warm_up_steps: int = 0) -> None:
        identity = Identity("a", incarnation_of("a"), LAYOUT, 0)
        self.session = Session(identity, jitter=lambda: 0.0, contribute_after_steps=warm_up_steps)
        self.settings = settings
        self.now = 100.0
        self.handle = 0

    @property
    def links(self) -> tuple[object, ...]:
        return tuple(self.session.fragments)

    def do(self, event: lev.Event, after_s: float = 0.0) -> list[lev.Effect]:
        self.now += after_s
        effects = self.session.handle(event, now=self.now)
        self.session.check()
        return effects

    def hear(self, message: msg.ControlMessage, after_s: float = 0.0) -> list[lev.Effect]:
        return self.do(lev.Received(message), after_s)

    def wait(self, seconds: float) -> list[lev.Effect]:
        effects: list[lev.Effect] = []
        until = self.now + seconds
        while (deadline := self.session.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            effects += self.do(lev.DeadlineReached())
        self.now = until
        return effects

    def welcome(
        self, versions: Sequence[int] = (0, 0), *, epoch: msg.Epoch = EPOCH, **fields: object
    ) -> list[lev.Effect]:
        values: dict[str, object] = {
            "run_id": RUN,
            "epoch": epoch,
            "role": msg.Role.ADOPT,
            "settings": self.settings,
            "uplink_port": 1,
            "downlink_port": 2,
            "fragments": tuple(msg.FragmentHead(v, digest(i, v)) for i, v in enumerate(versions)),
            "rounds": (),
            "phase": msg.Phase.RUNNING,
            "run_tokens": 0,
            "tokens_per_s": 0.0,
            "step": 0,
            "up_bits_per_s": 0.0,
        }
        return self.hear(make(msg.Welcome, values, fields))

    def restarted(
        self, versions: Sequence[int] = (0, 0), *, epoch: msg.Epoch = NEXT_EPOCH, **fields: object
    ) -> list[lev.Effect]:
        """The Welcome of another life of the broker, which did not know the session."""
        self.hear(msg.Refuse("unknown_session", "no session"))
        return self.welcome(versions, epoch=epoch, **fields)

    def beat(
        self,
        versions: Sequence[int],
        *rounds: msg.OpenRound,
        phase: msg.Phase = msg.Phase.RUNNING,
        epoch: msg.Epoch = EPOCH,
    ) -> list[lev.Effect]:
        return self.hear(msg.Beat(epoch, phase, tuple(versions), rounds, 0, 0.0, (), 0.0))

    def data(self, fragment: int, version: int, **fields: object) -> list[lev.Effect]:
        """A chunk from the broker: by default a whole publication."""
        self.handle += 1
        values: dict[str, object] = {
            "protocol": PROTOCOL,
            "run_id": RUN,
            "epoch": self.session.epoch,
            "kind": msg.DataKind.PUBLICATION,
            "learner": "a",
            "incarnation": incarnation_of("a"),
            "fragment": fragment,
            "version": version,
            "push_id": 0,
            "offset": 0,
            "count": ELEMENTS[fragment],
            "codec": "int4-zstd",
            "payload_digest": version,
            "result_digest": digest(fragment, version),
            "stream": 0,
            "position": 1000,
        }
        header = make(msg.Header, values, fields)
        return self.do(lev.ChunkDecoded(header, self.handle))

    def receive(self, fragment: int, version: int, **fields: object) -> list[lev.Effect]:
        """A whole publication or state arrives and is applied."""
        effects = self.data(fragment, version, **fields)
        one(effects, lev.Apply)
        return effects + self.do(lev.Applied(fragment, version, digest(fragment, version)))

    def joined(self, versions: Sequence[int] = (0, 0)) -> Seat:
        """Welcomed, and every fragment adopted."""
        self.do(lev.DeadlineReached())
        self.welcome(versions)
        for index, version in enumerate(versions):
            self.receive(index, version, kind=msg.DataKind.STATE)
        self.do(lev.BoundaryReached())
        assert self.session.fragments.ready
        return self

    def step(self, tokens: int = 100, after_s: float = 1.0) -> list[lev.Effect]:
        effects = self.hear(msg.Probe(0), after_s)  # A sign of life.
        return [*effects[1:], *self.do(lev.StepTaken(tokens))]


def digest(fragment: int, version: int) -> int:
    """Digest of a published copy in these tests."""
    return fragment * 1000 + version


def open_round(fragment: int, base: int, attempt: int = 1, at_step: int = -1) -> msg.OpenRound:
    return msg.OpenRound(fragment, base, attempt, at_step)
