"""The learner's host beside a real broker's host, in calm runs of the simulator.

The checkers of the simulator judge each run: equal copies, nothing merged twice or lost, progress.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from narrows.bench.sim.checkers import Wrong
from narrows.bench.sim.run import ENTRIES, LAYOUT, TOKENS, Plan, Simulation, Site, Walk
from narrows.broker.config import load_broker
from narrows.learner.boundary import Boundary
from narrows.learner.effects import Adopt, Move, Note, TakeSnapshot, Task
from narrows.learner.fragment import Pushed
from narrows.learner.host import LearnerHost
from narrows.proto import messages as msg
from narrows.proto.codec import F32
from narrows.proto.layout import Fragment, Piece
from narrows.proto.messages import DataKind, Header
from narrows.proto.wire import decode_header, encode_control, encode_header

SETTINGS: dict[str, object] = {
    "fragments.count": 2, "fragments.sync_period_steps": 4, "fragments.overlap_steps": 1,
}  # fmt: skip


class Calm(Plan):
    """Learners that train for six seconds, with the fault that a test plans."""

    ends = 6.0

    def __init__(
        self, learners: int = 1, begin: Callable[[Any], Walk] = Walk, **settings: object
    ) -> None:
        named = {name.replace("__", "."): value for name, value in settings.items()}
        super().__init__(7, {**SETTINGS, **named}, [0.1] * learners, begin)


class Interrupt(BaseException):
    """As a signal's handler raises it, or a machine that is short of memory."""


OWNERS: dict[str, Callable[[Site], Any]] = {
    "wires": lambda site: site,
    "pool": lambda site: site.pool,
    "boundary": lambda site: site.boundary,
    "island": lambda site: site.host.island,
    "session": lambda site: site.host.session,
    "fragment": lambda site: site.host.session.parts[0],
}
"""Parts of a learner out of whose calls an exception may come."""

UNMOVED = "run", "control", "tick"
"""Calls in which no parameters move."""


class Still(Walk):
    """Learns nothing: whatever its pushes hold is no work."""

    def step(self, session: Any, now: float) -> int:
        return TOKENS


class Uplink:
    """The data wire of one learner, which may be full, and whose messages are checked."""

    def __init__(self, site: Site) -> None:
        self.is_full = False
        self._site = site
        self._send = site.data
        site.data = self.data  # type: ignore[method-assign]

    def data(self, topic: str, header: bytes, payload: bytes) -> bool:
        if self.is_full:
            return False
        told = decode_header(header)
        session = self._site.host.session
        assert told.epoch == session.epoch, "it was queued for another life of the broker"
        # A chunk of version 0 is of no push, and has the id 0.
        assert told.push_id in (0, session.parts[told.fragment].push_id), "a push that is over"
        assert len(self._site.host.pushes) <= len(session.parts), "pushes that are over are kept"
        return self._send(topic, header, payload)


