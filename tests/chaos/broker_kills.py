"""A real broker, killed hundreds of times under load; every version that a learner saw must
survive.

`python tests/chaos/broker_kills.py 500` prints the numbers (make chaos-broker). The learners are
threads of this process with real sockets; they live through every kill.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from running import LAYOUT, ToyHost, vector

from narrows.bench.kit.evidence import installed, read_evidence
from narrows.bench.kit.processes import free_ports
from narrows.broker.merging.model import warm_up
from narrows.broker.process.crash_points import NAMES, VARIABLE
from narrows.broker.storage.audit import Audit
from narrows.learner.transport.client import Client
from narrows.learner.transport.options import ClientOptions

LEARNERS = ("a", "b", "c")
STEP_S = 0.004
PATIENCE_S = 180.0
COMPARED_LIFE_S = 6.0
"""Time between two kills, where training with and without kills is compared."""

SETTINGS = {
    "fragments.count": "2",
    "fragments.sync_period_steps": "4",
    "broker.beat": "50ms",
    "broker.checkpoint_versions": "40",
    "broker.journal_keep": "true",
    "broker.journal_segment": "64KiB",
    "run.max_offline": "0",
}


@dataclass
class Result:
    """Counts of the kills and of the checks after them."""

    kills: int = 0
    kills_by_place: dict[str, int] = field(default_factory=dict[str, int])
    versions_seen: int = 0
    """Different (fragment, version) pairs that a learner installed."""
    versions_lost: int = 0
    """Versions that a learner saw, but that the journal lacks or has with another digest."""
    pushes_merged_twice: int = 0
    rounds: int = 0
    lives: int = 0
    final_equals_replay: bool = False
    problems: list[str] = field(default_factory=list[str])
    restart_to_merge_s: float = 0.0
    """Median time from the start of a process to the next version that a learner installed."""
    steps: int = 0
    steps_per_s: float = 0.0
    seconds: float = 0.0


class Learners:
    """Threads that train toys until they are stopped."""

    def __init__(self, address: str, folder: Path) -> None:
        self.steps = 0
        self.errors: list[BaseException] = []
        self.seen_files = [folder / f"{name}.jsonl" for name in LEARNERS]
        self.ledgers: dict[str, dict[str, int]] = {}
        self._stop = threading.Event()
        self.joined: list[Client] = []
        self._threads = [
            threading.Thread(target=self._train, args=(address, name, seed, path))
            for seed, (name, path) in enumerate(zip(LEARNERS, self.seen_files, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def _train(self, address: str, name: str, seed: int, path: Path) -> None:
        host = ToyHost(vector(seed))
        try:
            learner = Client(
                ClientOptions(
                    broker=address, name=name, layout=LAYOUT, frozen_digest=0, host=host,
                    join_timeout_s=PATIENCE_S, events=path,
                )
            )  # fmt: skip
            learner.start()
            self.joined.append(learner)
            while not self._stop.wait(STEP_S):
                host.step(0.01)
                host.x += np.float32(0.01)  # Never at rest: every push says something.
                learner.boundary(10, 1.0)
                self.steps += 1
            self.ledgers[name] = learner.stats()["ledger"]
            learner.abort()
        except BaseException as error:
            self.errors.append(error)

    def installed(self) -> int:
        """Sum of the newest versions held, over learners and fragments."""
        return sum(sum(c.background.session.fragments.held) for c in list(self.joined))

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def start(folder: Path, port: int, log: IO[bytes], crash_at: str) -> subprocess.Popen[bytes]:
    settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    command = [
        sys.executable, "-m", "narrows", "broker", "--listen", f"tcp://127.0.0.1:{port}",
        "--state-dir", str(folder / "state"), *settings,
    ]  # fmt: skip
    one = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    environment = os.environ | one | ({VARIABLE: crash_at} if crash_at else {})
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def run(
    kills: int,
    seed: int,
    folder: Path,
    *,
    quiet: bool = True,
    life_s: float = 0.0,
    last_life_s: float = 0.0,
) -> Result:
    """Kills a broker `kills` - 1 times, at named places and at random instants. A life lasts for
    about `life_s` or less, the last one for `last_life_s`."""
    warm_up()  # A broker that is killed while it compiles its kernels would compile them for ever.
    rng, result, places = random.Random(seed), Result(), Counter[str]()
    port, began = free_ports(), time.monotonic()
    waits: list[float] = []
    with (folder / "broker.log").open("ab") as log:
        broker = start(folder, port, log, "")
        learners = Learners(f"tcp://127.0.0.1:{port}", folder)
        _wait_for_progress(learners, broker, 0)
        # One that joins only now and then would still be waiting when the last life is over.
        _wait_for(lambda: len(learners.joined) == len(LEARNERS), learners, broker)
        broker.kill()
        broker.wait()
        for number in range(1, kills + 1):
            last = number == kills
            place = "" if last or life_s else rng.choice(("random", "random", *NAMES))
            visit = rng.randint(1, 6) if place in ("checkpoint_begun", "journal_cut") else 0
            visit = visit or rng.randint(1, 120)
            at = f"{place}:{visit}" if place in NAMES else ""
            before, started = learners.installed(), time.monotonic()
            broker = start(folder, port, log, at)
            if place in NAMES:
                _wait_for_death(broker, rng)
            else:
                _wait_for_progress(learners, broker, before)
                waits.append(time.monotonic() - started)
                threading.Event().wait(last_life_s if last else life_s or rng.uniform(0.0, 0.5))
            if broker.poll() is None and not last:
                broker.kill()
            if not last:
                broker.wait()
                places[place] += 1
                result.kills += 1
            if not quiet and number % 25 == 0:
                print(f"{number} of {kills}, {time.monotonic() - began:.0f} s", flush=True)
        result.seconds = time.monotonic() - began
        broker.send_signal(signal.SIGTERM)
        code = broker.wait(30)
        assert code == 0, f"it ended with {code}: {(folder / 'broker.log').read_text()[-2000:]}"
        learners.stop()
    result.steps, result.kills_by_place = learners.steps, dict(places)
    result.steps_per_s = learners.steps / result.seconds
    result.restart_to_merge_s = median(waits)
    result.problems += [str(error) for error in learners.errors]
    check(folder, learners, result)
    return result


def _wait_for_progress(learners: Learners, broker: subprocess.Popen[bytes], before: int) -> None:
    _wait_for(lambda: learners.installed() > before, learners, broker)


def _wait_for(
    condition: Callable[[], bool], learners: Learners, broker: subprocess.Popen[bytes]
) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert broker.poll() is None, f"the broker ended with {broker.returncode}"
        assert not learners.errors, learners.errors
        assert time.monotonic() < deadline, "no learner joins, or no new version"
        threading.Event().wait(0.01)


def _wait_for_death(broker: subprocess.Popen[bytes], rng: random.Random) -> None:
    """Waits for the death at a named place, but not for ever: some places are rarely visited."""
    try:
        broker.wait(rng.uniform(2.0, 4.0))
    except subprocess.TimeoutExpired:
        return


def check(folder: Path, learners: Learners, result: Result) -> None:
    """Compares the journal with what learners saw, and its replay with the last checkpoint."""
    evidence = read_evidence(folder / "state", fragments=2)
    audit, seen = evidence.audit, installed(learners.seen_files)
    result.versions_seen = len(seen)
    result.versions_lost = sum(
        digests != {evidence.digests.get(key)} for key, digests in seen.items()
    )
    result.pushes_merged_twice = sum("second time" in problem for problem in audit.problems)
    result.rounds, result.lives = audit.rounds, len(audit.epochs)
    result.problems += [*audit.problems, *unbalanced(audit, learners.ledgers)]
    result.final_equals_replay = evidence.replay_equal


def unbalanced(audit: Audit, ledgers: dict[str, dict[str, int]]) -> Iterator[str]:
    """Learners whose ledger of merged tokens does not agree with the journal.

    A learner may not have heard of the last merge yet. Its tokens are pending there.
    """
    for name, ledger in sorted(ledgers.items()):
        merged = sum(tokens for (who, _, _), tokens in audit.tokens.items() if who == name)
        fates = {key: value for key, value in ledger.items() if key != "logged"}
        if not ledger["merged"] <= merged <= ledger["merged"] + ledger["pending"]:
            yield f"{name}: {merged} tokens merged in the journal, its ledger says {ledger}"
        if sum(fates.values()) != 2 * ledger["logged"]:
            yield f"{name}: not every token has one fate: {ledger}"


def compare(kills: int, seed: int) -> int:
    """The same training with and without kills: throughput of the learners, laws of the ledger."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("killed", kills + 1), ("quiet", 1)):
            place = Path(folder) / name
            place.mkdir()
            last_life_s = 0.0 if results == [] else results[0].seconds
            result = run(count, seed, place, life_s=COMPARED_LIFE_S, last_life_s=last_life_s)
            results.append(result)
    killed, quiet = results
    share = killed.steps_per_s / quiet.steps_per_s
    print(f"{killed.kills} kills in {killed.seconds:.0f} s: {share:.1%} of the steps per second")
    print(f"from a start to the next version: {killed.restart_to_merge_s:.2f} s (median)")
    for result in results:
        print(f"{result.rounds} rounds, {result.versions_seen} versions seen, {result.problems}")
    return int(any(result.problems or result.versions_lost for result in results))


def main(kills: int, seed: int) -> int:
    """Exit code 0 if nothing was lost."""
    logging.getLogger("narrows").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        result = run(kills, seed, Path(folder), quiet=False)
    for name, value in asdict(result).items():
        print(f"{name:22s} {value}")
    is_well = result.final_equals_replay and not result.versions_lost and not result.problems
    print("nothing was lost" if is_well else "SOMETHING WAS LOST")
    return 0 if is_well else 1


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        logging.getLogger("narrows").setLevel(logging.ERROR)
        sys.exit(compare(20, 1))
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
