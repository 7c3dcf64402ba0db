"""A Narrows learner in one file, written from proto/PROTOCOL.md alone; § is a section of that page.

It trains by weight decay, so it needs no framework, and joins a run that another learner has begun,
on loopback, where nobody needs a key. It leaves out SEED and LAYOUT, mode diloco and slow learners
(§9), parameters of 16 bits (§8), and codecs other than int4-zstd, and f32-blosc2 for states (§7).
It believes its broker: it checks sizes and digests, not every bound of §3.
"""

import argparse
import hashlib
import itertools
import json
import math
import secrets
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any

import blosc2
import msgpack
import numpy as np
import xxhash
import zmq
import zstandard

Array = np.ndarray[Any, np.dtype[Any]]
Map = dict[str, Any]
ENVELOPE, CODEC, KEPT = b"NRW\x01", "int4-zstd", 8
PUSH, PUBLICATION, STATE = 0, 2, 3
SETTINGS: Map = {  # Defaults of the RunSettings that it follows (§4).
    "mode": "decoupled", "fragments": 4, "keep": 0.5, "push_codec": CODEC, "push_rho": 0.5,
    "chunk_elements": 262144, "state_chunk_elements": 262144, "streams": 4, "window_messages": 256,
    "max_offline_s": 3600,
}  # fmt: skip
ENDS = "protocol_version layout_differs wrong_run bad_name key_name not_finite_seed".split()
log = partial(print, "minimal_learner:", file=sys.stderr)
HELLO_ON_S = dict.fromkeys(ENDS, 0) | {"name_in_use": 10, "over_capacity": 60}  # §12


def digest(values: Array) -> int:
    """The digest over the digests of the blocks (§5)."""
    blocks = [values[i : i + 65536].tobytes() for i in range(0, len(values), 65536)]
    return xxhash.xxh3_64_intdigest(b"".join(xxhash.xxh3_64_digest(b)[::-1] for b in blocks))


def floats(bfloat16: Array) -> Array:
    return (bfloat16.astype(np.uint32) << 16).view(np.float32)


def pack(codes: Array) -> bytes:
    """Nibbles in runs of 256, the second half of a run beside the first (§7)."""
    packed = b""
    for run in np.split(codes.view(np.uint8) & 15, range(256, len(codes), 256)):
        low, high = np.pad(run, (0, len(run) % 2)).reshape(2, -1)
        packed += (low | high << 4).tobytes()
    return packed


def decode(payload: bytes, codec: str, spans: Array) -> Array:
    """The float32 values of one chunk, whose spans have so many elements (§7)."""
    if codec == "f32-blosc2":
        return np.frombuffer(blosc2.decompress2(payload), np.float32)
    if codec != CODEC:
        sys.exit(f"minimal_learner: {codec} comes, and is left out here")
    scales, frame = payload[: 2 * len(spans)], payload[2 * len(spans) :]
    raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
    runs = np.split(raw, range(128, len(raw), 128))
    nibbles = np.concatenate([half for run in runs for half in (run & 15, run >> 4)])
    codes = (nibbles << 4).view(np.int8)[: sum(spans)] >> 4
    return np.repeat(floats(np.frombuffer(scales, np.uint16)), spans) * codes.astype(np.float32)


