"""A Narrows learner in one file, written from proto/PROTOCOL.md alone; § is a section of that page.

Usage: minimal_learner.py tcp://HOST:PORT NAME LAYOUT_FILE
It joins a run that another learner has begun, trains by weight decay, and ends with the final
model. It believes its broker, on loopback: no keys, no bounds (§2, §3), no checks but digests. Left
out are budgets (§11), SEED, LAYOUT, mode diloco and slow learners (§9), parameters of 16 bits (§8),
and codecs but int4-zstd, and f32-blosc2 for states (§7). It stands still without a session, and
ends if refused, if it hears nothing for 30 s, in a new epoch (§10) and at bits that differ.
"""

import hashlib
import json
import math
import secrets
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import zmq
import zstandard
from msgpack import packb, unpackb
from xxhash import xxh3_64_digest, xxh3_64_intdigest

Array, Map = np.ndarray[Any, np.dtype[Any]], dict[str, Any]
STEP_S, ENVELOPE, CODEC, KEPT = 0.01, b"NRW\x01", "int4-zstd", 8
PUSH, PUBLICATION, STATE = 0, 2, 3
SIZES = {PUBLICATION: "chunk_elements", STATE: "state_chunk_elements"}
DEFAULTS: Map = {  # Of the RunSettings that it follows (§4).
    "mode": "decoupled", "fragments": 4, "keep": 0.5, "push_codec": CODEC, "push_rho": 0.5,
    "chunk_elements": 262144, "state_chunk_elements": 262144, "streams": 4, "window_messages": 256,
}  # fmt: skip


def digest(values: Array) -> int:
    """The digest over the digests of the blocks (§5)."""
    blocks = [values[i : i + 65536].tobytes() for i in range(0, len(values), 65536)]
    return xxh3_64_intdigest(b"".join(xxh3_64_digest(b)[::-1] for b in blocks))


def pack(codes: Array) -> bytes:
    """Nibbles in runs of 256, the second half of a run beside the first (§7)."""
    packed = b""
    for run in np.split(codes.view(np.uint8) & 15, range(256, len(codes), 256)):
        low, high = np.pad(run, (0, len(run) % 2)).reshape(2, -1)
        packed += (low | high << 4).tobytes()
    return packed


def decode(payload: bytes, codec: str, pieces: Array) -> Array:
    """The float32 values of one chunk, given the piece of each element (§7)."""
    if codec == "f32-blosc2":
        return np.frombuffer(blosc2.decompress2(payload), np.float32)
    if codec != CODEC:
        sys.exit(f"{codec} comes, and is left out here.")
    scale_bytes = 2 * (pieces[-1] - pieces[0] + 1)
    scales = np.frombuffer(payload[:scale_bytes], np.uint16).astype(np.uint32) << 16
    packed = np.frombuffer(zstandard.decompress(payload[scale_bytes:]), np.uint8)
    runs = np.split(packed, range(128, len(packed), 128))
    nibbles = np.concatenate([half for run in runs for half in (run & 15, run >> 4)])
    codes = (nibbles << 4).view(np.int8)[: len(pieces)] >> 4
    return scales.view(np.float32)[pieces - pieces[0]] * codes.astype(np.float32)


