"""Data over real sockets that is wrong: refused and counted by code, the model unharmed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from peer import PUSH, Frames, Peer, World, encoded, sealed
from running import wait_until

from narrows.proto import messages as msg
from narrows.proto.codec.blosc2_chunk import compress
from narrows.proto.codec.transfer import STATE_CODEC
from narrows.proto.frames import encode_control
from narrows.proto.limits import CHUNK_ELEMENTS_MAX

PUBLICATION, FOUND = msg.DataKind.PUBLICATION, msg.DataKind.FOUND

ASK = encode_control(msg.AskStatus())


def cut(frames: list[bytes]) -> Frames:
    return [frames[0], frames[1][:-1], frames[2]]


def other_version(frames: list[bytes]) -> Frames:
    return [frames[0], sealed(frames[1][12:], 1), frames[2]]


def more_fields(frames: list[bytes]) -> Frames:
    fields: list[object] = msgspec.msgpack.decode(frames[1][12:])
    return [frames[0], sealed(msgspec.msgpack.encode([*fields, "more"])), frames[2]]


DAMAGED: dict[str, tuple[Callable[[list[bytes]], Frames], str]] = {
    "one frame": (lambda f: f[:1], "bad_frame"),
    "no payload": (lambda f: f[:2], "bad_frame"),
    "one frame more": (lambda f: [*f, b""], "bad_frame"),
    "garbage as header": (lambda f: [f[0], bytes(99), f[2]], "bad_frame"),
    "no header": (lambda f: [f[0], b"", f[2]], "bad_frame"),
    "header cut": (cut, "bad_checksum"),
    "long header": (lambda f: [f[0], f[1] + bytes(1025), f[2]], "too_large"),
    "other protocol": (other_version, "protocol_version"),
    "a field more": (more_fields, "bad_message"),
    "a map": (lambda f: [f[0], ASK, f[2]], "bad_message"),
    "payload cut": (lambda f: [*f[:2], f[2][:-1]], "bad_checksum"),
    "other payload": (lambda f: [*f[:2], b"other"], "bad_checksum"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_data_is_counted_by_code(world: World, member: Peer, case: str) -> None:
    damage, code = DAMAGED[case]
    before = world.good.refusals(code)
    member.send_data(damage(member.frames(bytes(100))))
    wait_until(lambda: world.good.refusals(code) > before, f"{code} to be counted")


UNTOLD: dict[str, tuple[dict[str, object], str]] = {
    "other protocol": ({"protocol": 1}, "protocol_version"),
    "nobody's name": ({"learner": "nobody"}, "old_incarnation"),
    "huge name": ({"learner": "n" * 500}, "old_incarnation"),
    "good's name": ({"learner": "good"}, "old_incarnation"),
    "other incarnation": ({"incarnation": "0" * 32}, "old_incarnation"),
    "no elements": ({"count": 0}, "bad_range"),
    "chunk beyond the limit": ({"count": CHUNK_ELEMENTS_MAX + 1}, "bad_range"),
    "negative offset": ({"offset": -1}, "bad_message"),
    "stream 64": ({"stream": 64}, "bad_message"),
}


@pytest.mark.parametrize("case", UNTOLD)
def test_data_of_nobody_in_particular_is_counted(world: World, member: Peer, case: str) -> None:
    fields, code = UNTOLD[case]
    before = world.good.refusals(code)
    known = len(world.service.traffic)
    member.send_data(member.frames(bytes(100), **fields))
    wait_until(lambda: world.good.refusals(code) > before, f"{code} to be counted")
    assert len(world.service.traffic) == known


CHUNKS: dict[str, tuple[dict[str, object], str, str, str]] = {
    "other run": ({"run_id": "0" * 16}, "wrong_run", "", "0" * 16),
    "other epoch": ({"epoch": (1, 1, 7)}, "wrong_epoch", "(1, 1, ", "(1, 1, 7)"),
    "no such fragment": ({"fragment": 2}, "bad_fragment", "below 2", "2"),
    "far fragment": ({"fragment": 1 << 62}, "bad_fragment", "below 2", str(1 << 62)),
    "beyond the end": ({"offset": 212, "count": 5}, "bad_range", "0..216", "212+5"),
    "far beyond": ({"offset": 1 << 48}, "bad_range", "0..216", f"{1 << 48}+1"),
    "codec not agreed": ({"codec": "raw32"}, "unknown_codec", "int4-zstd", "raw32"),
    "no codec": ({"codec": "lz4"}, "unknown_codec", "int4-zstd", "lz4"),
    "a publication": ({"kind": PUBLICATION}, "bad_message", "PUSH or FOUND", "PUBLICATION"),
    "future base": ({"version": 3}, "future_base", "base version 0", "3"),
}


@pytest.mark.parametrize("case", CHUNKS)
def test_a_chunk_that_fits_nothing_refuses_its_push(member: Peer, case: str) -> None:
    fields, code, expected, got = CHUNKS[case]
    member.send_data(member.frames(b"\0\0", **fields))
    refuse = member.receive(msg.Refuse)
    assert (refuse.code, refuse.push_id) == (code, 1)
    assert expected in refuse.expected
    assert got in refuse.got


def honest_payload(member: Peer, seed: int = 0) -> bytes:
    """Payload of all elements of fragment 0."""
    values = np.random.default_rng(seed).standard_normal(216).astype(np.float32)
    return encoded(member.table[0], values, "int4-zstd")[0].payload


def with_scale(bits: int) -> Callable[[bytes], bytes]:
    return lambda payload: bits.to_bytes(2, "little") + payload[2:]


PAYLOADS: dict[str, tuple[Callable[[bytes], bytes], set[str]]] = {
    "empty": (lambda p: b"", {"bad_payload"}),
    "cut": (lambda p: p[:-1], {"bad_payload"}),
    "longer": (lambda p: p + b"\0", {"bad_payload"}),
    "much longer": (lambda p: p + bytes(4096), {"too_large"}),
    "NaN scale": (with_scale(0x7FC0), {"not_finite"}),
    "infinite scale": (with_scale(0x7F80), {"not_finite"}),
    "negative scale": (with_scale(0xBF80), {"bad_payload"}),
    "tiny scale": (with_scale(0x0080), {"bad_payload"}),
    "garbage for codes": (lambda p: p[:4] + b"\xaa" * (len(p) - 4), {"bad_payload"}),
    "zstd bomb": (
        lambda p: p[:4] + b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + p[:4],
        {"bad_payload"},
    ),
}


@pytest.mark.parametrize("case", PAYLOADS)
def test_a_payload_that_no_encoder_writes_refuses_its_push(member: Peer, case: str) -> None:
    damage, codes = PAYLOADS[case]
    payload = damage(honest_payload(member))
    member.send_data(member.frames(payload, count=216))
    refuse = member.receive(msg.Refuse)
    assert refuse.code in codes
    assert (refuse.fragment, refuse.push_id) == (0, 1)
    assert refuse.message


def test_the_same_elements_with_other_bytes_are_a_conflict(member: Peer) -> None:
    for seed in range(2):
        member.send_data(member.frames(honest_payload(member, seed), count=216))
    refuse = member.receive(msg.Refuse)
    assert refuse.code == "chunk_conflict"
    assert "elements 0+216" in refuse.expected
    assert "always carry the same bytes" in refuse.remedy


def test_an_overlap_that_differs_is_a_conflict(member: Peer) -> None:
    assert member.welcome is not None
    values = np.ones(216, np.float32)
    part = member.table[0]
    whole, halves = encoded(part, values, "int4-zstd"), encoded(part, values, "int4-zstd", 108)
    assert len(halves) == 2
    for chunk in (halves[1], whole[0]):
        member.send_data(member.frames(chunk.payload, offset=chunk.offset, count=chunk.count))
    refuse = member.receive(msg.Refuse)
    assert refuse.code == "chunk_conflict"
    # Payloads are decoded on a pool: either of the two may have been the first.
    told = sorted(text.split(",")[0] for text in (refuse.expected, refuse.got))
    assert told == ["elements 0+216", "elements 108+108"]


def test_a_push_that_was_replaced_is_a_conflict(member: Peer) -> None:
    member.send(msgspec.structs.replace(PUSH, push_id=5))
    member.send(msgspec.structs.replace(PUSH, push_id=4))
    refuse = member.receive(msg.Refuse)
    assert (refuse.code, refuse.push_id) == ("push_conflict", 4)
    assert (refuse.expected, refuse.got) == ("push 5", "push 4")


_marks = itertools.count(1000)


def wait_for_data(world: World, peer: Peer) -> None:
    """Waits until all data of `peer` is handled: the refusal of the last one is seen."""
    before = world.good.refusals("wrong_run")
    peer.send_data(peer.frames(b"", run_id="mark", push_id=next(_marks)))
    wait_until(lambda: world.good.refusals("wrong_run") > before, "the mark to be refused")


@pytest.mark.parametrize("payload", [compress(np.full(216, 7, np.float32)), b"damaged"])
@pytest.mark.parametrize("sender", ["good", "member"])
def test_version_0_cannot_be_sent_again(
    world: World, member: Peer, sender: str, payload: bytes
) -> None:
    """Not even the learner that founded the run may do so."""
    peer = world.good if sender == "good" else member
    fields: dict[str, Any] = {"kind": FOUND, "push_id": 0, "codec": STATE_CODEC, "count": 216}
    peer.send_data(peer.frames(payload, **fields))
    wait_for_data(world, peer)


def test_push_id_0_is_no_push(world: World, member: Peer) -> None:
    member.send_data(member.frames(honest_payload(member), count=216, push_id=0))
    wait_for_data(world, member)


def test_a_flood_of_garbage_is_survived(world: World, member: Peer) -> None:
    rng = random.Random(3)
    counted = sum(world.good.status().contributions_refused.values())

    def refused() -> int:
        return sum(world.good.status().contributions_refused.values())

    # Wave by wave: pub/sub drops what a full queue cannot take, and a dropped message is not
    # counted by anybody.
    for _ in range(20):
        for _ in range(100):
            member.control.send(rng.randbytes(rng.randrange(64)))
            member.send_data([b"u", rng.randbytes(rng.randrange(200)), rng.randbytes(40)])
        counted += 200
        wait_until(lambda: refused() >= counted, "a wave to be refused")  # noqa: B023


def test_the_header_of_an_honest_chunk_is_accepted(world: World, member: Peer) -> None:
    """The chunk that the cases above vary is itself valid: half a push, which is dropped later."""
    chunk = encoded(member.table[0], np.ones(216, np.float32), "int4-zstd", 108)[0]
    member.send_data(member.frames(chunk.payload, count=108))
    wait_until(lambda: world.service.jobs.held == 1, "the chunk to be held")
