"""The learner's host and a real broker's host, over wires and pools of the test."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import Arrays
from learner_cases import LAYOUT, House, Pool
from msgspec.structs import replace

from narrows.learner import host
from narrows.learner.effects import Note
from narrows.learner.fragment import Pushed
from narrows.learner.host import LearnerHost
from narrows.learner.island import Island
from narrows.proto import messages as msg
from narrows.proto.codec import F32, encode_values
from narrows.proto.layout import Fragment
from narrows.proto.messages import DataKind, Header, Phase
from narrows.proto.wire import decode_header, encode_control, encode_header

SETTINGS: dict[str, object] = {
    "fragments.count": 2, "fragments.sync_period_steps": 4, "fragments.overlap_steps": 1,
}  # fmt: skip


class Guarded(Arrays):
    """Parameters that nobody may touch while the training thread changes them."""

    is_training = True

    def read(self, fragment: Fragment, out: F32) -> None:
        assert not self.is_training, "the parameters are read in the middle of a step"
        super().read(fragment, out)

    def write(self, fragment: Fragment, values: F32) -> None:
        assert not self.is_training, "the parameters are written in the middle of a step"
        super().write(fragment, values)


class Player:
    """One learner: arrays that drift, a host, and the way between it and the broker."""

    def __init__(self, house: House, name: str, layout: msg.Layout = LAYOUT) -> None:
        self.house, self.name = house, name
        self.source, self.pool = Guarded(layout), Pool()
        self.rng = np.random.default_rng(len(name))
        incarnation = f"{name}.00000001"
        self.host = LearnerHost(
            name, incarnation, layout, Island(self.source), self, self.pool, house.now
        )
        self.notes: list[Note] = []
        self.copies: dict[tuple[int, int], F32] = {}
        self.host.noted = self.notes.append
        self.host.saw = lambda header, values: self.copies.update(
            {(header.fragment, header.version): values}
        )
        self.up: list[list[bytes]] = []
        self.damage: DataKind | None = None
        """Kind of data whose next message arrives with another payload."""
        self.lost = 0
        """Chunks of version 0 of fragment 1 that are lost on their way."""
        self.is_full = False
        self.steps = 0
        self._wires, self._seen = house.wires, (0, 0)
        self.host.lost(house.now)

    # Wires.

    def control(self, peer: str, frames: list[bytes]) -> bool:
        self.up.append(frames)
        return True

    def data(self, topic: str, header: bytes, payload: bytes) -> bool:
        if not self.is_full:
            told, session = decode_header(header), self.host.session
            assert told.epoch == session.epoch, "it was queued for another life of the broker"
            is_over = told.push_id != session.parts[told.fragment].push_id
            assert told.kind is not DataKind.PUSH or not is_over, "a push that is over travels on"
            self.up.append([topic.encode(), header, payload])
        return not self.is_full

    # What a process does.

    def carry(self) -> None:
        """Everything that waits arrives, in both directions."""
        house = self.house
        if self._wires is not house.wires:
            self._wires, self._seen = house.wires, (0, 0)
            self.host.lost(house.now)
        up, self.up = self.up, []
        for frames in up:
            header = decode_header(frames[1]) if len(frames) == 3 else None
            if self.lost and header and header.kind is DataKind.SEED and header.fragment == 1:
                self.lost -= 1
            elif len(frames) == 2:
                house.host.control(self.name, None, frames, house.now)
            else:
                house.host.data(None, frames, house.now)
        house.subscribe(self.host.session.incarnation)
        house.settle()
        controls, datas = house.wires.controls[self._seen[0] :], house.wires.datas[self._seen[1] :]
        self._seen = len(house.wires.controls), len(house.wires.datas)
        for peer, message in controls:
            if peer == self.name:
                self.host.control(encode_control(message), house.now)
        for topic, header, payload, _ in datas:
            if topic.startswith(("p/", f"r/{self.host.session.incarnation}/")):
                if header.kind is self.damage:
                    self.damage, payload = None, payload[:-1] + bytes([payload[-1] ^ 1])
                self.host.data([topic.encode(), encode_header(header), payload], house.now)
        self.pool.work()
        self.pool.tell(house.now)
        self.host.turn(house.now)
        self.host.session.check()

    def step(self) -> None:
        """One inner step, or what a training thread does instead."""
        session, now = self.host.session, self.house.now
        if session.joined and not session.stopping and not session.must_wait(now):
            for tensor in self.source.tensors:
                tensor += 0.01 * self.rng.standard_normal(tensor.size).astype(np.float32)
            self.steps += 1
            self.source.is_training = False
            self.host.boundary(100, 1.0, now)
        else:
            self.source.is_training = False
            self.host.join(now)
        self.source.is_training = True


def play(house: House, players: list[Player], seconds: float) -> None:
    for _ in range(round(10 * seconds)):
        house.now += 0.1
        for each in players:
            each.step()
        for each in players:
            each.carry()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path, SETTINGS)


def check_copies(house: House, player: Player) -> None:
    """Every copy that a learner saw of the newest version is the broker's, bit for bit."""
    model = house.host.pipeline.model
    assert model is not None
    for fragment, head in enumerate(house.heads):
        state, _ = house.host.pipeline.head(fragment)
        if (copy := player.copies.get((fragment, head))) is not None:
            assert copy.tobytes() == state.published.tobytes()


