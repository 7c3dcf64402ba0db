"""A whole Narrows learner in one file, written from proto/PROTOCOL.md alone; §n is its section n.

--layout names a file that `narrows layout` wrote. A training step is weight decay: this file has no
model, so it founds no run. Exits: 0 run ended, 2 not supported, 3 refused, 4 no broker, 130 ^C."""

import argparse
import json
import signal
import sys
import time
from struct import unpack_from
from typing import Any, NoReturn, TypeAlias

import msgpack
import numpy as np
import xxhash
import zmq
import zstandard

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Message: TypeAlias = dict[str, Any]
PROTOCOL, PUSH, PUBLICATION, STATE, INT4, BLOSC2 = 3, 1, 3, 4, "int4-zstd", "f32-blosc2"
SUPPORTED = {"role": "adopt wait", "mode": "decoupled", "push_codec": INT4, "publish_codec": INT4}
OPTIONS = {zmq.RECONNECT_IVL: 100, zmq.RECONNECT_IVL_MAX: 2000, zmq.TCP_MAXRT: 20000}
OPTIONS |= {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 10, zmq.TCP_KEEPALIVE_INTVL: 5}
OPTIONS |= {zmq.IMMEDIATE: 1, zmq.SNDHWM: 0, zmq.RCVHWM: 64, zmq.MAXMSGSIZE: 4259840}
HELLO_AGAIN = ("unknown_session", "wrong_epoch", "over_capacity", "quota")
FIRST, LOGGED = "welcome asklayout refuse probe", "bad_frame bad_message too_large bad_checksum"
digest = xxhash.xxh3_64_intdigest


def stop(code: int, text: str) -> NoReturn:
    print(f"minimal_learner: {text}", file=sys.stderr)
    sys.exit(code)


def seal(body: object) -> bytes:
    """Returns the envelope around a message or a data header (§4)."""
    packed: bytes = msgpack.packb(body)
    return b"NRW" + bytes([PROTOCOL]) + digest(packed).to_bytes(8, "little") + packed


def unseal(frame: bytes) -> Any:
    sound = digest(frame[12:]) == int.from_bytes(frame[4:12], "little")
    if frame[:4] != b"NRW" + bytes([PROTOCOL]) or not sound:
        raise ValueError(f"expected a frame of protocol_version {PROTOCOL}, got {frame[:12]!r}")
    return msgpack.unpackb(frame[12:])