def cut_model(entries: list[Any], parts: int) -> list[list[int]]:
    """Elements of the pieces of each fragment, in order (§6)."""
    total, slices = sum(math.prod(shape) for _, shape, _, _ in entries), []
    for tensor, (_, shape, _, _) in enumerate(entries):
        size, rows = math.prod(shape), shape[0] if shape else 1
        cuts = min(rows, -(-size * parts // total))
        edges = [rows * c // cuts * (size // rows) for c in range(cuts + 1)]
        slices += [(a - b, tensor, a) for a, b in itertools.pairwise(edges)]
    fragments: list[list[Any]] = [[] for _ in range(parts)]
    for minus_size, *place in sorted(slices):
        fewest = min(fragments, key=lambda chosen: sum(size for _, size in chosen))
        fewest.append((place, -minus_size))
    return [[size for _, size in sorted(chosen)] for chosen in fragments]


class Push:
    """An outer gradient, kept as codes: another life of the broker may cut it anew (§10)."""

    def __init__(self, push_id: int, f: "Fragment", rho: float) -> None:
        self.id, self.base, self.steps, self.merged = push_id, f.base_version, f.steps, False
        gradient = f.base - f.params
        squares = np.bincount(f.piece_of, gradient.astype(float) ** 2)
        scales = rho * np.sqrt(squares / np.bincount(f.piece_of, gradient != 0).clip(1))
        scales[scales < 2**-100] = 0
        self.scales = (scales.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        scale = floats(self.scales)[f.piece_of]
        codes = np.divide(gradient, scale, out=np.zeros_like(scale), where=scale > 0)
        self.codes = np.rint(codes.clip(-7, 7)).astype(np.int8)
        self.values = scale * self.codes.astype(np.float32)


class Fragment:
    """Parameters, the base that they stand on, and the newest copy (§1)."""

    def __init__(self, index: int, pieces: list[int]) -> None:
        self.index, self.n = index, sum(pieces)
        self.piece_of = np.repeat(np.arange(len(pieces)), pieces)
        self.params = self.base = self.copy = np.zeros(self.n, np.float32)
        self.version = self.base_version = -1  # Of the copy, and of the base; -1: there is none.
        self.digest = self.steps = self.merged = 0  # Steps that are not pushed; merged pushes.
        self.push: Push | None = None
        self.coming: tuple[int, int] | None = None  # Kind and version of what is on its way.

    def expect(self, kind: int, version: int, settings: Map, due: float) -> None:
        """Begins a transfer; at `due` what is missing is asked for (§11)."""
        self.coming, self.values, self.due = (kind, version), np.zeros(self.n, np.float32), due
        self.size = settings["state_chunk_elements" if kind == STATE else "chunk_elements"]
        self.missing, self.asked = set(range(-(-self.n // self.size))), set[int]()
        self.contributors = list[Any]()

    def take(self, kind: int, version: int, push_id: int, result: int, me: str) -> None:
        """Makes the next copy of a transfer that is complete (§8)."""
        add = np.where(self.values == 0, self.copy, self.copy + self.values)
        copy, p, self.coming = self.values if kind == STATE else add, self.push, None
        if digest(copy) != result:  # Without a copy the state of the head is fetched.
            self.version, self.digest = -1, 0
            return
        self.copy, self.version, self.digest = copy, version, result
        if p and not p.merged and (push_id >= p.id or [me, p.id] in self.contributors):
            p.merged, self.merged = True, self.merged + 1

    def adopt(self, keep: float, *, outright: bool) -> None:
        """Brings the copy into the parameters (§8)."""
        p = None if outright else self.push
        waiting = p.values if p else np.float32(0)
        rest = np.float32(keep) * (self.params - self.base + waiting)
        self.push = p if p and not p.merged else None
        self.params = self.copy if outright else self.copy + rest - waiting * bool(self.push)
        self.base, self.base_version = self.copy, self.version
        self.steps = self.steps if keep and not outright else 0


class Learner:
    def __init__(self, address: str, name: str, layout: Map) -> None:
        self.name, self.me = name, f"{name}.{secrets.token_hex(4)}"
        self.host, self.entries = address.rpartition(":")[0], layout["entries"]
        packed = msgpack.packb([layout["frozen_digest"], self.entries])
        self.fingerprint = hashlib.blake2b(packed, digest_size=16).hexdigest()
        self.context, self.poller = zmq.Context(), zmq.Poller()
        self.control = self.socket(zmq.DEALER, 4194304, (zmq.IMMEDIATE, 1))
        self.monitor = self.control.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.poller.register(self.monitor, zmq.POLLIN)
        self.control.connect(address)
        self.run_id, self.epoch, self.settings = "", "", SETTINGS
        self.beat: Map = {"phase": "seeding", "heads": [], "up_bits_per_s": 0}
        self.fragments: list[Fragment] = []
        self.ports, self.ups, self.downs, self.open = [0] * 3, list[Any](), list[Any](), set[Any]()
        self.queue: list[tuple[Fragment, Push, int]] = []  # Chunks to be sent.
        self.steps = self.pushes = 0
        self.told = self.finished = list[Any]()  # `held` of the last Hello; of the last Report.
        self.heard = self.data_at = self.stepped = time.monotonic()
        self.hello_at = self.report_at = self.refused_at = 0.0  # hello_at inf: there is a session.
        self.free_at = 0.0  # When the next chunk may be sent.

    def socket(self, kind: int, size: int, *options: tuple[int, Any]) -> Any:
        socket: Any = self.context.socket(kind)
        bounds = (zmq.MAXMSGSIZE, size), (zmq.TCP_MAXRT, 20000), (zmq.LINGER, 2000)
        for option, value in (*bounds, *options):
            socket.setsockopt(option, value)
        self.poller.register(socket, zmq.POLLIN)
        return socket

    def open_data_sockets(self, ports: list[int]) -> None:
        for socket in self.ups + self.downs:
            self.poller.unregister(socket)
            socket.close(linger=0)
        self.ports, self.ups, self.downs, self.open = ports, [], [], set()
        for s in range(ports[2]):
            topics = [(zmq.SUBSCRIBE, f"{t}/{s:02d}".encode()) for t in ("p", f"r/{self.me}")]
            self.ups.append(self.socket(zmq.XPUB, 512, (zmq.XPUB_NODROP, 1), (zmq.SNDHWM, 8)))
            self.downs.append(self.socket(zmq.SUB, 4259840, (zmq.RCVHWM, 8), *topics))
            self.ups[s].connect(f"{self.host}:{ports[0]}")
            self.downs[s].connect(f"{self.host}:{ports[1]}")

    def pay(self, frames: list[bytes], *, received: bool = False) -> None:
        """Charges a message to the rate (§11)."""
        size, rate = sum(map(len, frames)) + 9 * len(frames), self.beat["up_bits_per_s"]
        cost = size + 66 * math.ceil(size / 1448)
        cost = 66 * math.ceil(cost / 2896) if received else cost
        self.free_at = max(self.free_at, time.monotonic()) + (8 * cost / rate if rate else 0)

    def say(self, type_: str, **fields: Any) -> None:
        frames = [ENVELOPE, msgpack.packb({"type": type_} | fields)]
        with suppress(zmq.Again):  # No connection: after the next Welcome all is told again.
            self.control.send_multipart(frames, zmq.NOBLOCK)
            self.pay(frames)

    def offer(self, f: Fragment, p: Push) -> None:
        work = {"base": p.base, "tokens": p.steps, "steps": p.steps}
        self.say("push", fragment=f.index, push_id=p.id, **work)
        self.queue += [(f, p, i) for i in range(-(-f.n // self.settings["chunk_elements"]))]

    def send(self) -> None:
        """Sends chunks as long as the rate and the sockets allow (§5)."""
        while self.queue and time.monotonic() >= self.free_at:
            f, p, chunk = self.queue[0]
            stream, size = chunk % len(self.ups), self.settings["chunk_elements"]
            if f.push is p:  # Else it is settled.
                if self.ups[stream] not in self.open:
                    return
                place = slice(chunk * size, (chunk + 1) * size)
                payload = p.scales[np.unique(f.piece_of[place])].tobytes()
                payload += zstandard.compress(pack(p.codes[place]))
                header = [self.epoch, PUSH, self.me, f.index, p.base, p.id, chunk, CODEC]
                header += [xxhash.xxh3_64_intdigest(payload), 0]
                frames = [b"u/%02d" % stream, msgpack.packb(header), payload]
                try:
                    self.ups[stream].send_multipart(frames, zmq.NOBLOCK)
                except zmq.Again:
                    return
                self.pay(frames)
            del self.queue[0]

    def on_welcome(self, m: Map, now: float) -> None:
        settings, new = SETTINGS | m["settings"], m["beat"]["epoch"] != self.epoch
        if new and self.epoch and self.told != self.held():
            self.hello_at = now
            return
        if m["role"] == "seed" or settings["mode"] == "diloco" or settings["push_codec"] != CODEC:
            sys.exit("minimal_learner: this run needs what is left out here")
        self.settings, self.run_id, self.beat = settings, m["run_id"], m["beat"]
        self.epoch, self.hello_at, self.refused_at = self.beat["epoch"], math.inf, 0.0
        if not self.fragments:
            cut = cut_model(self.entries, settings["fragments"])
            self.fragments = [Fragment(i, pieces) for i, pieces in enumerate(cut)]
        ports = [m["uplink_port"], m["downlink_port"], settings["streams"]]
        if ports != self.ports:
            self.open_data_sockets(ports)
        self.queue, self.report_at = [], now
        for f in self.fragments:
            f.coming = None if new else f.coming
            if new and f.index in m["go_back"]:
                f.version, f.base_version, f.digest, f.push = -1, -1, 0, None
            if f.push and not f.push.merged:
                self.offer(f, f.push)

    def on_control(self, frames: list[bytes], now: float) -> None:
        if frames[0] != ENVELOPE:
            sys.exit("minimal_learner: the broker speaks another version of the protocol")
        m, self.heard = msgpack.unpackb(frames[1]), now
        type_, f = m["type"], self.fragments[m["fragment"]] if m.get("push_id") else None
        p = f.push if f and f.push and f.push.id == m["push_id"] else None
        if type_ == "welcome":
            self.on_welcome(m, now)
        elif type_ == "fetch" and f and p:
            known = range(-(-f.n // self.settings["chunk_elements"]))
            ranges = [known[first : first + count] for first, count in m["chunks"]]
            self.queue += [(f, p, chunk) for chunk in itertools.chain(*ranges)]
        elif type_ == "refuse":
            log({key: value for key, value in m.items() if value and key != "layout"})
            if f and p and not p.merged:  # Its steps count as unpushed again (§9).
                f.steps, f.push = f.steps + p.steps, None
            elif not f and m["code"] in HELLO_ON_S:
                self.refused_at = self.refused_at or now
                if now - self.refused_at >= HELLO_ON_S[m["code"]]:
                    sys.exit(3)
        elif type_ == "beat" and m["epoch"] == self.epoch:
            self.beat = m
        elif type_ != "fetch" and self.hello_at == math.inf:  # Bye, or a Beat of another epoch.
            self.hello_at = now

    def on_data(self, frames: list[bytes], now: float) -> None:
        epoch, kind, to, i, version, push_id, chunk, *more = msgpack.unpackb(frames[1])
        codec, told, result, *contributors = more
        f, self.data_at = self.fragments[i], now
        if epoch != self.epoch or to not in ("", self.me) or version <= f.version:
            return
        if f.coming != (kind, version):
            if kind == PUBLICATION and (f.coming or version != f.version + 1):
                return  # Ahead of the copy; it is fetched when its turn has come.
            f.expect(kind, version, self.settings, now + 1)
        if told != xxhash.xxh3_64_intdigest(frames[2]) or chunk not in f.missing:
            return
        place = slice(chunk * f.size, (chunk + 1) * f.size)
        spans = np.unique(f.piece_of[place], return_counts=True)[1]
        f.values[place] = decode(frames[2], codec, spans)
        f.contributors += contributors[0] if contributors else []
        # Arrivals carry a pull on: the last one of those asked for asks for the next.
        f.due = now if f.asked == {chunk} else now + 1
        f.asked, f.missing = f.asked - {chunk}, f.missing - {chunk}
        if not f.missing:
            f.take(kind, version, push_id, result, self.me)

    def receive(self) -> None:
        for socket, _ in self.poller.poll(1 if self.queue else 5):
            try:
                frames, now = socket.recv_multipart(zmq.NOBLOCK), time.monotonic()
                if socket in self.ups:
                    self.open.add(socket)  # The broker's subscription.
                elif socket is self.monitor:
                    self.hello_at = now  # A new control connection.
                else:
                    self.pay(frames, received=True)
                    (self.on_control if socket is self.control else self.on_data)(frames, now)
            except Exception as error:  # Whatever a bad message raises.
                log(f"dropped a message: {error!r}")

    def repair(self, now: float) -> None:
        """Asks for what is missing (§11)."""
        for f, head in zip(self.fragments, self.beat["heads"], strict=False):
            if not f.coming and head > f.version:
                is_far = f.version < 0 or head - f.version > KEPT
                kind, version = (STATE, head) if is_far else (PUBLICATION, f.version + 1)
                f.expect(kind, version, self.settings, now + (not is_far and version == head))
            if f.coming and now >= f.due:
                share = self.settings["window_messages"] // len(self.fragments)
                f.asked = set(sorted(f.missing)[: max(1, min(256, share))])
                f.due = now + min(8, max(1, now - self.data_at))
                what = dict(zip(("kind", "version"), f.coming, strict=True), push_id=0)
                chunks = [[chunk, 1] for chunk in sorted(f.asked)]
                self.say("fetch", fragment=f.index, chunks=chunks, **what)

    def boundary(self) -> None:
        """Adopts, then pushes (§8, §9)."""
        beat, phase = self.beat, self.beat["phase"]
        for f in self.fragments:
            if (behind := f.version - f.base_version) > 0:
                outright = f.base_version < 0 or phase == "ended"
                keep = 1 if phase == "ending" else self.settings["keep"]
                f.adopt(0 if behind > 1 else keep, outright=outright)
                self.report_at = 0.0 if outright else self.report_at
            is_open = f.index in beat["collecting"] and beat["heads"][f.index] == f.base_version
            due = phase == "ending" or (phase == "running" and is_open)
            if due and f.steps and f.base_version >= 0 and not f.push:
                self.pushes += 1
                f.push = Push(self.pushes, f, self.settings["push_rho"])
                f.steps = 0
                self.offer(f, f.push)

    def held(self) -> list[list[int]]:
        return [[f.version, f.digest] for f in self.fragments]

    def talk(self, now: float) -> None:
        """Says Hello and Report when they are due (§9)."""
        if now >= self.hello_at or (self.hello_at == math.inf and now - self.heard > 3):
            self.hello_at, self.told = now + 1, self.held()
            who = {"name": self.name, "incarnation": self.me, "fingerprint": self.fingerprint}
            where = {"run_id": self.run_id, "epoch": self.epoch, "held": self.told}
            self.say("hello", protocol=1, **who, **where)
        done = [f for f in self.fragments if not f.steps and (not f.push or f.push.merged)]
        finished = [f.index for f in done if self.beat["phase"] == "ending"]
        if self.hello_at == math.inf and (now >= self.report_at or finished != self.finished):
            self.report_at, self.finished = now + 1, finished
            work = {"steps": self.steps, "tokens": self.steps, "loss": None, "finished": finished}
            self.say("report", held=[f.base_version for f in self.fragments], **work)

    def run(self, step_s: float) -> None:
        """Trains until the run has ended, and every fragment is that of the final model."""
        while True:
            self.receive()
            now, phase = time.monotonic(), self.beat["phase"]
            is_adopted = self.fragments and all(f.base_version >= 0 for f in self.fragments)
            is_online = now - self.heard < (self.settings["max_offline_s"] or math.inf)
            if is_adopted and is_online and phase == "running" and now > self.stepped + step_s:
                self.stepped, self.steps = now, self.steps + 1
                for f in self.fragments:
                    f.params, f.steps = f.params * np.float32(0.999), f.steps + 1
            self.boundary()
            self.talk(now)
            if self.hello_at == math.inf:
                self.repair(now)
            self.send()
            bases = [f.base_version for f in self.fragments]
            if phase == "ended" and bases == self.beat["heads"]:
                break
            if phase in ("ending", "ended") and now - self.heard > 30:
                sys.exit("minimal_learner: the broker is gone, and with it the final model")
        for f in self.fragments:
            f.adopt(0, outright=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A Narrows learner, written from PROTOCOL.md.")
    parser.add_argument("--broker", required=True, help="tcp://HOST:PORT")
    parser.add_argument("--name", required=True, help="unique in the run")
    parser.add_argument("--layout", required=True, type=argparse.FileType(), help="a layout file")
    parser.add_argument("--step-s", type=float, default=0.02, help="least seconds of a step")
    options = parser.parse_args()
    learner = Learner(options.broker, options.name, json.load(options.layout))
    try:
        learner.run(options.step_s)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        learner.say("bye", reason="this learner ends")
        learner.context.destroy(linger=2000)
    for f in learner.fragments:
        end = {"fragment": f.index, "version": f.version, "digest": f"{digest(f.copy):016x}"}
        print(json.dumps({**end, "merged": f.merged}))
