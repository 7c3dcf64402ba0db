"""A peer with a key that says anything: right types, wild values, at random moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from narrows.bench.sim.world import World
from narrows.broker.process.host import Host
from narrows.proto import messages as msg
from narrows.proto import wire
from narrows.proto.codec import CODECS
from narrows.proto.layout import fingerprint

Enter: TypeAlias = Callable[..., None]
"""Calls a method of the broker with these arguments and the time."""

WILD: Final = "wild"
HELLOS: Final = 0.15
"""Share of Hello among the control messages."""


class WildPeer:
    """Sends until `ends`. It uses what the broker tells it, so that it is believed more often."""

    def __init__(self, world: World, enter: Enter, layout: msg.Layout, ends: float) -> None:
        self._world = world
        self._rng = world.rng
        self._enter = enter
        self._layout = layout
        self._ends = ends
        self._epoch = ""
        self._push_id = 0
        self._heads: tuple[int, ...] = (0,)
        self._incarnation = self._new_incarnation()
        self._act()

    def hear(self, frames: list[bytes]) -> None:
        """A control message of the broker."""
        message = wire.decode_control(frames, msg.CONTROL_BYTES_MAX)
        beat = message.beat if isinstance(message, msg.Welcome) else message
        if isinstance(beat, msg.Beat):
            self._epoch = beat.epoch
            self._heads = beat.heads or (0,)

    def _new_incarnation(self) -> str:
        return f"{WILD}.{self._rng.getrandbits(32):08x}"

    def _act(self) -> None:
        if self._world.now > self._ends:
            return
        if self._rng.random() < 0.6:
            frames = wire.encode_control(self._message())
            if self._rng.random() < 0.1:
                frames = [
                    self._rng.randbytes(self._rng.randrange(40))
                    for _ in range(self._rng.randrange(4))
                ]
            self._enter(Host.control, f"{WILD}#0", WILD, frames)
        else:
            self._enter(Host.data, WILD, self._data())
        self._world.after(self._rng.uniform(0.02, 0.5), self._act)

    def _int(self, likely: int) -> int:
        """A number near a likely one, or anything."""
        near = max(0, likely + self._rng.randint(-2, 2))
        anything = self._rng.getrandbits(40)
        return self._rng.choice([likely, likely, near, anything])

    def _message(self) -> msg.ControlMessage:
        fragment = self._rng.randrange(len(self._heads) + 2)
        if self._rng.random() < HELLOS:
            return self._hello()
        version = self._int(self._heads[fragment % len(self._heads)])
        self._push_id += 1
        copies = tuple(self._int(head) for head in self._heads)
        chunks = ((self._int(0), 1 + self._int(1)),)
        kind = self._rng.choice(list(msg.DataKind))
        wild: tuple[msg.ControlMessage, ...] = (
            msg.Report(self._int(9), self._int(99), self._rng.choice([None, 1.0]), copies),
            msg.Push(fragment, self._push_id, version, self._rng.randrange(99), 1 + self._int(3)),
            msg.Fetch(kind, fragment, version, self._rng.randrange(3), chunks),
            msg.AskStatus(),
            msg.Bye("wild"),
            msg.Refuse("bad_message", "wild"),
        )
        return self._rng.choice(wild)

    def _hello(self) -> msg.Hello:
        if self._rng.random() < 0.3:
            self._incarnation = self._new_incarnation()
        name = self._rng.choice([WILD, WILD, WILD, "site-a"])
        mark = self._rng.choice([fingerprint(self._layout)] * 3 + ["0" * 32])
        copies = tuple(msg.CopyDigest(head, self._rng.getrandbits(64)) for head in self._heads)
        epoch = self._rng.choice([self._epoch, ""])
        return msg.Hello(msg.PROTOCOL, name, self._incarnation, "", epoch, mark, copies)

    def _data(self) -> list[bytes]:
        payload = self._rng.randbytes(self._rng.choice([0, 3, 40, 900]))
        header = msg.Header(
            self._epoch,
            self._rng.choice(list(msg.DataKind)),
            self._rng.choice([self._incarnation, self._incarnation, "", "site-a.00000000"]),
            self._rng.randrange(len(self._heads) + 1),
            self._int(self._heads[0]),
            self._push_id,
            self._int(0),
            self._rng.choice(list(CODECS)),
            wire.digest(payload) if self._rng.random() < 0.8 else 0,
            0,
        )
        return [b"u/00", wire.encode_header(header), payload]
