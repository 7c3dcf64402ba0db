"""The queue of subscriptions in XPUB, and which of them can be answered.

XPUB_MANUAL leaves it to the owner what a subscription counts, but its options SUBSCRIBE and
UNSUBSCRIBE name no connection. libzmq 4.3.5 keeps two queues, one of frames and one of the pipes
that subscriptions came from. Each recv takes one of both; the options are for the pipe that was
taken last. Two things make that another connection's:

- A frame that is no subscription, nor the end of one, stands in the queue of frames only. Once it
  is read, pipes are ahead of frames.
- The connection of a frame that waits ends, and a new connection's pipe gets the same memory.

Both queues are empty when recv finds nothing. Until then nobody is listened to in the first case,
and none of that descriptor in the second. The connections whose frames were thrown away are cut:
they dial and subscribe again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import zmq

from narrows.broker.process.connections import Connections
from narrows.broker.process.origin import MessageOrigin, descriptor_of
from narrows.broker.process.parts import PARTS_PER_TURN, receive_part
from narrows.broker.process.subscriptions import Subscriptions


class SubscriptionQueue:
    """Gives the frames of subscribers one by one, as long as each can be answered."""

    def __init__(
        self,
        downlink: zmq.Socket[bytes],
        connections: Connections,
        subscribed: Subscriptions,
        origin_of: Callable[[list[zmq.Frame]], MessageOrigin | None],
    ) -> None:
        self._downlink, self._connections = downlink, connections
        self._subscribed, self._origin_of = subscribed, origin_of
        self._in_step = True
        """The pipe that libzmq took last is that of the frame that was read last."""
        self._refused: set[int] = set()
        """Descriptors that were told of since the queue was last empty."""

    def read(self, most: int) -> Iterator[tuple[bytes, MessageOrigin | None]]:
        """The next `most` frames, each with its origin. Answer it before you take the next one.

        Without an origin the frame is libzmq's own word that a connection with this topic has
        ended.
        """
        thrown: set[int] = set()
        given = 0
        for _ in range(PARTS_PER_TURN):
            frame = receive_part(self._downlink)
            if frame is None:
                self._in_step = True
                self._refused.clear()
                self._connections.ended.clear()
                break
            body, descriptor = frame.bytes, descriptor_of(frame)
            is_subscription = body[:1] in (b"\x00", b"\x01")
            self._in_step &= is_subscription
            if descriptor is None:
                # A subscription of ZMTP 1 has no origin either: it never counts.
                if body[:1] == b"\x00":
                    yield body, None
                continue
            if is_subscription and self._in_step and self._lives(descriptor):
                origin = self._origin_of([frame])
                if origin is not None:
                    yield body, origin
                given += 1
                if given == most:
                    break
                continue
            thrown.add(descriptor)
            self._subscribed.ignore(body)
            if not is_subscription:
                self._refuse(descriptor, frame)
        self._cut(thrown)

    def _lives(self, descriptor: int) -> bool:
        """Since the queue was last empty no connection with this descriptor has ended whose
        subscription was not read. libzmq reports an end before it gives up the pipe. (A learner
        subscribes once on each connection. More frames may be of a liar, and are for its topics.)
        """
        self._connections.read_events(time.monotonic())
        return (self._downlink, descriptor) not in self._connections.ended

    def _refuse(self, descriptor: int, frame: zmq.Frame) -> None:
        if descriptor not in self._refused:
            self._refused.add(descriptor)
            origin = self._origin_of([frame])
            if origin is not None:
                self._connections.refuse(origin, "a message on the downlink is no subscription")

    def _cut(self, descriptors: set[int]) -> None:
        if descriptors:
            self._connections.read_events(time.monotonic())
        for descriptor in descriptors:
            self._connections.cut(descriptor, self._downlink)
