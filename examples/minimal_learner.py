"""A minimal learner, written from proto/PROTOCOL.md alone; § names a section of that page.

usage: minimal_learner.py tcp://HOST:PORT NAME LAYOUT_FILE

It is an example for those who write a learner in another language. It trusts its broker, on
loopback, without keys: do not use it across a network. It joins a run that another learner seeds,
trains by weight decay, one token a step, and prints a line of JSON for each final fragment.

What it leaves out, and what happens then:

- §2: CURVE, the monitor, socket options other than XPUB_NODROP.
- §3 to §7: checks of what comes, other than those of envelope, codec and digests; the defaults of
  RunSettings; LAYOUT and SEED (it ends); pushes in other codecs than int4-zstd (the broker refuses
  its pushes); publications in int8-zstd (it ends).
- §8, §9: a push that cannot be coded (the broker refuses it); a copy with a wrong digest (it ends);
  keep 1 of a learner that is slow or leaves; adopting outright at the end.
- §9: what a later Welcome asks for; Hello after the first one (it ends at a Bye, or after 30 s of
  silence); max_offline_s; mode diloco (it ends); being slow; `paused` and `loss`; Reports other
  than one a second, and any while it waits for an uplink socket (30 s at most); Bye before the end.
- §10: all of it.
- §11: rates (it ends). It asks only after 1 to 2 s for what is missing or came too early, for W / P
  chunks of each fragment at a time.
- §12: other answers to a Refuse than to end.
"""

import hashlib
import json
import secrets
import sys
import time
from itertools import pairwise
from typing import Any

import blosc2
import numpy as np
import zmq
import zstandard
from msgpack import packb, unpackb
from xxhash import xxh3_64_intdigest

ENVELOPE = b"NRW\x01"
PUBLICATION = 2
STATE = 3


