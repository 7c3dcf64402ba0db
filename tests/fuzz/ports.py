"""Made-up connections to the ports of a real broker: `python tests/fuzz/ports.py` (make fuzz).

After each round of connections the broker must be up, within its memory, and answer: an honest
member gets a whole state whose digest fits, and another learner is let in.
"""

from __future__ import annotations

import argparse
import socket
import struct
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.run import PORTS_NAME, Figures, add_to
from fuzz.sessions import GREETING, Connection, connection
from peer import Peer

from narrows.bench.kit.processes import Processes
from narrows.proto import messages as msg

ROUND = 100
"""Connections between two looks at the broker."""

OPEN_MAX = 30
"""Connections that stay open at the same time."""

GROWTH_MB = 200
"""Memory that a broker may take beyond that of its start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="the first connection's number")
    parser.add_argument("--report", type=Path, help="JSON file that the figures are added to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="narrows-fuzz-") as folder:
        figures = besiege(Path(folder), seconds=60 * arguments.minutes, seed=arguments.seed)
    print(f"{PORTS_NAME}: {figures}")
    if arguments.report:
        add_to(arguments.report, PORTS_NAME, figures)


def besiege(folder: Path, *, seconds: float, seed: int = 0, rounds_max: int = 1 << 30) -> Figures:
    """Makes connections for a time. Raises AssertionError once the broker does not stand it."""
    figures, started = Figures(), time.monotonic()
    with Processes(folder) as processes:
        address = processes.start_broker(
            "--listen", "tcp://127.0.0.1:0", "--state-dir", str(folder / "state"),
            "--set", "fragments.count=2", "--set", "wan.streams=1", "--set", "broker.beat=100ms",
            "--set", "liveness.late=5min", "--set", "liveness.lost=10min",
        )  # fmt: skip
        pid = processes.running["broker"].pid
        with Peer(address, "honest") as honest:
            honest.join()
            honest.found()
            assert honest.welcome is not None
            ports = {
                "control": int(address.rsplit(":", 1)[1]),
                "uplink": honest.welcome.uplink_port, "downlink": honest.welcome.downlink_port,
            }  # fmt: skip
            at_start_mb = resident_mb(pid)
            for number in range(rounds_max):
                first = seed + number * ROUND
                for each in range(first, first + ROUND):
                    speak(ports, connection(each, honest))
                figures.inputs += ROUND
                look(processes, honest, address, f"connections {first} to {first + ROUND - 1}")
                figures.resident_mb = max(figures.resident_mb, resident_mb(pid))
                grown_mb = figures.resident_mb - at_start_mb
                assert grown_mb < GROWTH_MB, f"the broker grew by {grown_mb} MB"
                if time.monotonic() - started > seconds:
                    break
    spent_s = time.monotonic() - started
    figures.minutes = round(spent_s / 60, 2)
    figures.inputs_per_s = round(figures.inputs / spent_s, 1)
    return figures


_open: list[socket.socket] = []


def speak(ports: dict[str, int], said: Connection) -> None:
    """Says it all, and listens to no more than the greeting. Some connections stay open for a
    while, others end by a reset."""
    # The broker may hang up in the middle.
    with suppress(ConnectionError, TimeoutError):
        line = socket.create_connection(("127.0.0.1", ports[said.port]), timeout=1.0)
        _open.append(line)
        if said.is_greeting:
            line.sendall(GREETING)
            read(line, len(GREETING))
        line.sendall(said.data[len(GREETING) if said.is_greeting else 0 :])
    while len(_open) > OPEN_MAX:
        oldest = _open.pop(0)
        if len(_open) % 2:
            oldest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        oldest.close()


def read(line: socket.socket, count: int) -> None:
    """Reads so many bytes, fewer if the broker hangs up."""
    while count > 0 and (piece := line.recv(count)):
        count -= len(piece)


def look(processes: Processes, honest: Peer, address: str, after: str) -> None:
    """The broker is up and serves, the member that it has and one more."""
    code = processes.running["broker"].poll()
    assert code is None, (
        f"after {after} the broker ended with {code}: {processes.tail('broker', 9)}"
    )
    assert len(honest.heads()) == 2, after
    with Peer(address, "another") as other:
        other.join()
        assert other.status().phase is msg.Phase.RUNNING, after
        other.send(msg.Bye("seen"))


def resident_mb(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 >> 20


if __name__ == "__main__":
    main()
