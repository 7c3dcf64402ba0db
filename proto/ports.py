"""The ports of the two hosts: what a host asks of sockets, workers and parameters.

The process gives real ports (ZeroMQ, threads, torch), the simulator virtual ones. The time
is an argument of every call into a host, so a host needs no clock. What crosses a port is plain
data: nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from narrows.proto.codec import F32, PushChunk, Spread
from narrows.proto.layout import Fragment
from narrows.proto.messages import CodecName, DiskStatus, Layout, RunSettings

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


class CodingPool(Pool, Protocol):
    """Workers that share one work."""

    def spread(self, call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Within a work: `call` of each item, by its worker and by all that are idle. The results
        are in the order of items, and the first item whose call raises ends all."""
        ...


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
    share: float = 0.0
    """The published movement takes the place of this share of Adam's first moments."""
    steps: int = 0
    """Inner steps at the run's pace that the movement from `old` to `new` stands for."""


class Prepared(NamedTuple):
    """An adoption that is computed but for the parameters: params = out + keep * params."""

    out: Any
    """float32 (n,), in the form that the island computes with, and not written to. With keep 0 and
    no push to subtract it is the new copy's `rounded` itself."""
    keep: float
    share: float = 0.0
    """As in the rule."""
    movement: Any = None
    """(old - new) / steps of the exact published copies, float32 (n,), in the form that the island
    computes with; None: the optimizer's moments stay."""


class Island(Protocol):
    """The parameters of a learner, whatever holds them.

    `copy` and `prepare` may be called on any thread, everything else is called on the training
    thread between two steps.
    """

    def copy(self, fragment: Fragment, values: F32) -> Copy:
        """Prepares a published copy (n,) for `snapshot` and `adopt`, so that they only compute."""
        ...

    def read(self, fragment: Fragment) -> F32:
        """The parameters (n,) of a fragment, for version 0."""
        ...

    def snapshot(
        self, fragment: Fragment, published: Copy, base: int, settings: RunSettings
    ) -> Callable[[Spread], CodedPush]:
        """Copies the parameters of a fragment now. A worker then calls the result, which codes
        `published - parameters`, and raises LocalProtocolError NOT_FINITE. It may share its chunks
        with other workers."""
        ...

    def prepare(self, fragment: Fragment, rule: Adoption) -> Prepared:
        """Computes all of an adoption that needs no parameters, and touches none."""
        ...

    def adopt(self, fragment: Fragment, prepared: Prepared) -> None:
        """Moves the parameters in place, in one pass. With keep 0 they become equal to `out`, bit
        for bit, whatever they were. The optimizer's moments take their share of the movement."""


# The broker's disk.

Version = TypeVar("Version")
State = TypeVar("State", contravariant=True)


class Store(Protocol[Version, State]):
    """The journal of a run, written on workers. The broker's own records cross it: a version of a
    fragment with all that went into it, and the state of a fragment. A write raises OSError if the
    disk refuses it: then nothing was written, and the same call may be made again."""

    def replay(self, fragment: Fragment, state: State) -> Iterable[Version]:
        """The durable versions of a fragment that came after this state."""
        ...

    def seed(self, layout: Layout, states: Sequence[State]) -> None:
        """Makes version 0 durable."""

    def commit(self, version: Version) -> None:
        """Makes a version durable."""

    def snapshot(self, state: State) -> None:
        """Keeps a durable state, so that a start replays less."""

    def end(self) -> None:
        """Makes durable that the run has ended."""

    def figures(self) -> DiskStatus:
        """The disk as the last write has found it."""
        ...

    def check_folder(self) -> None:
        """Raises StateError if the state directory is gone."""
