"""The topics of the downlink that have listeners.

The broker must know: pub/sub drops a message to a topic without one, and the learner would have to
ask for it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from narrows.proto.limits import TOPIC_BYTES_MAX

TOPICS_MAX = 1 << 18
"""Topics that are remembered, beside those of known learners. More of them are a flood."""


@dataclass
class Subscriptions:
    """Topics with the number of their connections, as far as subscriptions can be trusted.

    Anybody may send an unsubscription, and could silence a learner with it. So the topics of a
    known learner stay until it is forgotten. Then those without listeners go, as others do with
    their last connection. A learner that is only cut off does not subscribe again.
    """

    _listeners: dict[bytes, int] = field(default_factory=dict[bytes, int])
    _kept: set[bytes] = field(default_factory=set[bytes])
    _ignored: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Subscriptions that did not count, by topic, if the topic has listeners: libzmq will tell
    their end as well, and not whose it is."""

    def __contains__(self, topic: bytes) -> bool:
        return topic in self._listeners

    def __len__(self) -> int:
        return len(self._listeners)

    def has(self, topics: Set[bytes]) -> bool:
        """True if somebody has subscribed to each of them."""
        return topics <= self._listeners.keys()

    def take(self, frame: bytes) -> Set[bytes]:
        """Takes in the message of a subscriber: 1 or 0, and the topic. Anything else is ignored.

        Returns the topic if it is subscribed to, also if it was before.
        """
        topic = frame[1 : 1 + TOPIC_BYTES_MAX]
        if frame[:1] == b"\x01":
            if topic in self._kept or topic in self or len(self) < TOPICS_MAX:
                self._listeners[topic] = self._listeners.get(topic, 0) + 1
                return {topic}
        elif self._ignored.get(topic):
            self._ignored[topic] -= 1
        elif frame[:1] == b"\x00" and topic in self:
            self._listeners[topic] = max(self._listeners[topic] - 1, 0)
            self._drop_unheard([topic])
        return frozenset()

    def ignore(self, frame: bytes) -> None:
        """Notes a subscription that did not count."""
        topic = frame[1 : 1 + TOPIC_BYTES_MAX]
        if frame[:1] == b"\x01" and topic in self:
            self._ignored[topic] = self._ignored.get(topic, 0) + 1

    def keep(self, topics: Set[bytes]) -> None:
        """Keeps the topics of a known learner, whatever unsubscriptions come."""
        self._kept |= topics

    def let_go(self, topics: Set[bytes]) -> None:
        """Lets the topics of a forgotten learner go once nobody listens to them."""
        self._kept -= topics
        self._drop_unheard(topics)

    def _drop_unheard(self, topics: Iterable[bytes]) -> None:
        for topic in topics:
            # 1 for a topic that was never subscribed to: there is nothing to delete.
            if topic not in self._kept and not self._listeners.get(topic, 1):
                del self._listeners[topic]
                self._ignored.pop(topic, None)