def test_two_learners_train_through_a_kill_of_the_broker_to_the_final_model(tmp_path: Path) -> None:
    house = House(tmp_path, {**SETTINGS, "run.goal_tokens": "12000"})
    players = [Player(house, "site-a"), Player(house, "site-bb")]
    play(house, players, 3.0)
    before = house.heads
    assert min(before) > 0
    house.kill()
    house.start()
    play(house, players, 4.0)
    assert min(house.heads) > max(before)
    for each in players:
        check_copies(house, each)
    for _ in range(40):  # A broker that has just begun waits 30 s for learners it does not know.
        if all(each.host.session.ended for each in players):
            break
        play(house, players, 1.0)
    for each in players:
        session = each.host.session
        assert session.phase is Phase.ENDED and session.final and session.ended
        assert session.merged_tokens == session.tokens and session.lost_tokens == 0
        assert not each.host._pushed and not len(each.host.sender), "pushes that are over are kept"
        for fragment, part in enumerate(session.parts):
            values = np.empty(part.fragment.elements, np.float32)
            each.source.is_training = False
            each.source.read(part.fragment, values)
            state, _ = house.host.pipeline.head(fragment)
            assert values.tobytes() == state.published.tobytes()


@pytest.mark.parametrize("kind", [DataKind.STATE, DataKind.PUBLICATION])
def test_a_damaged_payload_is_noted_and_asked_for_again(house: House, kind: DataKind) -> None:
    player = Player(house, "site-a")
    player.damage = kind
    play(house, [player], 6.0)
    assert player.damage is None
    assert [each.text.split(":")[1].strip() for each in player.notes] == ["bad_digest"]
    assert player.host.session.joined and max(house.heads) > 0
    check_copies(house, player)


def test_a_copy_with_another_digest_is_not_adopted(house: House) -> None:
    """The payload is what was sent, but it does not belong to this version."""
    player = Player(house, "site-a")
    play(house, [player], 3.0)
    real, wrong = player.host.data, list[Header]()

    def deliver(frames: list[bytes], now: float) -> None:
        header = decode_header(frames[1])
        if header.kind is DataKind.PUBLICATION and not wrong:
            wrong.append(header)
            frames = [frames[0], encode_header(replace(header, result_digest=1)), frames[2]]
        real(frames, now)

    player.host.data = deliver  # type: ignore[method-assign]
    play(house, [player], 3.0)
    assert [each.event for each in player.notes] == ["digest_differs"]
    assert max(house.heads) > wrong[0].version
    check_copies(house, player)


def test_bytes_that_are_no_message_are_noted_and_change_nothing(house: House) -> None:
    player = Player(house, "site-a")
    play(house, [player], 1.0)
    for frames in ([], [b"x"], [b"NRW\x01", b"\xc1"]):
        player.host.control(frames, house.now)
        player.host.data(frames, house.now)
    assert [each.event for each in player.notes] == ["refused"] * 6
    play(house, [player], 3.0)
    assert max(house.heads) > 0