class Stage:
    """A run and what its learners have noted. Nobody may touch the parameters of a learner but its
    training thread, between two steps."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.notes: list[Note] = []
        self.interrupts = 0
        self._is_between = False
        self.run = Simulation(plan, folder / "state", self._watch)
        self.uplinks = [Uplink(site) for site in self.run.sites]

    @property
    def host(self) -> LearnerHost:
        return self.run.sites[0].host

    @property
    def heads(self) -> list[int]:
        assert self.run.host is not None
        return list(self.run.host.syncer.state.heads)

    def _watch(self, part: object) -> None:
        if isinstance(part, LearnerHost):
            part.noted = self.notes.append
            for name in ("read", "snapshot", "adopt"):
                setattr(part.island, name, partial(self._touch, getattr(part.island, name)))
        elif isinstance(part, Boundary):
            part.perform = partial(self._between, part.perform)  # type: ignore[method-assign]

    def _between(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._is_between = True
        try:
            return call(*given, **named)
        except Interrupt:
            self.interrupts += 1  # The loop catches it and goes on.
        finally:
            self._is_between = False

    def interrupt(self, owner: Any, name: str) -> None:
        """The next call of this method by the training thread is left by an exception: before it
        has done anything, or when half of the elements that it moves are anything."""
        real = getattr(owner, name)

        def broken(*given: Any, **named: Any) -> Any:
            if not self._is_between:
                return real(*given, **named)
            setattr(owner, name, real)
            if name not in UNMOVED:
                real(*given, **named)
                for piece in self._moved(given):
                    self.run.sites[0].trainee.source.view(piece)[::2] += 1.0
            raise Interrupt

        setattr(owner, name, broken)

    def _moved(self, given: tuple[Any, ...]) -> list[Piece]:
        """Pieces of the fragment that the arguments of an interrupted call name, else of all."""
        fragments = [part.fragment for part in self.host.session.parts]
        match given:
            case [Fragment() as fragment, *_]:
                fragments = [fragment]
            case [Adopt() as effect]:
                fragments = [fragments[effect.fragment]]
        return [piece for fragment in fragments for piece in fragment.pieces]

    def _touch(self, call: Callable[..., Any], *given: Any) -> Any:
        assert self._is_between, "the parameters are touched in the middle of a step"
        return call(*given)

    @property
    def noted(self) -> list[str]:
        return [each.event for each in self.notes]


@pytest.mark.parametrize(
    ("kind", "damages", "event"),
    [
        (DataKind.STATE, "payload", "refused"), (DataKind.PUBLICATION, "payload", "refused"),
        (DataKind.STATE, "result", "digest_differs"),
        (DataKind.PUBLICATION, "result", "digest_differs"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_noted_and_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: DataKind, damages: str, event: str
) -> None:
    """Or the payload is what was sent, but it does not belong to this version."""
    real, wrong = LearnerHost.data, list[Header]()

    def deliver(host: LearnerHost, frames: list[bytes], now: float) -> None:
        header = decode_header(frames[1])
        if header.kind is kind and not wrong:
            wrong.append(header)
            topic, _, payload = frames
            if damages == "payload":
                payload = payload[:-1] + bytes([payload[-1] ^ 1])
            else:
                header = replace(header, result_digest=1)
            frames = [topic, encode_header(header), payload]
        real(host, frames, now)

    monkeypatch.setattr(LearnerHost, "data", deliver)
    stage = Stage(Calm(), tmp_path)
    stage.run.finish()
    assert wrong and stage.noted == [event]
    assert event != "refused" or "bad_digest" in stage.notes[0].text


def test_a_damaged_copy_is_replaced_though_the_broker_serves_older_ones(tmp_path: Path) -> None:
    stage = Stage(Calm(), tmp_path)
    states, real = set[int](), stage.run.data

    def data(topic: str, header: bytes, payload: bytes, lossy: bool = False) -> bool:
        told = decode_header(header)
        if told.kind is DataKind.STATE and told.fragment == 0:
            states.add(told.version)
        return real(topic, header, payload, lossy)

    stage.run.data = data  # type: ignore[method-assign]
    stage.run.until(2.5)
    assert stage.run.host is not None
    served = stage.heads[0]
    fetch = msg.Fetch(DataKind.STATE, 0, served, 0, ((0, 1),))
    stage.run.host.downlink.serve(stage.host.session.incarnation, fetch, stage.run.world.now)
    stage.run.until(2.7)
    # Two copies are served, and no third one is made near them.
    assert states == {0, served}
    assert stage.host.session.parts[0].tip >= served
    values = stage.host.tips[0].values
    values.setflags(write=True)
    values.view(np.uint32)[3] ^= 1
    stage.run.finish()
    assert stage.noted == ["digest_differs"]
    assert stage.heads[0] > served + 2


def test_a_step_that_has_nothing_to_say_leaves_what_time_asks_for_to_the_loop(
    tmp_path: Path,
) -> None:
    """Holds `Boundary.perform`: the training thread pays for each boundary."""
    stage = Stage(Calm(), tmp_path)
    stage.run.until(3.0)
    host = stage.host
    steps, real, performed = host.session.steps, host.perform, list[float]()

    def perform(now: float) -> None:
        if stage._is_between:
            performed.append(now)
        real(now)

    host.perform = perform  # type: ignore[method-assign]
    stage.run.until(5.0)
    assert 0 < len(performed) < host.session.steps - steps


def test_parameters_that_become_nan_are_set_back_to_the_newest_version(tmp_path: Path) -> None:
    stage = Stage(Calm(), tmp_path)
    stage.run.until(3.0)
    tensors: list[F32] = stage.run.sites[0].trainee.source.tensors  # type: ignore[attr-defined]
    tensors[1][3] = np.nan
    heads = stage.heads
    stage.run.finish()
    assert stage.noted == ["encode_failed"] and "nan" in stage.notes[0].text
    assert all(np.isfinite(each).all() for each in tensors)
    assert min(stage.heads) > max(heads)


@pytest.mark.parametrize(
    ("owner", "name", "goal"),
    [
        ("island", "adopt", 0), ("island", "adopt", 1200), ("island", "snapshot", 0),
        ("boundary", "adopting", 0), ("boundary", "adopting", 1200), ("pool", "run", 0),
        ("wires", "control", 0), ("fragment", "adopt", 0), ("fragment", "snapshot", 0),
        ("session", "tick", 0),
    ],
)  # fmt: skip
def test_a_boundary_that_an_exception_breaks_off_moves_nothing_half_and_loses_no_effect(
    tmp_path: Path, owner: str, name: str, goal: int
) -> None:
    """This learner learns nothing, so its published copies never change."""
    stage = Stage(Calm(1, Still, run__goal_tokens=goal), tmp_path)
    stage.run.until(3.0)
    tensors: list[F32] = stage.run.sites[0].trainee.source.tensors  # type: ignore[attr-defined]
    before, heads = [each.copy() for each in tensors], stage.heads
    stage.interrupt(OWNERS[owner](stage.run.sites[0]), name)
    stage.run.finish()
    assert stage.interrupts == 1
    assert all(np.array_equal(*each) for each in zip(tensors, before, strict=True))
    assert min(stage.heads) > max(heads), "an effect was lost"
    assert name in UNMOVED or stage.noted == ["broken_off"]


def test_what_follows_an_adoption_waits_for_it_while_the_loop_goes_on(tmp_path: Path) -> None:
    """As where ranks meet between decision and adoption, and do not hold the loop up."""
    stage = Stage(Calm(), tmp_path)
    stage.run.until(2.0)
    real = stage.host.tasks
    kinds = set[type]()

    def tell() -> list[Task]:
        tasks = real()
        now = stage.run.world.now
        stage.host.lost(now)  # Now the loop has something to say.
        stage.host.turn(now)
        kinds.update(map(type, tasks))
        waits = any(isinstance(each, msg.Hello) for each in stage.host.session.effects)
        assert waits or not tasks, "it is said too soon"
        return tasks

    stage.host.tasks = tell  # type: ignore[method-assign]
    stage.run.finish()
    assert kinds == {Move, TakeSnapshot}


def test_a_copy_that_a_worker_could_not_make_is_made_from_the_same_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `Session.assembled`."""
    stage = Stage(Calm(), tmp_path)
    stage.run.until(2.0)
    island, real, failures = stage.host.island, stage.host.island.copy, [1, 2]

    def short_of_memory(*given: Any) -> Any:
        if failures:
            raise MemoryError(failures.pop())
        return real(*given)

    monkeypatch.setattr(island, "copy", short_of_memory)
    kinds: list[DataKind] = []
    stage.host.saw = lambda header, _: kinds.append(header.kind)
    stage.run.finish()
    assert set(kinds) == {DataKind.PUBLICATION} and stage.noted[0] == "assembly_failed"
    assert "MemoryError" in stage.notes[0].text and len(stage.notes) <= 2, "by fragment"


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_prepares_adoptions_and_training_does_where_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Holds `LearnerHost._prepare`; the checkers compare what was prepared with what is due."""
    stage = Stage(Calm(), tmp_path)
    stage.run.until(2.0)
    island, real = stage.host.island, stage.host.island.prepare
    calls: list[bool] = []
    rules: list[Any] = []

    def prepare(*given: Any) -> Any:
        calls.append(stage._is_between)
        rules.append(given[1])
        if fails and not stage._is_between:
            raise MemoryError("no room to prepare")
        return real(*given)

    monkeypatch.setattr(island, "prepare", prepare)
    stage.run.finish()
    assert 5 < calls.count(False) and True in calls
    # Where a boundary comes before the worker begins, that has nothing to do any more.
    assert fails or len(set(rules)) == len(rules), "prepared twice"
    assert set(rules) == {rule for rule, between in zip(rules, calls, strict=True) if between} or (
        not fails
    )
    assert set(stage.noted) == ({"refused"} if fails else set())


def test_a_learner_in_a_long_step_prepares_two_adoptions_and_drops_those_that_are_stale(
    tmp_path: Path,
) -> None:
    """Holds `LearnerHost._prepare`. Everything comes out anew meanwhile, a few times."""
    stage = Stage(Calm(2, fragments__count=4), tmp_path)
    stage.run.until(2.0)
    stage.run.sites[0].step_s = 3.0
    sizes = set[int]()
    stage.host.saw = lambda header, _: sizes.add(len(stage.host.ahead))
    stage.run.until(5.0)
    assert min(part.tip - part.base for part in stage.host.session.parts) > 1
    assert max(sizes) == 2
    ahead = stage.host.ahead
    assert {index: each.rule.new for index, each in ahead.items()} == {
        index: stage.host.tips[index] for index in (0, 1)
    }
    stage.run.finish()
    assert not stage.host.ahead


def test_bytes_that_are_no_message_are_noted_and_change_nothing(tmp_path: Path) -> None:
    """Holds `LearnerHost.control`."""
    stage = Stage(Calm(), tmp_path)
    stage.run.until(1.0)
    for frames in ([], [b"x"], [b"NRW\x01", b"\xc1"]):
        stage.host.control(frames, stage.run.world.now)
        stage.host.data(frames, stage.run.world.now)
    assert stage.noted == ["refused"] * 6
    stage.run.finish()
    stage.host.control([b"NRW\x02", b""], stage.run.world.now)  # Another protocol.
    refused = stage.host.session.refused
    assert refused is not None and refused.code == "protocol_version"


def test_a_new_life_with_other_chunks_gets_the_same_push(tmp_path: Path) -> None:
    """Holds `recut`."""
    stage = Stage(Calm(wan__up="400kbit/s"), tmp_path)
    stage.run.until(2.0)
    stage.uplinks[0].is_full = True
    stage.run.until(4.0)
    waiting = [part.push for part in stage.host.session.parts if part.push]
    stage.run.config = load_broker(None, {**SETTINGS, "wan.up": "40Mbit/s"})
    stage.run.kill()
    stage.uplinks[0].is_full = False
    size = stage.host.session.settings.chunk_elements
    stage.run.finish()
    assert waiting and stage.host.session.settings.chunk_elements > size
    assert stage.noted == ["offline", "online"]


def test_what_is_of_no_use_any_more_does_not_leave_once_there_is_room(tmp_path: Path) -> None:
    """Holds `Sender.discard`."""
    stage = Stage(Calm(), tmp_path)
    stage.run.until(2.0)
    stage.uplinks[0].is_full = True
    stage.run.until(3.0)
    host = stage.host
    assert len(host.sender) and host.deadline(stage.run.world.now) > stage.run.world.now
    stage.run.kill()
    stage.run.until(5.0)
    part = next(part for part in host.session.parts if part.pushed is Pushed.ANNOUNCED)
    refusal = msg.Refuse("merge_failed", "m", fragment=part.index, push_id=part.push_id)
    host.control(encode_control(refusal), stage.run.world.now)
    stage.uplinks[0].is_full = False
    heads = stage.heads
    stage.run.finish()
    assert min(stage.heads) > max(heads)


class Stranger(Walk):
    """The second learner's model is one element wider."""

    def __init__(self, site: Any) -> None:
        super().__init__(site)
        if site.index:
            wider = msg.LayoutEntry("bias", (65,), "float32", "mean")
            self.layout = msg.Layout(0, (*ENTRIES[:2], wider, *ENTRIES[3:]))


