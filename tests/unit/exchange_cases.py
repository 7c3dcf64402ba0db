"""One exchange between a learner that joins again and a broker: every control message and one data
header.

Run as a program it writes golden_exchange.json anew; the test compares the file with these values.
"""

from __future__ import annotations

import json
from pathlib import Path

from narrows.proto import messages as msg
from narrows.proto.wire import encode_control, encode_header

FILE = Path(__file__).parent / "golden_exchange.json"
EPOCH = "1-0000004d"
INCARNATION, RUN_ID = "site-a/0.0123abcd", "5f2a9c01b3d4e6f7"
BEAT = msg.Beat(EPOCH, msg.Phase.RUNNING, (0,), (0,), 12.5, 0, 0.0, 2e9)

CONTROL: tuple[msg.ControlMessage, ...] = (
    msg.Hello(
        msg.PROTOCOL, "site-a/0", INCARNATION, RUN_ID, EPOCH,
        fingerprint="9ebf5dfae183ed17a71a3a11d820e2d7", held=(msg.Held(-1, 0),),
    ),
    msg.Welcome(
        RUN_ID, msg.Role.ADOPT, settings=msg.RunSettings(fragments=1, streams=1),
        uplink_port=7071, downlink_port=7072, go_back=(), beat=BEAT,
    ),
    msg.Fetch(msg.DataKind.STATE, 0, 0, 0, ((0, 1),)),
    msg.Report(steps=4, tokens=64, loss=1.5, held=(0,), paused="evaluating", finished=(0,)),
    BEAT,
    msg.Push(fragment=0, push_id=1, base=0, tokens=48, steps=3),
    msg.Refuse("bad_payload", "zstd frame", "one whole frame", "damage", "", 0, 1),
    msg.AskStatus(),
    msg.Status({"phase": "running", "learners": [{"name": "site-a/0", "tokens": 64}]}),
    msg.Bye("the run has ended"),
)  # fmt: skip

HEADER = msg.Header(
    EPOCH, msg.DataKind.PUBLICATION, incarnation="", fragment=0, version=1, push_id=0, chunk=0,
    codec="int4-zstd", payload_digest=2540268930244521165, result_digest=3139933653587292279,
    contributors=(msg.Contributor(INCARNATION, 1), msg.Contributor("site-b.89abcdef", 7)),
)  # fmt: skip


def written() -> dict[str, object]:
    """The content of the file: hex of each message, control without its envelope."""
    control = {type(each).__name__: encode_control(each)[1].hex() for each in CONTROL}
    return {"control": control, "header": encode_header(HEADER).hex()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(written(), indent=1) + "\n", encoding="utf-8")
