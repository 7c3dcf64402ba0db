"""A laboratory line: network namespaces around a bridge; the kernel holds the rate of each link.

There is one namespace for the broker (the hub), one per learner, and one for the bridge that joins
them. A veth pair leads from each site to the bridge, with a token bucket (`tc tbf`) at both ends,
so that both directions are capped. Bytes are those that the queues let go: whole frames of any
sender.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from narrows.bench.kit.qdisc import QueueCounters
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError

Direction: TypeAlias = Literal["up", "down"]
"""Direction as the site sees it: a site sends up."""

PREFIX: Final = "narrows-lab"
"""Namespaces are PREFIX-PID-SITE, so that those of a process that was killed can be removed."""

SAMPLE_S: Final = 0.1
WINDOW_SAMPLES: Final = 10
"""Samples of a sliding window of one second."""

READ_S: Final = 0.001
READS_MAX: Final = 5
"""Tries to read the counters within READ_S."""

BURST_S: Final = 0.001
BURST_BYTES_MIN: Final = 15_140
"""Smallest size of a token bucket. The size is a millisecond of the rate, and ten frames at
least."""

QUEUE_S: Final = 0.05
"""Longest queue in front of a link, as in a router with a modest buffer. More is dropped."""


@dataclass(frozen=True)
class LabSite:
    """One place on the line."""

    name: str
    """hub, or l0, l1, ...; also the name of its port at the bridge."""
    namespace: str
    address: str
    """IPv4, reachable from every other site."""

    @property
    def under(self) -> tuple[str, ...]:
        """The command under which a process runs at this site."""
        return ("ip", "netns", "exec", self.namespace)


class Lab:
    """Sites and links for as long as the block lasts.

    Raises ConfigError without root or iproute2, NarrowsError if the kernel refuses a part of it.
    """

    def __init__(
        self, learners: int, rate_bits_per_s: float, *, hub_rate_bits_per_s: float = 0.0
    ) -> None:
        """`rate_bits_per_s` holds per learner and direction; 0: unlimited. The hub has the rate of
        all learners together, or `hub_rate_bits_per_s`."""
        self._run = f"{PREFIX}-{os.getpid()}"
        self._rate = rate_bits_per_s
        self._hub_rate = hub_rate_bits_per_s or learners * rate_bits_per_s
        self.hub = self._site("hub", 1)
        self.learners = [self._site(f"l{index}", 10 + index) for index in range(learners)]
        self._bridge = f"{self._run}-bridge"
        self._undo = ExitStack()

    def __enter__(self) -> Lab:
        check_able()
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def meter(self) -> Meter:
        """Counts at every link while the block lasts."""
        sites = (self.hub, *self.learners)
        own = {site.name: QueueCounters(site.namespace) for site in sites}
        return Meter(QueueCounters(self._bridge), own)

    def _site(self, name: str, number: int) -> LabSite:
        return LabSite(name, f"{self._run}-{name}", f"10.77.0.{number}")

    def _build(self) -> None:
        self._add_namespace(self._bridge)
        _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "bridge", "up")
        for site in (self.hub, *self.learners):
            self._add_namespace(site.namespace)
            self._join(site, self._hub_rate if site is self.hub else self._rate)

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._undo.callback(_remove, name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _join(self, site: LabSite, rate_bits_per_s: float) -> None:
        port, bridge = site.name, self._bridge
        _ip("-n", bridge, "link", "add", port, "type", "veth",
            "peer", "name", "eth0", "netns", site.namespace)  # fmt: skip
        _ip("-n", bridge, "link", "set", port, "master", "bridge")
        _ip("-n", site.namespace, "address", "add", f"{site.address}/24", "dev", "eth0")
        for namespace, device in ((bridge, port), (site.namespace, "eth0")):
            queue = ("tbf", *_bucket(rate_bits_per_s)) if rate_bits_per_s else ("pfifo",)
            _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *queue)
            _ip("-n", namespace, "link", "set", device, "up")


def congestion_control() -> str:
    """The kernel's congestion control for TCP. A namespace cannot choose another, so results name
    it."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def check_able() -> None:
    """Raises ConfigError, with the remedy, where a lab cannot be built."""
    if os.geteuid() != 0:
        raise ConfigError(
            "the lab makes network namespaces",
            expected="to run as root",
            got=f"user {os.geteuid()}",
            remedy="run it with sudo, or in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN",
        )
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise ConfigError(
                f"the lab needs `{program}`", remedy="install iproute2 (apt install iproute2)"
            )