class NotFinite(Walk):
    """A model that cannot become version 0."""

    def __init__(self, site: Any) -> None:
        super().__init__(site)
        self.source.tensors[1][3] = np.nan


@pytest.mark.parametrize(
    ("model", "learners", "words"),
    [
        (Stranger, 2, r"not the run's: 'bias': shape \(65,\), expected \(64,\)"),
        (NotFinite, 1, "not_finite_seed"),
    ],
)
def test_a_model_that_cannot_take_part_is_refused_with_the_reason(
    tmp_path: Path, model: type[Walk], learners: int, words: str
) -> None:
    assert LAYOUT.entries[2].shape == (64,)
    with pytest.raises(Wrong, match=words):
        Stage(Calm(learners, model), tmp_path).run.until(3.0)


def test_a_run_is_seeded_anew_between_two_steps_of_a_learner_that_trains(tmp_path: Path) -> None:
    """The operator has put back a state directory from before version 0."""
    plan = Calm()
    plan.faults = [(0.001, Simulation.copy), (4.0, Simulation.put_back)]
    stage = Stage(plan, tmp_path)
    stage.run.until(3.9)
    assert min(stage.heads) > 0
    stage.run.finish()
    assert "went_back" in stage.noted
    assert not stage.host.seeds, "what was coded for version 0 is kept"
