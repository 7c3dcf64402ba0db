"""Made-up connections to the ports of a real broker: `python tests/fuzz/ports.py` (make fuzz).

After each round of connections the broker must be up, within its memory, and answer: an honest
member gets a whole state whose digest fits, and another learner is let in.
"""

from __future__ import annotations

import argparse
import math
import socket
import struct
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.keyed import Keys, misbehave
from fuzz.run import PORTS_NAME, Figures, add_to
from fuzz.sessions import GREETING, Connection, Port, connection
from peer import Peer

from narrows.bench.kit.processes import Processes
from narrows.proto import messages as msg

ROUND = 100
"""Connections between two looks at the broker."""

OPEN_MAX = 30
"""Connections that stay open at the same time."""

INSIDER_EVERY = 10
"""With keys: connections of outsiders for each of the insider."""

QUOTA_S = 15.0
"""Time between two joins of one key that its quota stands for ever."""

GROWTH_MB = 200
"""Memory that a broker may take beyond that of its start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="the first connection's number")
    parser.add_argument("--keys", action="store_true", help="a broker with keys")
    parser.add_argument("--report", type=Path, help="JSON file that the figures are added to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="narrows-fuzz-") as folder:
        siege = Siege(Path(folder), keys=arguments.keys)
        figures = siege.run(seconds=60 * arguments.minutes, seed=arguments.seed)
    name = f"{PORTS_NAME} with keys" if arguments.keys else PORTS_NAME
    print(f"{name}: {figures}")
    if arguments.report:
        add_to(arguments.report, name, figures)


class Siege:
    """A broker process, an honest member of its run, and connections that nobody should make."""

    def __init__(self, folder: Path, *, keys: bool = False) -> None:
        self._folder = folder
        self._keys = Keys(folder / "keys") if keys else None
        self._processes = Processes(folder)
        self._address = ""
        self._ports: dict[Port, int] = {}
        self._open: list[socket.socket] = []
        self._joined_at = -math.inf

    def run(self, *, seconds: float, seed: int = 0, rounds_max: int = 1 << 30) -> Figures:
        """Makes connections for a time. Raises AssertionError once the broker does not stand it."""
        figures, started = Figures(), time.monotonic()
        with self._processes, ExitStack() as sockets:
            sockets.callback(self._hang_up)
            self._start()
            with self._peer("honest") as honest, self._peer("insider") as insider:
                self._found(honest)
                at_start_mb = self._resident_mb()
                for number in range(rounds_max):
                    first = seed + number * ROUND
                    for each in range(first, first + ROUND):
                        self._speak(connection(each, honest, keys=self._keys is not None))
                        if self._keys and each % INSIDER_EVERY == 0:
                            misbehave(each, insider, honest, self._ports)
                    figures.inputs += ROUND
                    self._look(honest, f"connections {first} to {first + ROUND - 1}")
                    figures.resident_mb = max(figures.resident_mb, self._resident_mb())
                    grown_mb = figures.resident_mb - at_start_mb
                    assert grown_mb < GROWTH_MB, f"the broker grew by {grown_mb} MB"
                    if time.monotonic() - started > seconds:
                        break
        spent_s = time.monotonic() - started
        figures.minutes = round(spent_s / 60, 2)
        figures.inputs_per_s = round(figures.inputs / spent_s, 1)
        return figures

    def _hang_up(self) -> None:
        for each in self._open:
            each.close()

    def _start(self) -> None:
        keys: tuple[str, ...] = ()
        if self._keys:
            keys = ("--keys", str(self._keys.directory), "--set", "run.founder=honest")
        self._address = self._processes.start_broker(
            "--listen", "tcp://127.0.0.1:0", "--state-dir", str(self._folder / "state"),
            "--set", "fragments.count=2", "--set", "wan.streams=1", "--set", "broker.beat=100ms",
            "--set", "liveness.late=5min", "--set", "liveness.lost=10min",
            *keys,
        )  # fmt: skip

    def _peer(self, name: str) -> Peer:
        if self._keys:
            return self._keys.peer(self._address, name)
        return Peer(self._address, name)

    def _found(self, honest: Peer) -> None:
        honest.join()
        honest.found()
        assert honest.welcome is not None
        self._ports = {
            "control": int(self._address.rsplit(":", 1)[1]),
            "uplink": honest.welcome.uplink_port, "downlink": honest.welcome.downlink_port,
        }  # fmt: skip

    def _speak(self, said: Connection) -> None:
        """Says it all, and listens to no more than the greeting. Some connections stay open for a
        while, others end by a reset."""
        # The broker may hang up in the middle.
        with suppress(ConnectionError, TimeoutError):
            line = socket.create_connection(("127.0.0.1", self._ports[said.port]), timeout=1.0)
            self._open.append(line)
            begun = len(GREETING) if said.is_greeting else 0
            line.sendall(said.data[:begun])
            read(line, begun)
            line.sendall(said.data[begun:])
        while len(self._open) > OPEN_MAX:
            oldest = self._open.pop(0)
            if len(self._open) % 2:
                oldest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            oldest.close()

    def _look(self, honest: Peer, after: str) -> None:
        """The broker is up, serves the member that it has, and lets another one in. With keys there
        are quotas: then it sends no states, and lets one in now and then."""
        code = self._processes.running["broker"].poll()
        tail = self._processes.tail("broker", 9)
        assert code is None, f"after {after} the broker ended with {code}: {tail}"
        if time.monotonic() < self._joined_at + (QUOTA_S if self._keys else 0.0):
            return
        self._joined_at = time.monotonic()
        if not self._keys:
            assert len(honest.heads()) == 2, after
        assert honest.status().phase is msg.Phase.RUNNING, after
        with self._peer("another") as other:
            other.join()
            other.send(msg.Bye("seen"))

    def _resident_mb(self) -> int:
        pid = self._processes.running["broker"].pid
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20


def read(line: socket.socket, count: int) -> None:
    """Reads so many bytes, fewer if the broker hangs up."""
    while count > 0 and (piece := line.recv(count)):
        count -= len(piece)


if __name__ == "__main__":
    main()