def cut(entries: list[Any], parts: int) -> list[list[int]]:
    """Cut the model into fragments, each the list of its pieces' lengths (§6)."""
    sizes = [int(np.prod(shape)) for _, shape, _, _ in entries]
    slices = []
    for tensor, (_, shape, _, _) in enumerate(entries):
        # A slice is a whole number of rows.
        rows = shape[0] if shape else 1
        cuts = min(rows, -(-sizes[tensor] * parts // sum(sizes)))
        edges = [rows * c // cuts * (sizes[tensor] // rows) for c in range(cuts + 1)]
        slices += [(tensor, first, end - first) for first, end in pairwise(edges)]
    fragments: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
    # The largest slice first, each into the fragment that is smallest so far.
    for piece in sorted(slices, key=lambda piece: (-piece[2], piece)):
        min(fragments, key=lambda pieces: sum(count for _, _, count in pieces)).append(piece)
    return [[count for _, _, count in sorted(pieces)] for pieces in fragments]


def nibbles(count: int) -> np.ndarray:
    """Find the places of the codes in low nibbles, and of those in high ones (§7).

    In each run of 256 codes the first half is in low nibbles; the last run may be shorter.
    """
    places = np.arange(count + count % 2)
    run_lengths = np.minimum(256, len(places) - places // 256 * 256)
    is_high = places % 256 >= run_lengths // 2
    return np.array([places[~is_high], places[is_high]])


def decode(codec: str, payload: bytes, spans: np.ndarray) -> np.ndarray:
    """Read the values of a payload whose spans have these lengths (§7)."""
    if codec == "f32-blosc2":
        return np.frombuffer(blosc2.decompress2(payload), "<f4")
    if codec != "int4-zstd":
        sys.exit(f"this learner cannot read the codec {codec}")
    scales = np.frombuffer(payload, "<u2", len(spans)).astype("<u4") << 16
    pairs = np.frombuffer(zstandard.decompress(payload[2 * len(spans) :]), np.int8)
    codes = np.zeros(2 * len(pairs), np.int8)
    low, high = nibbles(len(codes))
    codes[low] = pairs << 4 >> 4
    codes[high] = pairs >> 4
    return np.repeat(scales.view("<f4"), spans) * codes[: spans.sum()]


class Fragment:
    """A published copy, the parameters that stand on it, the waiting push, what arrives (§1)."""

    def __init__(self, counts: list[int], sizes: dict[int, int]) -> None:
        """Lay pieces of these lengths one after another, and cut them into chunks (§5, §6)."""
        self.edges = np.cumsum([0, *counts])
        self.spans: dict[int, list[np.ndarray]] = {}
        for kind, size in sizes.items():
            lows = range(0, self.edges[-1], size)
            self.spans[kind] = [np.diff(np.clip(self.edges, low, low + size)) for low in lows]
        self.params = self.copy = np.zeros(self.edges[-1], np.float32)
        self.version = -1  # None is complete yet.
        self.digest = 0
        self.steps = 0  # Steps that are in no push yet.
        self.merged = 0  # Pushes that a version holds.
        self.quiet = 0  # Reports since anything has come, while a newer version exists.
        self.push: dict[str, int] = {}  # Empty when none waits.
        # By kind and version: (values, push id, digest of the copy, contributors) of each chunk.
        self.parts: dict[tuple[int, int], dict[int, Any]] = {}

    def snapshot(self, number: int, rho: float) -> None:
        """Make a push of all unpushed steps, with a scale for each piece (§7, §8, §9)."""
        gradient = self.copy - self.params
        squares = np.add.reduceat(np.square(gradient), self.edges[:-1])
        exact = np.maximum(rho * np.sqrt(squares / np.diff(self.edges)), 2.0**-100)
        # A scale is a bfloat16: a float32 whose lower half is zero.
        self.scales = (exact.astype("<f4").view("<u4") & np.uint32(0xFFFF0000)).view("<f4")
        scale = np.repeat(self.scales, np.diff(self.edges))
        self.codes = np.rint(gradient / scale).clip(-7, 7).astype(np.int8)
        self.value = scale * self.codes
        self.push = {"push_id": number, "base": self.version, "steps": self.steps}
        self.steps = 0

    def payload(self, chunk: int) -> bytes:
        """Write an int4-zstd chunk of the push: upper halves of scales, and codes (§5, §7)."""
        spans = self.spans[PUBLICATION]
        first = chunk * spans[0].sum()
        codes = self.codes[first : first + spans[chunk].sum()]
        low, high = np.pad(codes, (0, len(codes) % 2))[nibbles(len(codes))]
        frame = zstandard.compress((low & 15 | high << 4).tobytes())
        return bytes(self.scales[spans[chunk] > 0].view("<u2")[1::2]) + frame

    def adopt(self, kind: int, version: int, keep: float, incarnation: str) -> None:
        """Bring a complete transfer into the copy and the parameters (§8, §9)."""
        here = self.parts[kind, version]
        values = np.concatenate([here[chunk][0] for chunk in sorted(here)])
        _, push_id, self.digest, contributors = here[0]
        if kind == PUBLICATION:
            values = np.where(values == 0, self.copy, self.copy + values)

        blocks = np.split(values, range(65536, len(values), 65536))
        digests = [xxh3_64_intdigest(block.tobytes()) for block in blocks]
        if xxh3_64_intdigest(np.array(digests, "<u8").tobytes()) != self.digest:
            sys.exit(f"version {version} has another digest than the broker's")

        # An absence keeps nothing of what was learned meanwhile; a waiting push stays whole.
        if version > self.version + 1:
            keep = 0
            self.steps = 0
        own = self.params - self.copy
        if not self.push:
            self.params = values + np.float32(keep) * own
        else:
            self.params = values + np.float32(keep) * (own + self.value)
            number = self.push["push_id"]
            if [incarnation, number] in contributors or push_id >= number:
                self.push = {}
                self.merged += 1
            else:
                self.params = self.params - self.value
        self.copy = values
        self.version = version
        self.parts = {}


class Learner:
    """One session with the broker, and the fragments that it trains (§9)."""

    def __init__(self, address: str, name: str, layout: dict[str, Any]) -> None:
        """Dial the control port (§2)."""
        self.host = address.rpartition(":")[0]
        self.entries = layout["entries"]
        plain = packb([layout["frozen_digest"], self.entries])
        fingerprint = hashlib.blake2b(plain, digest_size=16).hexdigest()
        self.incarnation = f"{name}.{secrets.token_hex(4)}"
        self.who = {"name": name, "incarnation": self.incarnation, "fingerprint": fingerprint}
        self.welcome: dict[str, Any] = {}
        self.steps = 0
        self.pushes = 0
        self.heard = time.monotonic()
        self.context = zmq.Context()
        self.control = self.context.socket(zmq.DEALER)
        self.control.connect(address)
        self.takers: dict[Any, Any] = {self.control: self.take_control}

    def run(self) -> None:
        """Say Hello, train until the heads of an ended run are here, say Bye (§9)."""
        while not self.welcome:
            self.tell("hello", protocol=1, run_id="", epoch="", copies=[], **self.who)
            self.receive(1)
        self.join(self.welcome, self.welcome["settings"])
        report_at = 0.0
        while not self.boundary():
            self.receive(0.01)
            if time.monotonic() >= report_at:
                report_at = time.monotonic() + 1
                self.report()
        self.report()
        self.tell("bye", reason="the run has ended")
        self.context.destroy(linger=1000)

    def join(self, welcome: dict[str, Any], settings: dict[str, Any]) -> None:
        """Cut the model, and dial the data ports, each stream in each direction (§2, §6)."""
        if settings["mode"] == "diloco" or welcome["role"] == "seed" or self.beat["up_bits_per_s"]:
            sys.exit("this learner cannot train in mode diloco, seed a run, or keep to a rate")
        sizes = {PUBLICATION: settings["chunk_elements"], STATE: settings["state_chunk_elements"]}
        self.fragments = [Fragment(c, sizes) for c in cut(self.entries, settings["fragments"])]
        self.up = [self.context.socket(zmq.XPUB) for _ in range(settings["streams"])]
        for stream, up in enumerate(self.up):
            up.xpub_nodrop = 1
            up.rcvtimeo = up.sndtimeo = 30_000
            up.connect(f"{self.host}:{welcome['uplink_port']}")
            up.recv()  # the broker's 01: it has subscribed
            down = self.context.socket(zmq.SUB)
            down.subscribe(f"p/{stream:02}")
            down.subscribe(f"r/{self.incarnation}/{stream:02}")
            down.connect(f"{self.host}:{welcome['downlink_port']}")
            self.takers[down] = self.take_data

    def tell(self, type_: str, **fields: Any) -> None:
        """Send a control message (§3)."""
        self.control.send_multipart([ENVELOPE, packb({"type": type_, **fields})])

    def receive(self, wait_s: float) -> None:
        """Take what comes; end when the broker has been silent for 30 s (§9)."""
        for socket in zmq.select(list(self.takers), [], [], wait_s)[0]:
            self.takers[socket](*socket.recv_multipart())
        if time.monotonic() > self.heard + 30:
            sys.exit("the broker has been silent for 30 s")

    def take_control(self, envelope: bytes, body: bytes) -> None:
        """Do what a control message asks for (§4, §12)."""
        if envelope != ENVELOPE:
            sys.exit("the broker speaks another version of the protocol")
        message = unpackb(body)
        self.heard = time.monotonic()
        match message["type"]:
            case "welcome":
                self.welcome = message
                self.beat = message["beat"]
            case "beat":
                self.beat = message
            case "fetch":
                if self.fragments[message["fragment"]].push.get("push_id") == message["push_id"]:
                    for first, count in message["chunks"]:
                        self.send(message["fragment"], range(first, first + count))
            case "refuse" | "bye":
                keys = ("type", "message", "expected", "got", "remedy", "reason")
                words = [message[key] for key in keys if message.get(key)]
                sys.exit(f"the broker says: {', '.join(words)}")

    def take_data(self, _topic: bytes, head: bytes, payload: bytes) -> None:
        """Put a chunk in its place, unless it comes too early or came before (§5)."""
        _, kind, _, index, version, push_id, chunk, codec, digest, result, *names = unpackb(head)
        fragment = self.fragments[index]
        if version <= fragment.version:
            return
        if kind == PUBLICATION and version > fragment.version + 1:
            return  # A difference needs the version before it.
        here = fragment.parts.get((kind, version), {})
        if chunk in here or xxh3_64_intdigest(payload) != digest:
            return

        spans = fragment.spans[kind]
        values = decode(codec, payload, spans[chunk][spans[chunk] > 0])
        # The header of chunk 0 has one more field, the pushes that are in the version.
        here[chunk] = (values, push_id, result, next(iter(names), []))
        fragment.parts[kind, version] = here
        fragment.quiet = 0
        if len(here) == len(spans):
            keep = self.welcome["settings"]["keep"]
            if self.beat["phase"] == "ending":
                keep = 1
            fragment.adopt(kind, version, keep, self.incarnation)

    def boundary(self) -> bool:
        """Make a step if the run goes on, push, and tell whether the final model is here (§9)."""
        versions = [fragment.version for fragment in self.fragments]
        heads = self.beat["heads"]
        phase = self.beat["phase"]
        if -1 in versions:
            phase = "joining"
        if phase == "running":
            self.steps += 1
        for index, fragment in enumerate(self.fragments):
            if phase == "running":
                fragment.params = fragment.params * np.float32(0.999)
                fragment.steps += 1
            is_open = index in self.beat["collecting"] and heads[index] == versions[index]
            if fragment.steps and not fragment.push and (is_open or phase == "ending"):
                self.pushes += 1
                fragment.snapshot(self.pushes, self.welcome["settings"]["push_rho"])
                counts = {
                    "tokens": fragment.push["steps"],
                    "loss": float(np.mean(fragment.params**2)),
                }
                self.tell("push", fragment=index, **counts, **fragment.push)
                self.send(index, range(len(fragment.spans[PUBLICATION])))
        return (phase, heads) == ("ended", versions)

    def send(self, index: int, chunks: range) -> None:
        """Send chunks of the waiting push, each on its stream (§2, §5)."""
        fragment = self.fragments[index]
        for chunk in chunks:
            stream = chunk % len(self.up)
            payload = fragment.payload(chunk)
            ids = [index, fragment.push["base"], fragment.push["push_id"], chunk]
            digest = xxh3_64_intdigest(payload)
            header = [self.beat["epoch"], 0, self.incarnation, *ids, "int4-zstd", digest, 0]
            self.up[stream].send_multipart([f"u/{stream:02}".encode(), packb(header), payload])

    def report(self) -> None:
        """Tell the progress, and ask for what has not moved for a second (§9, §11)."""
        finished = []
        if self.beat["phase"] == "ending":
            finished = [i for i, f in enumerate(self.fragments) if not f.steps and not f.push]
        counts = {"steps": self.steps, "tokens": self.steps, "loss": None}
        self.tell("report", bases=[f.version for f in self.fragments], finished=finished, **counts)
        for index, (fragment, head) in enumerate(
            zip(self.fragments, self.beat["heads"], strict=False)
        ):
            if head <= fragment.version:
                fragment.quiet = 0
                continue
            fragment.quiet += 1
            if fragment.quiet > 1:
                self.ask(index, head)

    def ask(self, index: int, head: int) -> None:
        """Ask for the missing chunks of the version that a fragment needs (§11)."""
        fragment = self.fragments[index]
        near = (STATE, head)
        if -1 < fragment.version and head - 8 <= fragment.version:
            near = (PUBLICATION, fragment.version + 1)
        # A state that has begun to arrive is completed first.
        kind, version = max((key for key in fragment.parts if key[0] == STATE), default=near)
        here = fragment.parts.get((kind, version), {})
        missing = [[chunk, 1] for chunk in range(len(fragment.spans[kind])) if chunk not in here]
        share = min(256, max(1, self.welcome["settings"]["window_messages"] // len(self.fragments)))
        ids = {"fragment": index, "version": version, "push_id": 0}
        self.tell("fetch", kind=kind, chunks=missing[:share], **ids)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: minimal_learner.py tcp://HOST:PORT NAME LAYOUT_FILE")
    try:
        with open(sys.argv[3], encoding="utf-8") as file:
            learner = Learner(sys.argv[1], sys.argv[2], json.load(file))
    except (OSError, ValueError, TypeError, LookupError, OverflowError, zmq.ZMQError) as error:
        sys.exit(f"cannot start with {sys.argv[1]} and {sys.argv[3]}: {error}")
    try:
        learner.run()
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except zmq.Again:
        sys.exit("the broker's uplink port has taken nothing for 30 s")
    for index, final in enumerate(learner.fragments):
        line = {"fragment": index, "version": final.version, "digest": f"{final.digest:016x}"}
        print(json.dumps(line | {"merged": final.merged}))