def cut_model(entries: list[Any], parts: int) -> list[list[int]]:
    """Elements of the pieces of each fragment, in order (§6)."""
    total, slices = sum(math.prod(shape) for _, shape, _, _ in entries), []
    for tensor, (_, shape, _, _) in enumerate(entries):
        size, rows = math.prod(shape), shape[0] if shape else 1
        cuts = min(rows, -(-size * parts // total))
        edges = [rows * c // cuts * (size // rows) for c in range(cuts + 1)]
        slices += [(a - b, tensor, a) for a, b in pairwise(edges)]
    fragments: list[list[Any]] = [[] for _ in range(parts)]
    for minus_size, *place in sorted(slices):
        fewest = min(fragments, key=lambda chosen: sum(size for _, size in chosen))
        fewest.append((place, -minus_size))
    return [[size for _, size in sorted(chosen)] for chosen in fragments]


class Fragment:
    """Parameters, the published copy that they stand on, and what is on its way (§1)."""

    def __init__(self, index: int, pieces: list[int]) -> None:
        self.index, self.n = index, sum(pieces)
        self.piece_of = np.repeat(np.arange(len(pieces)), pieces)
        self.params = self.copy = np.zeros(self.n, np.float32)
        self.version, self.digest = -1, 0  # Of the copy; -1: there is none.
        self.steps = self.merged = 0  # Steps that are not pushed; pushes that were merged.
        self.push: Push | None = None  # The one that waits (§9).
        self.coming: tuple[int, int] | None = None  # Kind and version of what is on its way.

    def expect(self, kind: int, version: int, due: float) -> None:
        """Begins a transfer; at `due` what is missing is asked for (§11)."""
        self.coming, self.due = (kind, version), due
        self.chunks, self.contributors = dict[int, Array](), list[Any]()

    def adopt(self, result: int, push_id: int, me: str, keep: float) -> None:
        """Brings what came, which is complete, into copy and parameters (§8)."""
        kind, version = self.coming or (STATE, 0)
        values = np.concatenate([self.chunks[chunk] for chunk in sorted(self.chunks)])
        add = np.where(values == 0, self.copy, self.copy + values)
        copy, self.coming = values if kind == STATE else add, None
        if digest(copy) != result:  # The arithmetic is fixed to the bit: this cannot be repaired.
            sys.exit(f"Version {version} of fragment {self.index} has other bits here.")
        waiting = self.push.values if self.push else np.float32(0)
        rest = self.params - self.copy + waiting
        if self.push and (push_id >= self.push.id or [me, self.push.id] in self.contributors):
            self.push, self.merged = None, self.merged + 1
        keep = 0 if version > self.version + 1 or self.version < 0 else keep
        self.params = copy + np.float32(keep) * rest - (waiting if self.push else 0)
        self.copy, self.version, self.digest = copy, version, result
        self.steps = self.steps if keep else 0


class Push:
    """All unpushed steps of a fragment; its messages are kept until its outcome is known (§9)."""

    def __init__(self, push_id: int, f: Fragment, of: "Learner") -> None:
        self.id, self.steps, self.messages = push_id, f.steps, list[list[bytes]]()
        work = {"base": f.version, "tokens": f.steps, "steps": f.steps}
        self.announcement: Map = {"fragment": f.index, "push_id": push_id, **work}
        rms = np.sqrt(np.mean((f.copy - f.params) ** 2))  # One scale for all pieces is allowed.
        bits = np.float32(max(of.settings["push_rho"] * rms, 2**-100)).view(np.uint32) >> 16
        scale = (bits << 16).view(np.float32)
        codes = np.rint(((f.copy - f.params) / scale).clip(-7, 7)).astype(np.int8)
        self.values, size = scale * codes.astype(np.float32), of.settings["chunk_elements"]
        for chunk, start in enumerate(range(0, f.n, size)):
            pieces, part = f.piece_of[start : start + size], codes[start : start + size]
            scales = np.uint16([bits] * (pieces[-1] - pieces[0] + 1))
            payload = scales.tobytes() + zstandard.compress(pack(part))
            header = [of.epoch, PUSH, of.me, f.index, f.version, push_id, chunk, CODEC]
            header += [xxh3_64_intdigest(payload), 0]
            self.messages.append([b"u/%02d" % (chunk % len(of.ups)), packb(header), payload])


class Learner:
    def __init__(self, address: str, name: str, layout: Map) -> None:
        self.host, self.entries = address.rpartition(":")[0], layout["entries"]
        packed = packb([layout["frozen_digest"], self.entries])
        fingerprint = hashlib.blake2b(packed, digest_size=16).hexdigest()
        self.me = f"{name}.{secrets.token_hex(4)}"
        self.who = {"protocol": 1, "name": name, "incarnation": self.me, "fingerprint": fingerprint}
        self.run_id, self.epoch, self.settings = "", "", DEFAULTS
        self.beat: Map = {"phase": "seeding", "heads": []}
        self.fragments, self.ups = list[Fragment](), list[Any]()
        self.steps = self.pushes = 0
        self.told, self.heard = (list[int](), False), time.monotonic()
        self.hello_at = self.report_at = 0.0  # hello_at inf: there is a session.
        self.context, self.poller = zmq.Context(), zmq.Poller()
        self.control = self.context.socket(zmq.DEALER)
        self.control.setsockopt(zmq.IMMEDIATE, 1)
        self.control.connect(address)
        self.poller.register(self.control, zmq.POLLIN)

    def say(self, type_: str, **fields: Any) -> None:
        with suppress(zmq.Again):  # No connection: after the next Welcome all is told again.
            self.control.send_multipart([ENVELOPE, packb({"type": type_} | fields)], zmq.NOBLOCK)

    def send(self, p: Push, chunks: list[int] | range) -> None:
        """Sends chunks of a push (§5). What finds no room in time the broker asks for."""
        with suppress(zmq.Again):
            for chunk in chunks:
                self.ups[chunk % len(self.ups)].send_multipart(p.messages[chunk])

    def on_control(self, frames: list[bytes]) -> None:
        if frames[0] != ENVELOPE:
            sys.exit("The broker speaks another version of the protocol.")
        m, self.heard = unpackb(frames[1]), time.monotonic()
        f = self.fragments[m.get("fragment", 0)] if m.get("push_id") else None
        p = f.push if f and f.push and f.push.id == m["push_id"] else None
        match m["type"]:
            case "welcome":
                self.on_welcome(m)
            case "beat" if m["epoch"] == self.epoch:
                self.beat = m
            case "beat" | "bye":  # Another epoch, or the broker has forgotten this learner.
                self.hello_at = min(self.hello_at, self.heard)
            case "fetch" if f and p:
                self.send(p, [c + i for c, count in m["chunks"] for i in range(count)])
            case "refuse" if not f:
                sys.exit(" / ".join(str(m[key]) for key in m if key != "layout"))
            case "refuse" if f and p:  # Its steps count as unpushed again (§9).
                f.steps, f.push = f.steps + p.steps, None

    def on_welcome(self, m: Map) -> None:
        settings, self.run_id, self.beat = DEFAULTS | m["settings"], m["run_id"], m["beat"]
        is_new_epoch = self.epoch not in ("", self.beat["epoch"])
        is_other_run = settings["mode"] == "diloco" or settings["push_codec"] != CODEC
        if is_new_epoch or is_other_run or m["role"] == "seed" or self.beat["up_bits_per_s"]:
            sys.exit("What the broker needs now is left out here.")
        self.epoch, self.settings = self.beat["epoch"], settings
        if not self.fragments:  # The first Welcome: a connection a stream and direction (§2).
            for stream in range(settings["streams"]):
                down, up = self.context.socket(zmq.SUB), self.context.socket(zmq.XPUB)
                down.setsockopt(zmq.SUBSCRIBE, b"p/%02d" % stream)
                down.setsockopt(zmq.SUBSCRIBE, b"r/%s/%02d" % (self.me.encode(), stream))
                down.connect(f"{self.host}:{m['downlink_port']}")
                self.poller.register(down, zmq.POLLIN)
                up.setsockopt(zmq.XPUB_NODROP, 1)
                up.setsockopt(zmq.SNDTIMEO, 500)
                up.connect(f"{self.host}:{m['uplink_port']}")
                self.ups.append(up)
                if not up.poll(5000):  # The broker's subscription; without it all would be dropped.
                    sys.exit("The uplink does not open.")
            cut = cut_model(self.entries, settings["fragments"])
            self.fragments = [Fragment(i, pieces) for i, pieces in enumerate(cut)]
        self.hello_at, self.report_at = math.inf, 0.0
        for f in self.fragments:
            if f.push:
                self.say("push", **f.push.announcement)

    def on_data(self, frames: list[bytes]) -> None:
        header = [*unpackb(frames[1]), []]  # The contributors may be left out.
        epoch, kind, _, i, version, push_id, chunk, codec, told, result, names, *_ = header
        f, now = self.fragments[i], time.monotonic()
        if epoch != self.epoch or version <= f.version or told != xxh3_64_intdigest(frames[2]):
            return
        if f.coming != (kind, version):
            if kind == PUBLICATION and (f.coming or version != f.version + 1):
                return  # Ahead of the copy: it is fetched when its turn has come.
            f.expect(kind, version, now)
        size, f.due = self.settings[SIZES[kind]], now + 1
        f.chunks[chunk] = decode(frames[2], codec, f.piece_of[chunk * size :][:size])
        f.contributors += names
        if len(f.chunks) == math.ceil(f.n / size):
            keep = 1 if self.beat["phase"] == "ending" else self.settings["keep"]
            f.adopt(result, push_id, self.me, keep)

    def push_and_repair(self, now: float) -> None:
        """Pushes what is due (§9), and asks for what is missing (§11)."""
        for f, head in zip(self.fragments, self.beat["heads"], strict=False):
            is_open = f.index in self.beat["collecting"] and head == f.version
            if f.steps and not f.push and (is_open or self.beat["phase"] == "ending"):
                self.pushes += 1
                f.push, f.steps = Push(self.pushes, f, self), 0
                self.say("push", **f.push.announcement)
                self.send(f.push, range(len(f.push.messages)))
            if not f.coming and head > f.version:
                is_far = f.version < 0 or head - f.version > KEPT
                kind, version = (STATE, head) if is_far else (PUBLICATION, f.version + 1)
                f.expect(kind, version, now + (not is_far and version == head))
            if f.coming and now >= f.due:
                (kind, version), f.due = f.coming, now + 1
                all_chunks = range(math.ceil(f.n / self.settings[SIZES[kind]]))
                missing = [[chunk, 1] for chunk in all_chunks if chunk not in f.chunks]
                share = max(1, min(256, self.settings["window_messages"] // len(self.fragments)))
                what = {"kind": kind, "version": version, "push_id": 0, "chunks": missing[:share]}
                self.say("fetch", fragment=f.index, **what)

    def talk(self, now: float, versions: list[int]) -> None:
        """Says Hello and Report when they are due (§9)."""
        if now >= self.hello_at or (self.hello_at == math.inf and now - self.heard > 3):
            self.hello_at, held = now + 1, [[f.version, f.digest] for f in self.fragments]
            self.say("hello", run_id=self.run_id, epoch=self.epoch, held=held, **self.who)
        done = [f.index for f in self.fragments if not f.steps and not f.push]
        finished = done if self.beat["phase"] == "ending" else []
        news = finished, versions == self.beat["heads"]
        if self.hello_at == math.inf and (now >= self.report_at or news != self.told):
            self.report_at, self.told = now + 1, news
            work = {"steps": self.steps, "tokens": self.steps, "loss": None, "finished": finished}
            self.say("report", held=versions, **work)

    def run(self) -> None:
        """Trains until the run has ended, and every fragment is that of the final model."""
        versions, step_at = [-1], 0.0
        while self.beat["phase"] != "ended" or versions != self.beat["heads"]:
            for socket, _ in self.poller.poll(2):
                frames = socket.recv_multipart()
                (self.on_control if socket is self.control else self.on_data)(frames)
            now, versions = time.monotonic(), [f.version for f in self.fragments]
            if now - self.heard > 30:
                sys.exit("No broker is heard for 30 s: this learner ends without the final model.")
            self.talk(now, versions)
            if self.hello_at < math.inf:
                continue  # There is no session.
            if self.beat["phase"] == "running" and min(versions) >= 0 and now >= step_at:
                step_at, self.steps = now + STEP_S, self.steps + 1
                for f in self.fragments:
                    f.params, f.steps = f.params * np.float32(0.999), f.steps + 1
            self.push_and_repair(now)
        for f in self.fragments:
            f.params = f.copy
            end = {"fragment": f.index, "version": f.version, "digest": f"{digest(f.params):016x}"}
            print(json.dumps({**end, "merged": f.merged}))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    learner = Learner(sys.argv[1], sys.argv[2], json.loads(Path(sys.argv[3]).read_text()))
    try:
        with suppress(KeyboardInterrupt):
            learner.run()
    finally:
        learner.say("bye", reason="this learner ends")
        learner.context.destroy(linger=2000)
