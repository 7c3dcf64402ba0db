"""A whole Narrows learner in one file, written from PROTOCOL.md alone; § is a section of it.

It trains by weight decay, so it needs no framework. It joins brokers on loopback, where nobody
needs a key, and believes them: it checks sizes and digests, not every bound of §3.
"""

import argparse
import hashlib
import itertools
import json
import math
import secrets
import sys
import time
from typing import Any

import blosc2
import msgpack
import numpy as np
import xxhash
import zmq
import zstandard

Array = np.ndarray[Any, np.dtype[Any]]
Map = dict[str, Any]
ENVELOPE, BLOSC2 = b"NRW\x01", b"\1\0\0\0\0\0\5" + bytes(8)
PUSH, SEED, PUBLICATION, STATE, LAYOUT = range(5)
SETTINGS: Map = dict(mode="decoupled", fragments=4, sync_period_steps=10, overlap_steps=2, keep=0.5)
SETTINGS |= dict(push_codec="int4-zstd", push_rho=0.5, streams=4, window_messages=256)
SETTINGS |= dict(chunk_elements=262144, state_chunk_elements=262144, max_offline_s=3600)
ENDS = "protocol_version layout_differs wrong_run bad_name key_name not_finite_seed".split()
HELLO_ON_S = dict.fromkeys(ENDS, 0) | {"name_in_use": 10, "over_capacity": 60}


def need(truth: object, what: str) -> None:
    if not truth:
        raise ValueError(what)


def log(text: object) -> None:
    print(f"minimal_learner: {text}", file=sys.stderr)


def digest(values: Array) -> int:
    """The digest over the digests of the blocks (§5)."""
    blocks = [values[i : i + 65536].tobytes() for i in range(0, len(values), 65536)]
    return xxhash.xxh3_64_intdigest(b"".join(xxhash.xxh3_64_digest(b)[::-1] for b in blocks))


def to_bfloat16(x: Array) -> Array:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack(codes: Array) -> bytes:
    """Nibbles in runs of 256, half a run beside the other (§7)."""
    whole, odd = len(codes) // 256 * 256, np.zeros(len(codes) % 2, np.int8)
    padded = np.append(codes, odd).view(np.uint8) & 15
    runs = padded[:whole].reshape(-1, 2, 128), padded[whole:].reshape(1, 2, -1)
    return b"".join((run[:, 0] | run[:, 1] << 4).tobytes() for run in runs)


def unpack(raw: Array, n: int) -> Array:
    whole = n // 256 * 128
    runs = raw[:whole].reshape(-1, 1, 128), raw[whole:].reshape(1, 1, -1)
    both = [np.concatenate([run & 15, run >> 4], axis=1).ravel() for run in runs]
    return (np.concatenate(both) << 4).view(np.int8)[:n] >> 4


def store(values: Array) -> bytes:
    """The stored form of a Blosc2 chunk (§7)."""
    sizes = np.array([0, 0, 32], np.uint32) + np.uint32(4 * len(values))
    return b"\5\1\7\4" + sizes.tobytes() + BLOSC2 + b"\0" + values.tobytes()


