"""A syncer on a desk: learners played by hand, effects collected, invariants checked each time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from msgspec import structs

from narrows.broker import config as cfg
from narrows.broker.records import Recovered
from narrows.broker.syncer import Syncer
from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.layout import fingerprint

EPOCH, RUN = "7-0123abcd", "run-1"
CHUNKS = 4
"""Chunks of each fragment below."""

LAYOUT = msg.Layout(
    0, tuple(msg.LayoutEntry(f"w{i}", (CHUNKS, 1 << 18), "float32", "rda") for i in range(4))
)

NOTHING = Recovered(
    run_id=RUN, phase=msg.Phase.SEEDING, clock=0, fragments=0, layout=None,
    life=7, heads=(), period_s=0.0, merged={}, merged_tokens={},
)  # fmt: skip
"""The facts that a start on an empty state directory finds."""

T = TypeVar("T")


def incarnation(name: str, life: int = 1) -> str:
    return f"{name}.{life:08x}"


def configure(**sections: dict[str, Any]) -> cfg.BrokerConfig:
    """A configuration with some keys changed: configure(merge={"quorum": 2})."""
    config = cfg.BrokerConfig()
    changed = {
        name: structs.replace(getattr(config, name), **keys) for name, keys in sections.items()
    }
    return structs.replace(config, **changed)


class Desk:
    """One syncer, its time, and everything that it has asked for."""

    def __init__(
        self,
        config: cfg.BrokerConfig | None = None,
        *,
        recovered: Recovered = NOTHING,
        published_digest: Callable[[int, int], int | None] = lambda fragment, version: 99,
        newest_push: Callable[[str, int], int] = lambda incarnation, fragment: 0,
    ) -> None:
        self.now = 100.0
        self.syncer = Syncer(
            config or configure(), EPOCH, recovered, self.now,
            published_digest=published_digest, newest_push=newest_push,
        )  # fmt: skip
        self.lives: dict[str, int] = {}
        self.heads = list(recovered.heads)
        self.steps: dict[str, float] = {}
        """Inner steps by name, as `pass_` reports them."""
        self.log: list[ev.Effect] = []
        self.commits = True
        """False: merges and commits wait for the test."""
        self.drain()

    def drain(self) -> None:
        """Performs what a host would do at once."""
        while self.syncer.effects:
            effects = list(self.syncer.effects)
            self.syncer.effects.clear()
            self.log += effects
            for effect in effects:
                match effect:
                    case ev.Publish(fragment, version):
                        self.heads[fragment] = version
                    case ev.MergeRound() | ev.Commit() | ev.CommitEnd() if self.commits:
                        self.syncer.done(effect, self.now)
        self.syncer.check()

    def do(self, event: Callable[..., Any], *arguments: Any) -> list[ev.Effect]:
        """Calls an event at the present time; returns the effects that it brought."""
        before = len(self.log)
        self.last = event(*arguments, self.now)
        self.drain()
        return self.log[before:]

    def take(self, kind: type[T]) -> list[T]:
        """All effects of a kind so far, and forgets everything so far."""
        found: list[T] = [each for each in self.log if isinstance(each, kind)]
        self.log.clear()
        return found

    def told(self, kind: type[T], name: str = "") -> list[T]:
        """Messages of a kind to a learner so far, and forgets everything so far."""
        sent = [each for each in self.take(ev.Send) if not name or each.peer.startswith(f"{name}:")]
        return [each.message for each in sent if isinstance(each.message, kind)]

    def noted(self, event: str) -> list[ev.Note]:
        """Notes of an event so far."""
        return [each for each in self.log if isinstance(each, ev.Note) and each.event == event]

    def merges(self) -> list[tuple[int, list[str], str]]:
        """Fragment, learners and reason of the merges so far, and forgets everything so far."""
        rounds = [each.round_ for each in self.take(ev.MergeRound)]
        return [
            (each.fragment, [push.learner for push in each.contributions], each.reason)
            for each in rounds
        ]

    # Time.

    def pass_(self, seconds: float, *names: str, steps_per_s: float = 0.0, **fields: Any) -> None:
        """Lets time pass; these learners report each second, and step so fast."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + 1.0)
            for name in names:
                self.steps[name] = self.steps.get(name, 0) + steps_per_s
                self.report(name, int(self.steps[name]), **fields)
            self.do(self.syncer.advance)

    def to_launch(self, *names: str, fragment: int = 0) -> None:
        """Lets time pass until a fragment collects; these learners report."""
        for _ in range(100):
            if self.status.fragments[fragment].stage != "idle":
                return
            self.pass_(0.05, *names, steps_per_s=0.5)
        raise AssertionError(self.status)

    # Learners.

    def peer(self, name: str) -> str:
        return f"{name}:{self.lives[name]}"

    def hello(self, name: str, life: int = 1, **fields: Any) -> Any:
        """Says Hello; returns the Welcome or the Refuse that answers. `peer` names the connection,
        `site` the key's site."""
        peer = fields.pop("peer", f"{name}:{life}")
        site = fields.pop("site", None)
        who = incarnation(name, life)
        hello = msg.Hello(msg.PROTOCOL, name, who, "", "", fingerprint(LAYOUT), ())
        effects = self.do(self.syncer.control, peer, site, structs.replace(hello, **fields))
        sent = [each.message for each in effects if isinstance(each, ev.Send) and each.peer == peer]
        answer = next(each for each in sent if isinstance(each, msg.Welcome | msg.Refuse))
        if isinstance(answer, msg.Welcome):
            self.lives[name] = life
        return answer

    def send(self, name: str, message: msg.ControlMessage) -> list[ev.Effect]:
        return self.do(self.syncer.control, self.peer(name), None, message)

    def leave(self, *names: str) -> None:
        for name in names:
            self.send(name, msg.Bye("done"))

    def report(self, name: str, steps: int, **fields: Any) -> list[ev.Effect]:
        """Reports progress; the learner has adopted everything unless `bases` says otherwise."""
        bases = fields.pop("bases", tuple(self.heads) or (-1,) * 4)
        return self.send(name, msg.Report(steps, 10 * steps, None, bases, **fields))

    def announce(self, name: str, fragment: int, push_id: int, **fields: Any) -> list[ev.Effect]:
        values: dict[str, Any] = {"base": self.heads[fragment], "tokens": 1000, "steps": 10}
        return self.send(name, msg.Push(fragment, push_id, **(values | fields)))

    def header(self, name: str, fragment: int, push_id: int, chunk: int) -> msg.Header:
        who = incarnation(name, self.lives[name])
        kind = msg.DataKind.PUSH
        return msg.Header(EPOCH, kind, who, fragment, 0, push_id, chunk, "int4-zstd", 0, 0)

    def chunk(self, name: str, fragment: int, push_id: int, chunk: int) -> bool:
        """A chunk of a push comes; True if it was wanted."""
        self.do(self.syncer.take_chunk, self.header(name, fragment, push_id, chunk))
        return bool(self.last)

    def checked(self, name: str, fragment: int, push_id: int, chunk: int) -> None:
        self.do(self.syncer.chunk_checked, self.header(name, fragment, push_id, chunk))

    def push(self, name: str, fragment: int, push_id: int, **fields: Any) -> None:
        """A whole push: announced, sent, decoded."""
        self.announce(name, fragment, push_id, **fields)
        self.send_chunks(name, fragment, push_id)

    def send_chunks(self, name: str, fragment: int, push_id: int) -> None:
        for chunk in range(self.syncer.state.push_chunks[fragment]):
            if self.chunk(name, fragment, push_id, chunk):
                self.checked(name, fragment, push_id, chunk)

    def layout(self, name: str, layout: msg.Layout = LAYOUT) -> None:
        self.do(self.syncer.layout, incarnation(name, self.lives[name]), layout)

    def seed_chunk(self, name: str, fragment: int, chunk: int) -> bool:
        """A chunk of version 0 comes; True if it was wanted."""
        header = self.header(name, fragment, 0, chunk)
        self.do(self.syncer.take_chunk, structs.replace(header, kind=msg.DataKind.SEED))
        return bool(self.last)

    def seed(self, name: str) -> None:
        """The learner sends layout and version 0, and the host makes it durable."""
        self.layout(name)
        for fragment in range(4):
            for chunk in range(CHUNKS):
                self.seed_chunk(name, fragment, chunk)
        self.heads = [0] * 4
        self.do(self.syncer.done, ev.Seed(LAYOUT))

    @property
    def open_rounds(self) -> list[int]:
        """Fragments with a round under way."""
        return [index for index, each in enumerate(self.status.fragments) if each.stage != "idle"]

    @property
    def status(self) -> msg.Status:
        return self.syncer.status(self.now)


def running(
    *names: str, config: cfg.BrokerConfig | None = None, steps_per_s: float = 10.0, **desk: Any
) -> Desk:
    """A run of these learners, one second after its beginning: everybody's step time is known.

    With H 10 and P 4 at ten steps a second, the period is 1 s and the spacing 0.25 s.
    """
    made = Desk(config, **desk)
    for name in names:
        made.hello(name)
    made.seed(names[0])
    for name in names:
        made.report(name, 0)
    made.now += 1.0
    for name in names:
        made.steps[name] = steps_per_s
        made.report(name, int(steps_per_s))
    return made


def resumed(**fields: Any) -> Recovered:
    """The facts that a start on four fragments at version 5 finds."""
    found = replace(
        NOTHING,
        phase=msg.Phase.RUNNING,
        clock=4000,
        fragments=4,
        layout=LAYOUT,
        heads=(5, 5, 5, 5),
        period_s=1.0,
    )
    return replace(found, **fields)
