"""Protocol version 3 byte by byte: stored frames decode to their messages and come out again.

If this fails, the wire format has changed: raise PROTOCOL, say so in PROTOCOL.md, and only then
make new frames with `python tests/golden/test_messages.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias, get_args

import msgpack
import msgspec
import pytest

from narrows.proto import frames
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.limits import PROTOCOL

FILE = Path(__file__).with_name("messages.json")
OLD = {n: Path(__file__).with_name(f"messages-version-{n}.json") for n in (1, 2)}
Message: TypeAlias = msg.ControlMessage | msg.Header

INCARNATION = "0123456789abcdef0123456789abcdef"
EPOCH: msg.Epoch = (1, 3, 2**62 - 1)
PAYLOAD = b"Narrows"
PROOF = "5e" * 32
LAYOUT = (
    msg.LayoutEntry("embedding.weight", (256, 64), "bfloat16", "mean"),
    msg.LayoutEntry("größe", (), "float32", "rda"),
)
LEDGER = msg.TokenLedger(1000, 200, 3000, 400, 100, 300, 0)
ROUNDS = (msg.OpenRound(0, 7, 1, -1), msg.OpenRound(1, 6, 2, 140))
SETTINGS = msg.RunSettings(
    mode=msg.Mode.STREAMING,
    fragment_count=2,
    sync_period_steps=20,
    overlap_steps=2,
    push_codec="int4-zstd",
    publish_codec="int8-zstd",
    push_rho=0.5,
    publish_rho=0.25,
    push_bits=3.0,
    publish_bits=4.5,
    chunk_elements=65536,
    message_bytes=12_500,
    streams=4,
    error_feedback=True,
    tokens_per_run_step=32768,
    goal_tokens=12_000_000_000,
    max_offline_s=3600.0,
)
LEARNER = msg.LearnerStatus(
    name="site-a",
    incarnation=INCARNATION,
    address="192.0.2.7",
    state="live",
    last_heard_s=0.25,
    step=120,
    tokens=983040,
    step_s=0.5,
    loss=1.5,
    contributions=11,
    refused=1,
    missed_running=0,
    ledger=LEDGER,
    up_bytes=1 << 33,
    down_bytes=1 << 34,
)
STATUS = msg.Status(
    run_id="5f2a9c01b3d4e6f7",
    epoch=EPOCH,
    phase=msg.Phase.RUNNING,
    mode=msg.Mode.DECOUPLED,
    uptime_s=86400.5,
    versions=(7, 6),
    rounds=ROUNDS,
    run_tokens=1 << 40,
    goal_tokens=0,
    tokens_per_s=123456.75,
    merges=13,
    contributions_merged=50,
    contributions_refused={"no_round": 1, "stale_base": 2},
    mean_contributors_per_merge=3.75,
    longest_merge_gap_s=4.5,
    norms_clipped=3,
    up_bytes=1 << 33,
    down_bytes=1 << 34,
    checkpoint_version=-1,
    waiting_for="fragment 1: 0 of 1 contributions",
    learners=(LEARNER,),
)
HEADER = msg.Header(
    protocol=PROTOCOL,
    run_id="5f2a9c01b3d4e6f7",
    epoch=EPOCH,
    kind=msg.DataKind.PUBLICATION,
    learner="site-a",
    incarnation=INCARNATION,
    fragment=1,
    version=8,
    push_id=12,
    offset=65536,
    count=7,
    codec="int4-zstd",
    payload_digest=frames.digest(PAYLOAD),
    result_digest=2**64 - 1,
    stream=3,
    position=1 << 35,
)
MESSAGES: tuple[Message, ...] = (
    msg.Hello(
        PROTOCOL,
        "site-a",
        INCARNATION,
        "5f2a9c01b3d4e6f7",
        EPOCH,
        "5f2a9c01b3d4e6f75f2a9c01b3d4e6f7",
        ("raw32", "int4-zstd"),
        120,
        983040,
        (7, 8),
        PROOF,
    ),
    msg.Report(120, 983040, 0.5, 1.5, (1, 1 << 40, 0, 7), LEDGER, 2e9),
    msg.Push(1, 7, 2, 12, 16384, 65536, 8),
    msg.Decline(1, 7, 2, "evaluating"),
    msg.Adopted(1, 8),
    msg.Fetch(1, -1),
    msg.Enrol(PROTOCOL, "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"),
    msg.Enrolled("site-a"),
    msg.Welcome(
        run_id="5f2a9c01b3d4e6f7",
        epoch=EPOCH,
        role=msg.Role.ADOPT,
        settings=SETTINGS,
        uplink_port=7071,
        downlink_port=7072,
        fragments=(msg.FragmentHead(7, 2**64 - 1), msg.FragmentHead(6, 0)),
        rounds=ROUNDS,
        phase=msg.Phase.RUNNING,
        run_tokens=1 << 40,
        tokens_per_s=123456.75,
        step=130,
        up_bits_per_s=1e9,
        epoch_proof=PROOF,
    ),
    msg.Beat(EPOCH, msg.Phase.ENDING, (7, 6), ROUNDS, 1 << 40, 123456.75, (1, 2, 3, 4), 5e8),
    msg.Progress((1, 1 << 40, 0, 7)),
    msg.Refuse("stale_base", "push of site-a", "base version 8", "7", "adopt it", 1, 12),
    msg.Probe(5),
    msg.Missing(msg.DataKind.PUSH, 1, 7, 12, ((0, 4096), (8192, 1))),
    msg.AskLayout(3),
    msg.LayoutPart(0, 1, 2**63 + 1, LAYOUT),
    msg.Alive(5),
    msg.Bye("the loop has ended"),
    msg.AskStatus(),
    STATUS,
    HEADER,
)


def encode(message: Message) -> bytes:
    if isinstance(message, msg.Header):
        return frames.encode_header(message)
    return frames.encode_control(message)


def decode(name: str, frame: bytes) -> Message:
    if name == "Header":
        return frames.decode_data([b"u", frame, PAYLOAD])[0]
    return frames.decode_control(frame)


def stored(path: Path = FILE) -> dict[str, str]:
    loaded: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def test_every_message_is_stored() -> None:
    names = [each.__name__ for each in get_args(msg.ControlMessage)]
    assert [type(message).__name__ for message in MESSAGES] == [*names, "Header"]
    assert list(stored()) == [*names, "Header"]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_frame(message: Message) -> None:
    name = type(message).__name__
    frame = bytes.fromhex(stored()[name])
    assert decode(name, frame) == message
    assert encode(message).hex() == frame.hex()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_another_library_reads_the_body(message: Message) -> None:
    body = bytes.fromhex(stored()[type(message).__name__])[frames.ENVELOPE_BYTES :]
    plain: Any = msgpack.unpackb(body)
    assert plain == json.loads(msgspec.json.encode(message))


@pytest.mark.parametrize(
    ("version", "name"), [(version, name) for version, path in OLD.items() for name in stored(path)]
)
def test_an_old_version_is_refused_by_name(version: int, name: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(name, bytes.fromhex(stored(OLD[version])[name]))
    assert caught.value.code == ErrorCode.PROTOCOL_VERSION
    assert (caught.value.expected, caught.value.got) == (str(PROTOCOL), str(version))
    assert "the same narrows version" in caught.value.remedy


def test_a_frame_by_hand() -> None:
    """Probe(5), written down from PROTOCOL.md: map of type and nonce, behind the envelope."""
    body = b"\x82" + b"\xa4type" + b"\xa5probe" + b"\xa5nonce" + b"\x05"
    frame = bytes.fromhex(stored()["Probe"])
    assert frame[:4] == b"NRW\x03"
    assert frame[12:] == body
    assert int.from_bytes(frame[4:12], "little") == frames.digest(body)


def test_the_digest_is_xxh3_64_with_seed_0() -> None:
    # Known answers of the reference implementation, for the empty input and for "a".
    assert frames.digest(b"") == 0x2D06800538D394C2
    assert frames.digest(b"a") == 0xE6C632B61E964E1F


if __name__ == "__main__":
    new = {type(message).__name__: encode(message).hex() for message in MESSAGES}
    FILE.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