def decode(payload: bytes, codec: str, spans: list[int]) -> Array:
    """Returns the float32 values of one chunk (§7)."""
    n, cut = sum(spans), 2 * len(spans)
    if codec == "f32-blosc2":
        need(payload[:2] == b"\5\1" and payload[16:31] == BLOSC2, "Blosc2 header")
        need(payload[4:8] == (4 * n).to_bytes(4, "little"), "Blosc2 size")
        return np.frombuffer(blosc2.decompress2(payload), np.float32)
    half, frame = codec == "int4-zstd", payload[cut:]
    size = zstandard.get_frame_parameters(frame).content_size
    need(size == ((n + 1) // 2 if half else n), "size of the zstd frame")
    raw = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    codes = unpack(np.frombuffer(raw, np.uint8), n) if half else np.frombuffer(raw, np.int8)
    scales = from_bfloat16(np.frombuffer(payload[:cut], np.uint16))
    values: Array = np.repeat(scales, spans) * codes.astype(np.float32)
    return values


class Transfer:
    """A PUBLICATION or a STATE on its way (§11)."""

    def __init__(self, kind: int, n: int, c: int) -> None:
        self.kind, self.values, self.missing = kind, np.zeros(n, np.float32), set(range(-(-n // c)))
        self.asked, self.asking, self.pause = set[int](), kind == STATE, 1.0
        self.due, self.contributors = time.monotonic() + 1, list[Any]()
        self.push_id = self.result = 0


class Push:
    """An outer gradient, kept as codes: another life of the broker may cut it anew (§10)."""

    def __init__(self, push_id: int, f: "Fragment", s: Map) -> None:
        self.id, self.base, self.steps, self.merged = push_id, f.base_version, f.steps, False
        work = dict(base=self.base, tokens=f.steps, steps=f.steps)
        self.announcement = dict(fragment=f.index, push_id=push_id, **work)
        self.codec, self.values = s["push_codec"], f.base - f.params
        need(np.isfinite(self.values).all(), "not finite")
        if self.codec == "f32-blosc2":
            return
        limit = 7 if self.codec == "int4-zstd" else 127
        self.codes, self.scales = np.zeros(f.n, np.int8), np.zeros(len(f.pieces), np.uint16)
        for i, (at, count, _) in enumerate(f.pieces):
            piece = self.values[at : at + count]
            rms = math.sqrt((piece.astype(float) ** 2).sum() / max(1, np.count_nonzero(piece)))
            bits = to_bfloat16(np.array([s["push_rho"] * rms]))
            need(bits[0] <= 0x7180, "not finite")
            if bits[0] >= 0x0D80:
                codes, self.scales[i] = piece / from_bfloat16(bits), bits[0]
                self.codes[at : at + count] = np.rint(codes.clip(-limit, limit))
        scales = np.repeat(from_bfloat16(self.scales), [count for _, count, _ in f.pieces])
        self.values = scales * self.codes.astype(np.float32)

    def payload(self, start: int, end: int, spans: list[tuple[int, int]]) -> bytes:
        if self.codec == "f32-blosc2":
            return store(self.values[start:end])
        codes = self.codes[start:end]
        raw = pack(codes) if self.codec == "int4-zstd" else codes.tobytes()
        return self.scales[[i for i, _ in spans]].tobytes() + zstandard.compress(raw)


class Fragment:
    def __init__(self, index: int, pieces: list[tuple[int, int, str]], params: Array) -> None:
        self.index, self.pieces, self.n = index, pieces, len(params)  # at, count, dtype
        self.params = self.base = self.copy = self.round(params)  # base: r(published[base])
        self.version = self.base_version = -1  # of the copy, and of the base; -1: there is none
        self.digest = self.steps = self.merged = 0  # steps: not pushed yet; as many tokens
        self.push: Push | None = None
        self.coming: dict[int, Transfer] = {}  # by version; one STATE at most, the oldest

    def round(self, values: Array) -> Array:
        """r of §8: to the dtype of each parameter and back."""
        out = values.astype(np.float32)
        for at, count, dtype in self.pieces:
            part = out[at : at + count]
            if dtype != "float32":
                half = part.astype(np.float16)
                part[:] = half if dtype == "float16" else from_bfloat16(to_bfloat16(part))
        return out

    def spans(self, start: int, end: int) -> list[tuple[int, int]]:
        """Returns (piece, elements) of each span of a chunk."""
        cut = [(i, min(end, a + n) - max(start, a)) for i, (a, n, _) in enumerate(self.pieces)]
        return [(i, count) for i, count in cut if count > 0]

    def begin(self, kind: int, version: int, c: int) -> None:
        if kind == STATE:  # It replaces another one, and all that it covers.
            self.coming = {v: t for v, t in self.coming.items() if t.kind != STATE and v > version}
        self.coming[version] = Transfer(kind, self.n, c)

    def expect(self, head: int, s: Map) -> None:
        """Begins the transfers that lead from the copy to the head (§11)."""
        states = [v for v, t in self.coming.items() if t.kind == STATE]
        if not states and (self.version < 0 or head - self.version > 8):
            self.begin(STATE, head, s["state_chunk_elements"])
            states = [head]
        first = max([self.version, *states]) + 1
        for version in range(first, min(head, first + 7) + 1):
            if version not in self.coming:
                self.begin(PUBLICATION, version, s["chunk_elements"])

    def advance(self, me: str) -> None:
        """Takes over what is complete: a STATE, and publications in order."""
        for version, t in sorted(self.coming.items()):
            if t.missing or (t.kind == PUBLICATION and version != self.version + 1):
                continue
            add = np.where(t.values == 0, self.copy, self.copy + t.values)
            copy, p = t.values if t.kind == STATE else add, self.push
            if digest(copy) != t.result:  # Without a copy the STATE of the head is fetched.
                self.version, self.digest, self.coming = -1, 0, {}
                return
            self.copy, self.version, self.digest = copy, version, t.result
            if p and not p.merged and (t.push_id >= p.id or [me, p.id] in t.contributors):
                p.merged, self.merged = True, self.merged + 1
        self.coming = {v: t for v, t in self.coming.items() if v > self.version}

    def adopt(self, keep: float) -> None:
        new, p = self.round(self.copy), self.push
        waiting = p.values if p else np.zeros(self.n, np.float32)
        rest = np.float32(keep) * (self.params - self.base + waiting) if keep else 0
        self.params = new + rest - (waiting if p and not p.merged else 0)
        self.base, self.base_version, self.steps = new, self.version, self.steps if keep else 0
        self.push = None if p and p.merged else p

    def adopt_outright(self) -> None:
        self.params = self.base = self.round(self.copy)
        self.base_version, self.steps, self.push = self.version, 0, None


class Learner:
    def __init__(self, address: str, name: str, layout: Map) -> None:
        self.name, self.me = name, f"{name}.{secrets.token_hex(4)}"
        self.host, self.entries = address.rpartition(":")[0], layout["entries"]
        self.layout = msgpack.packb([layout["frozen_digest"], self.entries])
        self.context, self.poller, self.fragments = zmq.Context(), zmq.Poller(), list[Fragment]()
        self.control = self.socket(zmq.DEALER, 4194304, (zmq.IMMEDIATE, 1))
        self.monitor = self.control.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.poller.register(self.monitor, zmq.POLLIN)
        self.control.connect(address)
        self.run_id, self.epoch, self.ended, self.settings = "", "", False, SETTINGS
        self.beat: Map = dict(phase="seeding", heads=[], up_bits_per_s=0)
        self.ports, self.ups, self.downs, self.ready = [0] * 3, list[Any](), list[Any](), set[int]()
        self.queue: dict[tuple[int, int, int, int], list[bytes]] = {}
        self.steps = self.pushes = 0
        self.told = self.finished = list[Any]()  # held of the last Hello; of the last Report
        self.heard = self.data_at = self.stepped = time.monotonic()
        self.hello_at = self.report_at = self.refused = self.step_s = 0.0  # hello_at inf: welcome
        self.free = 0.0  # when the next chunk may be sent

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
        self.ports, self.ups, self.downs, self.ready = ports, [], [], set()
        for s in range(ports[2]):
            topics = [(zmq.SUBSCRIBE, f"{t}/{s:02d}".encode()) for t in ("p", f"r/{self.me}")]
            self.ups.append(self.socket(zmq.XPUB, 512, (zmq.XPUB_NODROP, 1), (zmq.SNDHWM, 8)))
            self.downs.append(self.socket(zmq.SUB, 4259840, (zmq.RCVHWM, 8), *topics))
            self.ups[s].connect(f"{self.host}:{ports[0]}")
            self.downs[s].connect(f"{self.host}:{ports[1]}")

    def cut(self, parts: int) -> None:
        """Cuts the model into fragments (§6)."""
        slices, model, total = [], [], sum(math.prod(shape) for _, shape, _, _ in self.entries)
        for tensor, (_, shape, dtype, _) in enumerate(self.entries):
            size, rows = math.prod(shape), shape[0] if shape else 1
            cuts = min(rows, -(-size * parts // total))
            edges = [rows * c // cuts * (size // rows) for c in range(cuts + 1)]
            slices += [(a - b, tensor, a, b - a, dtype) for a, b in itertools.pairwise(edges)]
            model.append(np.random.default_rng(tensor).normal(0, 0.02, size))
        if len(slices) < parts:
            sys.exit("minimal_learner: this model cannot be cut so")
        bins: list[list[Any]] = [[] for _ in range(parts)]
        for piece in sorted(slices):
            min(bins, key=lambda chosen: sum(n for _, _, n, _ in chosen)).append(piece[1:])
        for index, chosen in enumerate(map(sorted, bins)):
            at = itertools.accumulate([n for _, _, n, _ in chosen], initial=0)
            pieces = [(a, n, dtype) for a, (_, _, n, dtype) in zip(at, chosen, strict=False)]
            params = np.concatenate([model[t][start : start + n] for t, start, n, _ in chosen])
            self.fragments.append(Fragment(index, pieces, params))

    def pay(self, frames: list[bytes], *, received: bool = False) -> None:
        """Charges a message (§11)."""
        size, rate = sum(map(len, frames)) + 9 * len(frames), self.beat["up_bits_per_s"]
        cost = size + 66 * math.ceil(size / 1448)
        cost = 66 * math.ceil(cost / 2896) if received else cost
        self.free = max(self.free, time.monotonic()) + (8 * cost / rate if rate else 0)

    def say(self, type_: str, **fields: Any) -> None:
        frames = [ENVELOPE, msgpack.packb({"type": type_} | fields)]
        try:
            self.control.send_multipart(frames, zmq.NOBLOCK)
            self.pay(frames)
        except zmq.Again:
            pass  # No connection: after the next Welcome all is told again.

    def say_hello(self, now: float) -> None:
        self.hello_at, self.told = now + 1, [[f.version, f.digest] for f in self.fragments]
        mark = hashlib.blake2b(self.layout, digest_size=16).hexdigest()
        who = dict(name=self.name, incarnation=self.me, run_id=self.run_id, epoch=self.epoch)
        self.say("hello", protocol=1, fingerprint=mark, held=self.told, **who)

    def report(self, now: float, finished: list[int]) -> None:
        self.report_at, self.finished = now + 1, finished
        held = [f.base_version for f in self.fragments]
        work = dict(steps=self.steps, tokens=self.steps, loss=None)
        self.say("report", held=held, finished=finished, **work)

    def size(self, kind: int) -> int:
        return int(self.settings[("state_" if kind in (SEED, STATE) else "") + "chunk_elements"])

    def put(self, kind: int, fragment: int, push_id: int = 0, ranges: Any = None) -> None:
        """Queues chunks to be sent: all, or those that the broker fetches."""
        f, c, version, codec = self.fragments[fragment], self.size(kind), 0, "f32-blosc2"
        last, p = 1 if kind == LAYOUT else -(-f.n // c), f.push
        if kind == PUSH:
            if not p or p.id != push_id:
                return  # It is settled.
            version, codec = p.base, p.codec
        for first, count in ranges or [[0, last]]:
            for chunk in range(first, min(last, first + count)):
                start, end = chunk * c, min(f.n, (chunk + 1) * c)
                if kind == PUSH and p:
                    payload = p.payload(start, end, f.spans(start, end))
                elif kind == SEED:
                    payload = store(f.params[start:end])
                else:
                    payload = zstandard.compress(self.layout)
                head = [self.epoch, kind, self.me, fragment, version, push_id, chunk, codec]
                head += [xxhash.xxh3_64_intdigest(payload), 0]
                frames = [b"u/%02d" % (chunk % self.ports[2]), msgpack.packb(head), payload]
                self.queue[kind, fragment, push_id, chunk] = frames

    def send(self, now: float) -> None:
        blocked = set(range(self.ports[2])) - self.ready
        for key in list(self.queue):
            push, stream = self.fragments[key[1]].push, key[3] % self.ports[2]
            if key[0] == PUSH and (not push or push.id != key[2]):
                del self.queue[key]
            elif self.free <= now and stream not in blocked:
                try:
                    self.ups[stream].send_multipart(self.queue[key], zmq.NOBLOCK)
                    self.pay(self.queue.pop(key))
                except zmq.Again:
                    blocked.add(stream)

    def on_welcome(self, m: Map, now: float) -> None:
        settings, new = SETTINGS | m["settings"], m["beat"]["epoch"] != self.epoch
        if new and self.epoch and self.told != [[f.version, f.digest] for f in self.fragments]:
            self.say_hello(now)
            return
        if any(settings[s] & settings[s] - 1 for s in ("chunk_elements", "state_chunk_elements")):
            sys.exit("minimal_learner: the broker's chunks are no powers of two")
        self.settings, self.run_id, self.beat = settings, m["run_id"], m["beat"]
        if not self.fragments:
            self.cut(settings["fragments"])
        ports = [m["uplink_port"], m["downlink_port"], settings["streams"]]
        if ports != self.ports:
            self.open_data_sockets(ports)
        self.epoch, self.hello_at, self.refused = self.beat["epoch"], math.inf, 0.0
        self.queue = {} if new else self.queue
        for f in self.fragments:
            f.coming = {} if new else f.coming
            if new and f.index in m["go_back"]:
                f.version, f.base_version, f.digest, f.push = -1, -1, 0, None
            if f.push and not f.push.merged:
                self.say("push", **f.push.announcement)
                if new:
                    self.put(PUSH, f.index, f.push.id)
        if m["role"] == "seed":
            self.put(LAYOUT, 0)
            for f in self.fragments:
                self.put(SEED, f.index)
        self.report_at = now

    def on_refuse(self, m: Map, now: float) -> None:
        log("; ".join(m[k] for k in "code message expected got remedy".split() if m.get(k)))
        if m.get("push_id"):
            f = self.fragments[m["fragment"]]
            if f.push and f.push.id == m["push_id"] and not f.push.merged:
                f.steps, f.push = f.steps + f.push.steps, None
        elif m["code"] in HELLO_ON_S:
            self.refused, self.hello_at = self.refused or now, now + 1
            if m.get("layout"):
                theirs = msgpack.unpackb(zstandard.decompress(m["layout"]))[1]
                pairs = zip(self.entries, theirs, strict=False)
                log([pair for pair in pairs if pair[0] != pair[1]][:3])
            if now - self.refused >= HELLO_ON_S[m["code"]]:
                sys.exit(3)

    def on_control(self, frames: list[bytes], now: float) -> None:
        if frames[0] != ENVELOPE:
            sys.exit("minimal_learner: the broker speaks another version of the protocol")
        m, self.heard = msgpack.unpackb(frames[1]), now
        if m["type"] == "welcome":
            self.on_welcome(m, now)
        elif m["type"] == "refuse":
            self.on_refuse(m, now)
        elif m["type"] == "fetch":
            self.put(m["kind"], m["fragment"], m["push_id"], m["chunks"])
        elif m["type"] == "beat" and m["epoch"] == self.epoch:
            self.beat = m
        elif self.hello_at == math.inf:  # Bye, or a Beat of another epoch.
            self.hello_at = now

    def on_data(self, frames: list[bytes], now: float) -> None:
        _, header, payload = frames
        epoch, kind, to, i, version, push_id, chunk, *more = msgpack.unpackb(header)
        codec, told, result, *by = more
        f, c, self.data_at = self.fragments[i], self.size(kind), now
        if epoch != self.epoch or to not in ("", self.me) or version <= f.version:
            return
        start, end = chunk * c, min(f.n, chunk * c + c)
        need(told == xxhash.xxh3_64_intdigest(payload) and 0 <= start < f.n, "damaged chunk")
        values = decode(payload, codec, [count for _, count in f.spans(start, end)])
        if version not in f.coming or f.coming[version].kind < kind:
            f.begin(kind, version, c)
        t = f.coming[version]
        if t.kind == kind and chunk in t.missing:
            t.values[start:end], t.push_id, t.result = values, push_id, result
            t.missing, t.asked, t.pause, t.due = t.missing - {chunk}, t.asked - {chunk}, 1, now + 1
            t.contributors += by[0] if by else []
            f.advance(self.me)

    def repair(self, now: float) -> None:
        """Asks for what is missing (§11)."""
        for f, head in zip(self.fragments, self.beat["heads"], strict=False):
            f.expect(head, self.settings)
        coming = [(f, v, t) for f in self.fragments for v, t in f.coming.items() if t.missing]
        for f, version, t in coming:
            if now >= t.due:
                t.pause = 1 if self.data_at > t.due - t.pause else min(8, 2 * t.pause)
            if now >= t.due or (t.asking and not t.asked):
                share = max(1, self.settings["window_messages"] // len(coming))
                t.asked = set(sorted(t.missing)[: min(share, 256)])
                t.asking, t.due, ranges = True, now + t.pause, [[c, 1] for c in t.asked]
                what = dict(kind=t.kind, fragment=f.index, version=version, push_id=0)
                self.say("fetch", chunks=ranges, **what)

    def boundary(self) -> None:
        """Adopts, then pushes (§8, §9)."""
        s, beat, phase = self.settings, self.beat, self.beat["phase"]
        lockstep, ending = s["mode"] == "diloco", phase == "ending"
        slow = not lockstep and 0 < beat["period_s"] / 2 < self.step_s
        for f in self.fragments:
            behind = f.version - f.base_version
            if behind > 0 and f.base_version < 0:
                f.adopt_outright()
                self.report_at = 0.0
            elif behind > 0:
                f.adopt(1 if slow else 0 if behind > 1 else 1 if ending else s["keep"])
            is_open = f.index in beat["collecting"] and beat["heads"][f.index] == f.base_version
            due = f.steps >= s["sync_period_steps"] if lockstep else slow or is_open
            due = ending or (due and phase == "running")
            if due and f.steps and f.base_version >= 0 and not f.push:
                self.pushes += 1
                try:
                    f.push, f.steps = Push(self.pushes, f, s), 0
                    self.say("push", **f.push.announcement)
                    self.put(PUSH, f.index, f.push.id)
                except ValueError as error:
                    log(f"no push, back to the published copy: {error}")
                    f.base_version = -1

    def waits(self, f: Fragment) -> bool:
        """Lockstep (§9)."""
        if not f.push:
            return bool(f.base_version > self.beat["heads"][f.index])
        taken = "sync_period_steps" if f.base_version > f.push.base else "overlap_steps"
        return bool(f.steps >= self.settings[taken])

    def step(self, now: float, step_s: float) -> None:
        s, early = self.settings, now < self.stepped + step_s
        if (
            early
            or self.beat["phase"] != "running"
            or any(f.base_version < 0 for f in self.fragments)
        ):
            return
        if 0 < s["max_offline_s"] < now - self.heard:
            return
        if s["mode"] == "diloco" and any(map(self.waits, self.fragments)):
            return
        self.step_s = min(now - self.stepped, 2 * max(step_s, self.step_s))
        self.stepped, self.steps = now, self.steps + 1
        for f in self.fragments:
            f.params, f.steps = f.params * np.float32(0.999), f.steps + 1

    def receive(self) -> None:
        for socket, _ in self.poller.poll(1 if self.queue else 5):
            try:
                frames, now = socket.recv_multipart(zmq.NOBLOCK), time.monotonic()
                if socket in self.ups:
                    self.ready.add(self.ups.index(socket))  # The broker's subscription.
                elif socket is self.monitor:
                    self.hello_at = now  # A new control connection.
                else:
                    self.pay(frames, received=True)
                    (self.on_control if socket is self.control else self.on_data)(frames, now)
            except Exception as error:  # Whatever a bad message raises.
                log(f"dropped a message: {error!r}")

    def run(self, step_s: float) -> None:
        while not self.ended:
            self.receive()
            now = time.monotonic()
            if now >= self.hello_at or (self.hello_at == math.inf and now - self.heard > 3):
                self.say_hello(now)
            if not self.fragments:
                continue
            self.step(now, step_s)
            self.boundary()
            if self.hello_at == math.inf:
                self.repair(now)
                done = [f for f in self.fragments if not f.steps and (not f.push or f.push.merged)]
                finished = [f.index for f in done if self.beat["phase"] == "ending"]
                if now >= self.report_at or finished != self.finished:
                    self.report(now, finished)
            self.send(now)
            versions, phase = [f.version for f in self.fragments], self.beat["phase"]
            self.ended = phase == "ended" and versions == self.beat["heads"]
            if phase in ("ending", "ended") and now - self.heard > 30:
                sys.exit("minimal_learner: the broker is gone, and with it the final model")
        for f in self.fragments:
            f.adopt_outright()
        self.report(now, [])
        self.say("bye", reason="this learner ends")
        self.context.destroy(linger=2000)


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
        learner.say("bye", reason="stopped by Ctrl-C")
        sys.exit(130)
    for f in learner.fragments:
        end = {"fragment": f.index, "version": f.version, "digest": f"{digest(f.copy):016x}"}
        print(json.dumps({**end, "merged": f.merged}))
