"""The ports of the two hosts: what a host asks of sockets, workers and parameters.

The process gives real ports (ZeroMQ, threads, torch), the simulator virtual ones. The time
is an argument of every call into a host, so a host needs no clock. What crosses a port is plain
data: nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from narrows.proto.codec import F32, PushChunk
from narrows.proto.layout import Fragment
from narrows.proto.messages import CodecName, RunSettings

Done: TypeAlias = Callable[[Any, float], None]
"""Called on the loop with the result of the work, or the exception that ended it, and the time."""


class Wires(Protocol):
    """The way out. Both calls return at once."""

    def control(self, peer: str, frames: list[bytes]) -> bool:
        """Queues a control message to a connection; "" is the broker. False: it is gone."""

    def data(self, topic: str, header: bytes, payload: bytes) -> bool:
        """Sends one data message. False: no room or no budget now; nothing was sent, try again."""


class BrokerWires(Wires, Protocol):
    """The broker's way out: a publication reaches many connections, and one must not stop all."""

    def data(self, topic: str, header: bytes, payload: bytes, lossy: bool = False) -> bool:
        """As in Wires. `lossy`: connections without room miss the message, the others get it."""


class Pool(Protocol):
    """Workers off the loop."""

    def run(self, work: Callable[[], Any], done: Done) -> None:
        """Runs `work` on a worker, then `done(result or exception, now)` on the loop."""


# The learner's parameters.


@dataclass(frozen=True, eq=False)
class Copy:
    """A published copy of a fragment. It is not written to after it is made."""

    values: F32
    """(n,) as the broker has it, bit for bit, in host memory."""
    rounded: Any
    """(n,) as the parameters can hold it, in the form that their island computes with: `values`
    itself if nothing differs, another float32 array, or a vector on a device."""


@dataclass(frozen=True, eq=False)
class CodedPush:
    """A push that waits: its chunks for repair, and the values that its receiver holds."""

    base: int
    """Version that the parameters stood on."""
    codec: CodecName
    chunk_elements: int
    chunks: tuple[PushChunk, ...]
    on_device: Any = None
    """The same values in a form of the island's own; None: it decodes the chunks."""


class Adoption(NamedTuple):
    """The terms of an adoption besides the parameters; learner/island.py has the rule."""

    old: Copy
    new: Copy
    push: CodedPush | None
    keep: float
    merged: bool


class IslandSnapshot(Protocol):
    """Parameters and published copy of a fragment, as they were between two steps."""

    def encode(self, fragment: Fragment, base: int, settings: RunSettings) -> CodedPush:
        """Codes `published - parameters`, on a worker. Raises LocalProtocolError NOT_FINITE."""
        ...


class Island(Protocol):
    """The parameters of a learner, whatever holds them.

    `copy` is called on a worker, everything else on the training thread between two steps.
    """

    def copy(self, fragment: Fragment, values: F32) -> Copy:
        """Prepares a published copy (n,) for `snapshot` and `adopt`, so that they only compute."""
        ...

    def read(self, fragment: Fragment) -> F32:
        """The parameters (n,) of a fragment, for version 0."""
        ...

    def snapshot(self, fragment: Fragment, published: Copy) -> IslandSnapshot:
        """Copies the parameters of a fragment now, to be encoded later."""
        ...

    def adopt(self, fragment: Fragment, rule: Adoption) -> None:
        """Moves the parameters in place by the rule of an adoption."""

    def overwrite(self, fragment: Fragment, new: Copy) -> None:
        """Makes the parameters equal to a copy, whatever they were."""