def cut(shapes: list[list[int]], count: int) -> list[list[tuple[int, int]]]:
    """Returns each fragment's pieces as ranges of all elements in layout order (§7)."""
    parts, fragments = list[tuple[int, int]](), [list[tuple[int, int]]() for _ in range(count)]
    total, start = sum(int(np.prod(shape)) for shape in shapes), 0
    for shape in shapes:
        size, rows = int(np.prod(shape)), shape[0] if shape else 1
        cuts = min(rows, -(-size * count // total))
        ends = [start + rows * (c + 1) // cuts * (size // rows) for c in range(cuts)]
        parts += zip([start, *ends], ends, strict=False)
        start += size
    for part in sorted(parts, key=lambda p: (p[0] - p[1], p[0])):
        min(fragments, key=lambda pieces: sum(b - a for a, b in pieces)).append(part)
    return [sorted(pieces) for pieces in fragments]


def unblosc(chunk: bytes) -> Floats:
    """Decodes a Blosc2 chunk: of zeros, stored, or in blocks of 1 or 4 byte streams each (§8)."""
    (size, block), content = unpack_from("<II", chunk, 4), b""
    if chunk[31] == 0x10 or chunk[2] & 2:
        return np.frombuffer(chunk[32:] or bytes(size), "<f4")
    for start in range(0, size, block):
        length, (at,) = min(block, size - start), unpack_from("<I", chunk, 32 + start // block * 4)
        raw, shuffled = length if chunk[2] & 0x10 or length < block else length // 4, b""
        while len(shuffled) < length:
            (n,) = unpack_from("<i", chunk, at)
            part = chunk[at + 4 : at + 4 + n] if n > 0 else bytes([-n]) * raw  # a run of one byte
            shuffled += part if len(part) == raw else zstandard.decompress(part, raw)
            at += 4 + (n if n > 0 else n < 0)
        content += np.frombuffer(shuffled, np.uint8).reshape(4, -1).T.tobytes()
    return np.frombuffer(content, "<f4")


class Fragment:
    def __init__(self, index: int, pieces: list[tuple[int, int]]) -> None:
        self.index, self.places = index, np.concatenate([np.arange(a, b) for a, b in pieces])
        self.edges = np.cumsum([0] + [b - a for a, b in pieces])
        self.version, self.newest, self.since, self.copy = -1, -1, 0, np.zeros(0, np.float32)
        # The push whose outcome is open: its announcement, chunks by offset and count, remainder.
        self.push, self.chunks, self.unsent = Message(), dict[Any, bytes](), list[Any]()
        self.remainder, self.failed = self.copy, False
        self.merged = list[tuple[int, int, Floats]]()  # push_id, tokens, remainder
        self.transfers = dict[Any, list[Any]]()  # version, kind: values, push_id, result_digest
        self.ask_at, self.pause_s, self.retry_at, self.declined = 0.0, 0.5, 0.0, (-1, 0)

    def quantise(self, values: Floats, rho: float) -> tuple[Any, Any, Floats]:
        """Returns the scale of each piece, all codes, and the values that they stand for (§8)."""
        pieces = np.split(values.astype(np.float64), self.edges[1:-1])
        rms = np.sqrt([p @ p / (np.count_nonzero(p) or 1) for p in pieces])
        bits = (rms * rho).astype(np.float32).view(np.uint32)
        scales = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")  # half to even
        scales[scales < 0x0D80] = 0
        each: Floats = np.repeat(scales.astype("<u4") << 16, np.diff(self.edges)).view(np.float32)
        codes = np.clip(np.rint(values / np.where(each > 0, each, np.inf)), -7, 7).astype(np.int8)
        return scales, codes, codes * each

    def encode(self, scales: Any, codes: Any, at: int, count: int) -> bytes:
        """Returns an int4-zstd payload: in each run of 256 codes, two halves share bytes (§8)."""
        packed, spans = b"", np.diff(np.clip(self.edges, at, at + count))
        for run in np.split(codes[at : at + count], range(256, count, 256)):
            half = -(-len(run) // 2)
            packed += (run[:half] & 15 | np.append(run[half:], np.int8(0))[:half] << 4).tobytes()
        return bytes(scales[spans > 0].data) + zstandard.compress(packed, 1)

    def decode(self, payload: bytes, at: int, count: int) -> Floats:
        """Returns the values of an int4-zstd payload (§8)."""
        spans = np.diff(np.clip(self.edges, at, at + count))
        scales = np.frombuffer(payload, "<u2", np.count_nonzero(spans))
        octets = np.frombuffer(zstandard.decompress(payload[scales.nbytes :]), np.int8)
        runs = np.split(octets, range(128, len(octets), 128))
        codes = np.concatenate([part for run in runs for part in (run << 4 >> 4, run >> 4)])[:count]
        return codes * np.repeat(scales.astype("<u4") << 16, spans[spans > 0]).view(np.float32)


class Learner:
    def __init__(self, address: str, name: str, model: Message) -> None:
        self.host, _, self.port = address.rpartition(":")
        if any(entry[2] != "float32" for entry in model["layout"]):
            stop(2, "config: the layout has another dtype than float32")
        self.name, self.incarnation, self.model = name, np.random.bytes(16).hex(), model
        self.shapes: list[list[int]] = [entry[1] for entry in model["layout"]]
        self.flat = np.zeros(sum(int(np.prod(shape)) for shape in self.shapes), np.float32)
        self.run_id, self.epoch, self.proof, self.phase = "", [0, 0, 0], "", "founding"
        self.fragments, self.rounds, self.received = list[Fragment](), list[list[int]](), [0]
        self.fates = dict.fromkeys(("merged", "overwritten", "refused", "rolled_back"), 0)
        self.steps, self.step_s, self.push_ids, self.news = 0, 0.0, 0, False
        self.sent, self.known, self.moved_at, self.rate, self.paid_at = 0, 0, 0.0, 0.0, 0.0
        self.heard_at = self.stepped_at = self.reported_at = self.came_at = time.monotonic()
        self.context, self.redial_s, self.topic = zmq.Context(), 2.5, f"{name}/{self.incarnation}"
        self.dial(self.heard_at)

    def dial(self, now: float) -> None:
        """Begins to join, on new connections (§3, §10)."""
        self.context.destroy(linger=0)
        self.context, self.poller = zmq.Context(), zmq.Poller()
        self.uplinks, self.subscribed = list[Any](), set[Any]()
        self.control, self.joined = self.socket(zmq.DEALER, self.port), False
        self.asked_at, self.redial_s = np.inf, min(60, 2 * self.redial_s)
        self.hello_at, self.hello_s = now + 0.1, 0.25

    def socket(self, kind: int, port: int | str) -> "zmq.Socket[bytes]":
        socket = self.context.socket(kind)
        for option, value in OPTIONS.items():
            socket.set(option, value)
        socket.connect(f"{self.host}:{port}")
        self.poller.register(socket, zmq.POLLIN)
        return socket

    def send(self, socket: "zmq.Socket[bytes]", *frames: bytes) -> None:
        if socket.poll(0, zmq.POLLOUT):  # a connection stands: nothing waits for one
            socket.send_multipart(frames)
            size = sum(len(frame) + 9 for frame in frames)
            self.charge(size - size // -1448 * 66, time.monotonic())

    def charge(self, size: float, now: float) -> None:
        if self.rate:  # data may leave when all is paid at 98.5 % of it (§15)
            self.paid_at = max(self.paid_at, now) + 8 * size / (0.985 * self.rate)

    def tell(self, kind: str, **fields: Any) -> None:
        self.send(self.control, seal({"type": kind, **fields}))

    def hello(self, now: float) -> None:
        held = [f.version for f in self.fragments]
        m = {"fingerprint": self.model["fingerprint"], "name": self.name, "run_id": self.run_id}
        m |= {"incarnation": self.incarnation, "epoch": self.epoch, "epoch_proof": self.proof}
        m |= {"step": self.steps, "tokens": self.steps, "codecs": [INT4, BLOSC2]}
        self.tell("hello", **m, protocol=PROTOCOL, versions=[] if -1 in held else held)
        self.hello_at = now + self.hello_s * (1 + np.random.random())
        self.asked_at, self.hello_s = min(self.asked_at, now), min(5.0, 2 * self.hello_s)

    def on_control(self, m: Message, now: float) -> None:
        """Takes a control message (§5); the codes of a Refuse are in §16."""
        kind, epoch, push_id = m["type"], m.get("epoch", self.epoch), m.get("push_id")
        self.heard_at, self.asked_at, self.redial_s = now, np.inf, 2.5
        if epoch[0] < self.epoch[0] or not (self.joined or kind in FIRST.split()):
            return
        again = not push_id and m.get("code") in HELLO_AGAIN
        if self.joined and (kind == "bye" or again or epoch != self.epoch):
            return self.dial(now)
        if kind == "probe":
            self.tell("alive", nonce=m["nonce"])
        elif kind in ("refuse", "missing") and push_id:
            f = self.fragments[m["fragment"]]
            if f.chunks and f.push["push_id"] == push_id and kind == "missing":
                self.announce(f, m["ranges"])
            elif f.chunks and f.push["push_id"] == push_id:
                f.failed, f.chunks, f.unsent, f.declined = True, {}, [], (-1, 0)
                f.retry_at = np.inf if m["code"] == "push_conflict" else now + 5
        elif kind == "refuse" and not again and not (self.run_id and m["code"] in LOGGED.split()):
            told = [f"{key} {m[key]}" for key in ("expected", "got", "remedy") if m.get(key)]
            stop(3, f"{m['code']}: {m['message']}; {', '.join(told)}")
        elif kind in ("beat", "progress") and self.known < m["received"][0] <= self.sent:
            self.known, self.moved_at = m["received"][0], now
        elif kind in ("welcome", "asklayout"):  # who is asked for its layout founds the run
            self.on_welcome({"role": "found", "settings": {}, "run_id": ""} | m)
        if kind in ("beat", "welcome"):
            self.phase, self.rounds = m["phase"], m["rounds"]
            self.news, self.rate = self.news or m["up_bits_per_s"] != self.rate, m["up_bits_per_s"]
            versions = m["versions"] if kind == "beat" else [head[0] for head in m["fragments"]]
            for f, version in zip(self.fragments, versions, strict=False):
                if version > f.newest:
                    f.newest, f.ask_at, f.pause_s = version, now + 0.5 * (kind == "beat"), 0.5

    def on_welcome(self, m: Message) -> None:
        """Joins, or rejoins; in a new epoch it takes every fragment anew (§10, §12)."""
        settings = self.settings = m["settings"]
        for key, known in (SUPPORTED | {"run_id": self.run_id or m["run_id"]}).items():
            if (told := (settings | m)[key]) not in known.split():
                self.tell("bye", reason=f"{key} {told!r} is not supported")
                self.context.destroy(linger=1000)
                stop(2, f"config: {key} {told!r} is not supported, only {known!r} is")
        cuts = enumerate(cut(self.shapes, settings["fragment_count"]))
        self.fragments = self.fragments or [Fragment(index, pieces) for index, pieces in cuts]
        if not self.joined:
            self.known, self.received = self.sent, [0] * settings["streams"]
            self.uplinks = [self.socket(zmq.XPUB, m["uplink_port"]) for _ in self.received]
            for s in range(settings["streams"]):
                self.socket(zmq.SUB, m["downlink_port"]).subscribe(f"{self.topic}/{s:02d}")
        for f in self.fragments:
            f.declined, f.newest = (-1, 0), -1
            if m["epoch"] != self.epoch:  # the State's push_id says what became of an open push
                f.version, f.transfers, f.chunks, f.unsent = -1, {}, {}, []
            if f.version >= 0:
                self.tell("adopted", fragment=f.index, version=f.version)
            if f.chunks:
                self.announce(f, [])
        self.run_id, self.epoch = m["run_id"], m["epoch"]
        self.proof, self.joined = m["epoch_proof"], True

    def on_data(self, header: list[Any], payload: bytes, now: float) -> None:
        """Takes a chunk of a publication or a state (§6)."""
        at, count, codec, payload_digest, result_digest, stream, position = header[9:]
        kind, (index, version, push_id) = header[3], header[6:9]
        mine = [self.run_id, self.epoch, self.name, self.incarnation]
        if header[1:3] + header[4:6] != mine or codec != (BLOSC2 if kind == STATE else INT4):
            return
        self.received[stream], self.news, self.heard_at = position, True, now
        f = self.fragments[index]
        is_wanted = f.version < version <= max(f.version, f.newest) + 8
        if is_wanted and digest(payload) == payload_digest:
            values = unblosc(payload) if kind == STATE else f.decode(payload, at, count)
            blank = [np.full(len(f.places), np.nan, np.float32), 0, 0]
            transfer = f.transfers.setdefault((version, kind), blank)
            transfer[0][at : at + count] = values
            transfer[1:] = max(push_id, transfer[1]), result_digest
            f.ask_at, f.pause_s = now + 0.5, 0.5
            self.adopt(f)

    def adopt(self, f: Fragment) -> None:
        """Applies what is complete (§9), and settles the push and its tokens (§10)."""
        for (version, kind), (values, push_id, result_digest) in sorted(f.transfers.items()):
            wrong = version != f.version + 1 if kind == PUBLICATION else version <= f.version
            if wrong or np.isnan(values).any():
                continue
            values = values if kind == STATE else np.where(values == 0, f.copy, f.copy + values)
            if digest(values.tobytes()) != result_digest:
                f.transfers.clear()
                return self.tell("fetch", fragment=f.index, have_version=-1)
            while f.version < 0 and f.merged and f.merged[-1][0] > push_id:
                self.fates["rolled_back"] += f.merged[-1][1]
                self.fates["merged"] -= f.merged.pop()[1]
            if f.push:
                tokens, merged = f.push["tokens"], f.push["push_id"] == push_id
                fate = "merged" if merged else "refused" if f.failed else "overwritten"
                self.fates[fate], f.since = self.fates[fate] + tokens, f.since + tokens
                f.merged += [(push_id, tokens, f.remainder)] * merged
            self.fates["overwritten"] += self.steps - f.since
            f.since, f.push, f.chunks, f.unsent, f.retry_at = self.steps, {}, {}, [], 0.0
            f.copy, f.version, self.flat[f.places] = values, version, values
            self.tell("adopted", fragment=f.index, version=version)
        f.transfers = {key: value for key, value in f.transfers.items() if key[0] > f.version}

    def ask(self, now: float) -> None:
        """Asks for what does not come, of four fragments at a time (§13)."""
        behind = [f for f in self.fragments if f.version < f.newest]
        for f in [f for f in behind[:4] if now >= f.ask_at]:
            f.ask_at, f.pause_s = now + f.pause_s * (1 + np.random.random()), min(8, 2 * f.pause_s)
            begun = [k for k in sorted(f.transfers) if k[1] == STATE or k[0] == f.version + 1]
            for version, kind in begun[-1:]:
                gaps = np.diff(np.isnan(f.transfers[version, kind][0]), prepend=False, append=False)
                ranges = [[a, b - a] for a, b in np.flatnonzero(gaps).reshape(-1, 2).tolist()][:256]
                m = {"kind": kind, "version": version, "push_id": 0, "ranges": ranges}
                self.tell("missing", fragment=f.index, **m)
            if not begun:
                self.tell("fetch", fragment=f.index, have_version=f.version)

    def answer(self, f: Fragment, base: int, attempt: int, now: float) -> None:
        """Answers a round: with its outer gradient, or a Decline if none can come (§9, §10)."""
        m: Message = {"fragment": f.index, "base_version": base, "attempt": attempt}
        idle, tokens = f.since == self.steps or now < f.retry_at, self.steps - f.since
        waits = idle and (f.declined == (base, attempt) or (self.phase == "running" and not tokens))
        if f.version != base or (f.push and not f.failed) or waits:
            return
        if idle:
            f.declined = base, attempt
            return self.tell("decline", **m, reason="nothing to push now")
        gradient, size = f.copy - self.flat[f.places], len(f.places)
        if self.settings["error_feedback"] and f.merged:
            gradient += f.merged[-1][2]
        scales, codes, coded = f.quantise(gradient, self.settings["push_rho"])
        room = self.settings["message_bytes"] - 512 - 64 - 2 * len(f.edges)
        step = min(self.settings["chunk_elements"], max(256, room * 2 // 257 * 256))
        cuts = [(at, min(step, size - at)) for at in range(0, size, step)]
        f.chunks = {(at, n): f.encode(scales, codes, at, n) for at, n in cuts}
        m |= {"push_id": self.push_ids + 1, "elements": size, "tokens": tokens, "steps": tokens}
        self.push_ids, f.push, f.failed, f.remainder = self.push_ids + 1, m, False, gradient - coded
        self.announce(f, [[0, size]])

    def announce(self, f: Fragment, ranges: list[list[int]]) -> None:
        """Announces a push, and queues its chunks that touch the ranges."""
        self.tell("push", **f.push)
        touched = [c for c in f.chunks if any(c[0] < a + n and a < sum(c) for a, n in ranges)]
        f.unsent += [chunk for chunk in touched if chunk not in f.unsent]

    def send_data(self, f: Fragment, now: float) -> None:
        """Sends a chunk; at most 64 KiB or one is under way, which is always allowed (§6, §14)."""
        under_way = self.sent - self.known if now < self.moved_at + 5 else 0
        ready = f.unsent and now > self.paid_at and self.subscribed == set(self.uplinks)
        if ready and (not under_way or under_way + len(f.chunks[f.unsent[0]]) <= 65536):
            payload = f.chunks[chunk := f.unsent.pop(0)]
            self.sent, self.moved_at = self.sent + len(payload), now
            header = [PROTOCOL, self.run_id, self.epoch, PUSH, self.name, self.incarnation, f.index]
            header += [f.push["base_version"], f.push["push_id"], *chunk, INT4, digest(payload)]
            self.send(self.uplinks[0], b"u", seal([*header, 0, 0, self.sent]), payload)

    def receive(self, socket: Any, frames: list[bytes], now: float) -> None:
        back = -(sum(len(frame) + 9 for frame in frames) // -2896) * 66  # TCP's acknowledgements
        self.charge(min(back, self.rate / 16 * (now - self.came_at)), now)
        self.came_at = now
        try:
            if socket in self.uplinks:
                self.subscribed.add(socket)
            elif socket is self.control:
                self.on_control(unseal(frames[0]), now)
            else:
                self.on_data(unseal(frames[1]), frames[2], now)
        except Exception as error:  # whatever a bad message raises
            text = f"minimal_learner: dropped a message of the broker: {error!r}"
            print(text, file=sys.stderr) if self.run_id else stop(3, text)

    def run(self, step_s: float, join_timeout_s: float) -> None:
        """Trains until the run has ended (§10)."""
        ready = ended = False
        while not ended:
            for socket in (s for s, _ in self.poller.poll(2) if not s.closed):  # by dial()
                self.receive(socket, socket.recv_multipart(), time.monotonic())
            now = time.monotonic()
            silent_s, ending = now - self.heard_at, self.phase in ("ending", "ended")
            if silent_s > (60 if ending else np.inf if self.run_id else join_timeout_s):
                why = "unfinished" if ending else "broker_unreachable"
                stop(4, f"{why}: nothing heard from {self.host}:{self.port} for {silent_s:.0f} s")
            if silent_s > 4 if self.joined else now - self.asked_at > self.redial_s:
                self.dial(now)
            elif not self.joined and now >= self.hello_at:
                self.hello(now)
            if self.joined:
                self.ask(now)
                for index, base, attempt, _ in self.rounds:
                    self.answer(self.fragments[index], base, attempt, now)
                for f in self.fragments:
                    self.send_data(f, now)
                held = all(0 <= f.version >= f.newest for f in self.fragments)
                ready, ended = ready or held, held and self.phase == "ended"
                if ended or now - self.reported_at >= (0.05 if self.news else 1):
                    self.reported_at, self.news = now, False
                    told = [sum(self.steps - f.since for f in self.fragments), *self.fates.values()]
                    m: Message = {"received": self.received, "up_bits_per_s": self.rate}
                    m |= {"step": self.steps, "tokens": self.steps, "step_s": self.step_s}
                    self.tell("report", **m, ledger=[self.steps, *told, 0], loss=None)
            offline = self.run_id and 0 < self.settings["max_offline_s"] < silent_s
            if ready and not ending and not offline and now >= self.stepped_at + step_s:
                self.flat *= np.float32(0.999)  # the step, of one token
                self.step_s += (now - self.stepped_at - self.step_s) / 10 if self.steps else 0
                self.steps, self.stepped_at, self.news = self.steps + 1, now, True
        self.tell("bye", reason="the run has ended")
        self.context.destroy(linger=1000)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A Narrows learner, written from PROTOCOL.md.")
    parser.add_argument("--broker", required=True, help="tcp://HOST:PORT")
    parser.add_argument("--name", required=True, help="unique in the run")
    parser.add_argument("--layout", required=True, type=argparse.FileType(), help="a layout file")
    parser.add_argument("--step-s", type=float, default=0.02, help="least seconds of a step")
    parser.add_argument("--join-timeout-s", type=float, default=60)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, lambda *_: stop(130, "stopped by Ctrl-C"))
    learner = Learner(options.broker, options.name, json.load(options.layout))
    learner.run(options.step_s, options.join_timeout_s)
    for f in learner.fragments:
        end = {"fragment": f.index, "version": f.version, "digest": f"{digest(f.copy.data):016x}"}
        print(json.dumps({**end, "merged": len(f.merged)}))