def remove_leftovers() -> None:
    """Removes the namespaces of labs whose process is gone, and ends what runs in them."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        pid = name.removeprefix(f"{PREFIX}-").split("-")[0]
        if name.startswith(f"{PREFIX}-") and not _is_alive(pid):
            _remove(name)


def _is_alive(pid: str) -> bool:
    """True for a live process. A zombie is not alive: in a container without init it stays for
    ever."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _remove(name: str) -> None:
    """Removes a namespace. It lives as long as a process in it, but nobody finds it without its
    name."""
    for left in _ip("netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(left), signal.SIGKILL)
    _ip("netns", "delete", name)


def _bucket(rate_bits_per_s: float) -> tuple[str, ...]:
    rate_bytes_per_s = rate_bits_per_s / 8
    burst = max(BURST_BYTES_MIN, int(rate_bytes_per_s * BURST_S))
    limit = max(4 * BURST_BYTES_MIN, int(rate_bytes_per_s * QUEUE_S))
    return ("rate", f"{rate_bits_per_s:.0f}bit", "burst", str(burst), "limit", str(limit))


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise NarrowsError(
            ErrorCode.MISUSE,
            "the lab could not be built",
            expected=" ".join(command),
            got=result.stderr.strip() or f"exit code {result.returncode}",
            remedy="does the kernel have network namespaces, veth, bridge and sch_tbf?",
        )
    return result.stdout


@dataclass(frozen=True)
class Rates:
    """Traffic of one direction of one site while a meter ran."""

    wire_bytes: int
    mean_bits_per_s: float
    windows_bits_per_s: Sequence[float]
    """Rate in every window of a second, one window per SAMPLE_S; empty if the meter ran for
    less."""

    @property
    def peak_bits_per_s(self) -> float:
        return max(self.windows_bits_per_s, default=self.mean_bits_per_s)


@dataclass
class _Track:
    """Samples of one namespace's counters, with the time of each."""

    counters: QueueCounters
    samples: list[tuple[float, Mapping[str, int]]] = field(
        default_factory=list[tuple[float, Mapping[str, int]]]
    )

    def sample(self) -> None:
        """Takes the quickest of a few reads. On a busy machine a read may be interrupted, and then
        nobody knows when the bytes were counted; 5 ms are half a percent of a window."""
        best: tuple[float, float, Mapping[str, int]] | None = None
        for _ in range(READS_MAX):
            before_s = time.monotonic()
            counts = self.counters.read()
            took_s = time.monotonic() - before_s
            if best is None or took_s < best[0]:
                best = took_s, before_s + took_s / 2, counts
            if took_s <= READ_S:
                break
        assert best is not None
        self.samples.append(best[1:])


class Meter:
    """Samples the links' counters on its own thread while the block lasts."""

    def __init__(self, bridge: QueueCounters, own: Mapping[str, QueueCounters]) -> None:
        """`own`: counters of each site's namespace, which count the bytes that the site sends."""
        self._bridge = _Track(bridge)
        self._own = {name: _Track(counters) for name, counters in own.items()}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)

    def __enter__(self) -> Meter:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.sample()
        for track in (self._bridge, *self._own.values()):
            track.counters.close()

    def rates(
        self, site: str, direction: Direction, *, since_s: float = 0.0, until_s: float = 1e18
    ) -> Rates:
        """Rates of a site, from the last sample before `since_s` to the first one after
        `until_s` (time.monotonic): a late sample hides no bytes."""
        track, device = (self._own[site], "eth0") if direction == "up" else (self._bridge, site)
        times_s = [at for at, _ in track.samples]
        start = max(0, bisect_right(times_s, since_s) - 1)
        end = bisect_left(times_s, until_s) + 1
        samples = [(at, each[device]) for at, each in track.samples[start:end]]
        if len(samples) < 2:
            return Rates(0, 0.0, ())
        windows = zip(samples, samples[WINDOW_SAMPLES:], strict=False)
        (first_s, first), (last_s, last) = samples[0], samples[-1]
        return Rates(
            last - first,
            8 * (last - first) / (last_s - first_s),
            [8 * (b - a) / (b_s - a_s) for (a_s, a), (b_s, b) in windows],
        )

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._over.is_set():
            # A late thread does not catch up: windows would be shorter than a second.
            due_s = max(due_s, time.monotonic()) + SAMPLE_S
            self._over.wait(max(0.0, due_s - time.monotonic()))
            self.sample()

    def sample(self) -> None:
        """Reads the counters now. A short measurement needs one such read at its start and one at
        its end."""
        with self._lock:
            for track in (self._bridge, *self._own.values()):
                track.sample()
