"""The connections that each data message of the downlink goes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.process.accepted import Accepted


@dataclass
class Listeners:
    """Connections by the topic that they listen to."""

    _by_topic: dict[bytes, dict[int, Accepted]] = field(
        default_factory=dict[bytes, dict[int, Accepted]]
    )

    def add(self, descriptor: int, connection: Accepted, topic: bytes) -> None:
        connection.topics.add(topic)
        self._by_topic.setdefault(topic, {})[descriptor] = connection

    def remove(self, descriptor: int, connection: Accepted, topic: bytes) -> None:
        if topic in connection.topics:
            connection.topics.discard(topic)
            del self._by_topic[topic][descriptor]
            if not self._by_topic[topic]:
                del self._by_topic[topic]

    def forget(self, descriptor: int, connection: Accepted) -> None:
        """The connection has ended."""
        for topic in list(connection.topics):
            self.remove(descriptor, connection, topic)

    def of(self, topic: bytes) -> list[Accepted]:
        """The connections that a message with this topic goes to."""
        return list(self._by_topic.get(topic, {}).values())