def test_a_new_life_with_other_chunks_gets_the_same_push(tmp_path: Path) -> None:
    house = House(tmp_path, SETTINGS)
    player = Player(house, "site-a")
    play(house, [player], 2.0)
    player.is_full = True
    play(house, [player], 2.0)
    pushes = [part.push for part in player.host.session.parts if part.push]
    assert pushes
    house.kill()
    house.settings = {**SETTINGS, "wan.up": "40Mbit/s"}
    house.__post_init__()
    assert house.config.shared.chunk_elements < 1 << 18
    player.is_full = False
    heads = house.heads
    play(house, [player], 4.0)
    assert [each.event for each in player.notes] == ["offline", "online"]
    assert min(house.heads) > max(heads)
    check_copies(house, player)


def test_what_is_of_no_use_any_more_does_not_leave_once_there_is_room(house: House) -> None:
    player = Player(house, "site-a")
    play(house, [player], 2.0)
    player.is_full = True
    play(house, [player], 2.0)
    assert len(player.host.sender) and player.host.deadline(house.now) > house.now
    house.kill()
    house.start()
    play(house, [player], 2.0)
    assert player.host.session.epoch == house.host.syncer.state.epoch
    part = next(part for part in player.host.session.parts if part.pushed is Pushed.WAITING)
    refusal = msg.Refuse("merge_failed", "m", fragment=part.index, push_id=part.push_id)
    player.host.control(encode_control(refusal), house.now)
    player.is_full = False
    heads = house.heads
    play(house, [player], 4.0)
    assert min(house.heads) > max(heads)


def test_a_model_that_differs_is_refused_with_the_difference(house: House) -> None:
    play(house, [Player(house, "site-a")], 1.0)
    wider = msg.Layout(0, (LAYOUT.entries[0], msg.LayoutEntry("b", (701,), "float32", "mean")))
    stranger = Player(house, "site-bb", wider)
    play(house, [stranger], 0.2)
    refused = stranger.host.session.refused
    assert refused is not None and refused.code == "layout_differs"
    assert refused.message.endswith("is not the run's: 'b': shape (701,), expected (700,)")


def test_chunks_of_version_0_that_are_asked_for_again_are_not_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []

    def encode(fragment: Fragment, *arguments: Any, **options: Any) -> Any:
        encoded.append(fragment.index)
        return encode_values(fragment, *arguments, **options)

    monkeypatch.setattr(host, "encode_values", encode)
    house = House(tmp_path, {**SETTINGS, "wan.down": "8Mbit/s"})
    player = Player(house, "site-a")
    player.lost = 40
    play(house, [player], 12.0)
    assert player.lost == 0 and player.host.session.joined
    assert encoded == [0, 1] and not player.host._seeds


def test_a_run_is_seeded_anew_between_two_steps_of_a_learner_that_trains(house: House) -> None:
    """The operator has put back a state directory from before version 0."""
    house.kill()
    shutil.copytree(house.folder, house.folder / "older")
    house.start()
    player = Player(house, "site-a")
    play(house, [player], 3.0)
    assert min(house.heads) > 0
    house.kill()
    for each in house.folder.iterdir():
        if each.name != "older":
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    shutil.copytree(house.folder / "older", house.folder, dirs_exist_ok=True)
    house.start()
    before = player.steps
    for _ in range(60):
        if player.host.session.joined and house.heads:
            break
        play(house, [player], 0.1)
    assert player.steps > before, "it trains on until it is asked"
    play(house, [player], 3.0)
    assert "went_back" in [each.event for each in player.notes]
    assert min(house.heads) > 0
    check_copies(house, player)


def test_a_model_that_is_not_finite_cannot_become_version_0(house: House) -> None:
    player = Player(house, "site-a")
    player.source.tensors[1][3] = np.nan
    play(house, [player], 1.0)
    assert player.host.session.refused is not None
    assert player.host.session.refused.code == "not_finite_seed"
    assert house.heads == ()
