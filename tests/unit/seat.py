"""A learner's session with its broker played by the test: no bytes, no parameters, no clock."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec.structs import replace

from narrows.learner.effects import Assemble, Effect, Note, Send, SendChunks, Snapshot
from narrows.learner.session import Session
from narrows.proto import messages as msg
from narrows.proto.messages import Contributor, DataKind, Header, Mode, Phase, Role

NAME = "site-a"
INCARNATION = "site-a.0000000a"
EPOCH, EPOCH_2 = "1-0000000a", "2-0000000b"
LAYOUT = msg.Layout(0, tuple(msg.LayoutEntry(name, (4, 256), "float32", "rda") for name in "ab"))
SETTINGS = msg.RunSettings(
    fragments=2, sync_period_steps=4, chunk_elements=256, state_chunk_elements=256
)
DILOCO = replace(SETTINGS, mode=Mode.DILOCO, overlap_steps=0, keep=0.0)
CHUNKS = 4
"""Chunks of each of the two fragments."""

E = TypeVar("E")


class Seat:
    """Feeds events, checks the session's invariants after each, and keeps its effects."""

    def __init__(self, settings: msg.RunSettings = SETTINGS, *, is_connected: bool = True) -> None:
        self.now = 100.0
        self.settings = settings
        self.epoch = EPOCH
        self.heads: tuple[int, ...] = (0, 0)
        self.session = Session(NAME, INCARNATION, LAYOUT, self.now)
        self.log: list[Effect] = []
        if is_connected:
            self.session.lost(self.now)
            self.done()

    # What the session has done.

    def take(self, kind: type[E] | tuple[type[E], ...]) -> list[E]:
        """The effects of a kind, or of several, since they were last taken."""
        taken: list[Any] = [each for each in self.log if isinstance(each, kind)]
        self.log = [each for each in self.log if not isinstance(each, kind)]
        return taken

    def sent(self, kind: type[E]) -> list[E]:
        """The control messages of a kind since they were last taken."""
        sends = [each for each in self.log if isinstance(each, Send)]
        taken = [each for each in sends if isinstance(each.message, kind)]
        self.log = [each for each in self.log if each not in taken]
        return [each.message for each in taken]  # type: ignore[misc]

    def noted(self) -> list[str]:
        """The events of the notes since they were last taken."""
        return [each.event for each in self.take(Note)]

    def done(self) -> None:
        """The host's part after an event."""
        self.session.tick(self.now)
        self.log += self.session.effects
        self.session.effects = []
        self.session.check()

    # The broker.

    def beat(self, **fields: Any) -> msg.Beat:
        """A Beat of the broker as it is now; `heads` stay as they were told last."""
        self.heads = fields.pop("heads", self.heads)
        whole: dict[str, Any] = {
            "epoch": self.epoch, "phase": Phase.RUNNING, "heads": self.heads, "collecting": (),
            "period_s": 0.0, "run_tokens": 0, "tokens_per_s": 0.0, "up_bits_per_s": 0.0,
        }  # fmt: skip
        return msg.Beat(**{**whole, **fields})

    def hear(self, message: msg.ControlMessage) -> None:
        self.session.control(message, self.now)
        self.done()

    def told(self, **fields: Any) -> None:
        """A Beat arrives."""
        self.hear(self.beat(**fields))

    def restart(self, **beat: Any) -> None:
        """The broker begins another life, and the learner hears of it and says Hello."""
        self.epoch, self.now = EPOCH_2, self.now + 1.0
        self.told(**beat)

    def welcome(self, role: Role = Role.ADOPT, go_back: tuple[int, ...] = (), **beat: Any) -> None:
        self.hear(msg.Welcome("run", role, self.settings, 7071, 7072, go_back, self.beat(**beat)))

    def refuse(self, code: str, fragment: int = 0, push_id: int = 0) -> None:
        self.hear(msg.Refuse(code, "no", "this", "that", "do so", fragment, push_id))

    # Data.

    def header(
        self, kind: DataKind, fragment: int, version: int, chunk: int = 0, push_id: int = 0,
        contributors: tuple[Contributor, ...] = (),
    ) -> Header:  # fmt: skip
        codec: msg.CodecName = "f32-blosc2" if kind is DataKind.STATE else "int4-zstd"
        return Header(
            self.epoch, kind, "", fragment, version, push_id, chunk, codec, 0, 1000 + version,
            contributors,
        )  # fmt: skip

    def chunk(self, kind: DataKind, fragment: int, version: int, chunk: int = 0) -> bool:
        wanted = self.session.chunk(self.header(kind, fragment, version, chunk), self.now)
        self.done()
        return wanted

    def assemble(self, *, push_id: int = 0, merged: tuple[int, ...] = ()) -> None:
        """The host makes the copies that it was asked for. `merged`: ids of our pushes in it."""
        for kind, fragment, version in self.take(Assemble):
            contributors = tuple(Contributor(INCARNATION, each) for each in merged)
            header = self.header(kind, fragment, version, 0, push_id, contributors)
            self.session.assembled(header, self.now, agrees=True)
            self.done()

    def publish(self, fragment: int, version: int, *merged: int) -> None:
        """A whole publication arrives, and its copy is made."""
        for chunk in range(CHUNKS):
            self.chunk(DataKind.PUBLICATION, fragment, version, chunk)
        self.assemble(merged=merged)

    def state(self, fragment: int, version: int, push_id: int = 0) -> None:
        """A whole state arrives, and its copy is made."""
        for chunk in range(CHUNKS):
            self.chunk(DataKind.STATE, fragment, version, chunk)
        self.assemble(push_id=push_id)

    # The learner.

    def step(self, tokens: int = 8, after_s: float = 0.1) -> None:
        """One inner step and its boundary."""
        self.now += after_s
        self.session.boundary(tokens, 2.5, self.now)
        self.done()

    def rest(self) -> None:
        """The training thread looks for something to adopt without making a step."""
        self.session.join()
        self.done()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.done()

    def encode(self) -> list[SendChunks]:
        """The pool codes every snapshot that was taken."""
        for snapshot in self.take(Snapshot):
            self.session.encoded(snapshot.fragment, snapshot.push_id, self.now)
            self.done()
        return self.take(SendChunks)

    def fail(self) -> None:
        """Coding fails for every snapshot that was taken."""
        for fragment, push_id, _ in self.take(Snapshot):
            self.session.encode_failed(fragment, push_id, reason="no")
            self.done()

    def leave(self) -> None:
        self.session.leave(self.now)
        self.done()


def waiting() -> Seat:
    """A learner on version 0 whose push 1, 8 tokens of fragment 0, is announced and sent."""
    seat = joined()
    seat.told(collecting=(0,))
    seat.step()
    seat.encode()
    return seat


def joined(settings: msg.RunSettings = SETTINGS, version: int = 0) -> Seat:
    """A learner that stands on `version` of both fragments and has made no step."""
    seat = Seat(settings)
    seat.welcome(heads=(version, version))
    for fragment in range(2):
        seat.state(fragment, version)
    seat.rest()
    assert seat.session.joined
    seat.log.clear()
    return seat
