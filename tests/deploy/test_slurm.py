"""The jobs of deploy/slurm on a real Slurm of one node: submitted, requeued, trained."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from narrows.bench.kit.processes import LOOPBACK, three_ports, wait_until

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "slurm"
DAEMONS = ("munged", "slurmctld", "slurmd")
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"

WAIT_S = 120.0
"""Slurm looks at its queue each half minute, and a job that is requeued waits for its old key."""

CONFIG = """
ClusterName=test
SlurmctldHost={host}({loopback})
SlurmctldPort={ctld}
SlurmdPort={slurmd}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=20
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/slurmd
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5,bf_interval=5
GresTypes=gpu
MpiDefault=none
NodeName={host} NodeAddr={loopback} CPUs=32 RealMemory=100000 Gres=gpu:4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(500),
    pytest.mark.skipif(
        os.getuid() != 0 or any(shutil.which(name, path=PATH) is None for name in DAEMONS),
        reason="needs root and Debian's munge, slurmctld, slurmd and slurm-client",
    ),
]


class Slurm:
    """A Slurm of one node, and a folder in which jobs are submitted."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder / "jobs"
        self.folder.mkdir()
        self._environment = os.environ | {
            "PATH": PATH, "SLURM_CONF": f"{folder}/slurm.conf", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        folder.chmod(0o755)
        ports = stack.enter_context(three_ports(LOOPBACK))
        host = socket.gethostname().partition(".")[0]
        text = CONFIG.format(
            host=host, loopback=LOOPBACK, ctld=ports, slurmd=ports + 1, folder=folder
        )
        (folder / "slurm.conf").write_text(text)
        for number in range(4):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
        (folder / "slurmd").mkdir()
        (folder / "ctld").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log",
                 "seed-file": "seed"}  # fmt: skip
        flags = [f"--{flag}={folder}/munge.{end}" for flag, end in files.items()]
        self._start(stack, "munged", "--foreground", "--force", *flags)
        wait_until((folder / "munge.socket").exists, "munge")
        self._start(stack, "slurmctld", "-D")
        self._start(stack, "slurmd", "-D", "-N", host)
        wait_until(lambda: "idle" in self.run("sinfo", "-h", "-o", "%T"), "a node", timeout_s=60)

    def _start(self, stack: ExitStack, *command: str) -> None:
        with (self.folder.parent / f"{command[0]}.out").open("wb") as log:
            daemon = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)
        stack.callback(daemon.wait, 30)
        stack.callback(daemon.terminate)

    def run(self, *command: str) -> str:
        """The output of a command of Slurm, or the reason why it failed."""
        done = subprocess.run(
            command, capture_output=True, text=True, env=self._environment, cwd=self.folder
        )
        return done.stdout + done.stderr

    def submit(self, job: str, *given: str, **variables: str) -> str:
        """Submits a job of deploy/slurm; returns its number."""
        self._environment |= variables
        options = [each for each in given if each.startswith("--job-name")]
        script = shutil.copy(JOBS / job, self.folder)
        arguments = [each for each in given if each not in options]
        told = self.run("sbatch", "--parsable", *options, str(script), *arguments)
        assert told.strip().isdigit(), told
        return told.strip()

    def state(self, job: str) -> str:
        """RUNNING, COMPLETED and so on."""
        return self.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with ExitStack() as stack:
        made = Slurm(tmp_path, stack)
        yield made
        made.run("scancel", "--user=root")
        wait_until(lambda: not made.run("squeue", "-h").strip(), "an empty queue", timeout_s=60)


def test_a_broker_and_learners_are_submitted_requeued_and_train(slurm: Slurm) -> None:
    (slurm.folder / "broker.toml").write_text(
        "[broker]\ninsecure = true\n[fragments]\nsync_period_steps = 4\n"
    )
    with three_ports(LOOPBACK) as port:
        broker = slurm.submit("broker.sh", NARROWS_PORT=str(port))
        wait_until(lambda: "serving on" in slurm.log("narrows-broker"), "it serves", timeout_s=90)
        jobs = {
            name: slurm.submit(
                "learner.sh", f"--job-name={name}", "--preset", "nano", "--step-wait-s", "0.1"
            )
            for name in ("site-a", "site-b")
        }

        def rounds() -> list[dict[str, object]]:
            told = slurm.run("narrows", "journal", "show", "state", "--json")
            return [json.loads(line) for line in told.splitlines() if line.startswith("{")]

        def both_in(after: int) -> bool:
            newest = [str(each["contributors"]) for each in rounds()[after:]]
            return all(any(name in each for each in newest) for name in jobs)

        pause = threading.Event()

        def wait(condition: object, what: str) -> None:
            for _ in range(int(WAIT_S)):
                if callable(condition) and condition():
                    return
                pause.wait(1.0)
            raise AssertionError(f"no {what}: {slurm.run('squeue')} {slurm.log('narrows-broker')}")

        wait(lambda: both_in(0), "pushes of both")
        slurm.run("scontrol", "requeue", broker)
        wait(lambda: slurm.log("narrows-broker").count("serving on") == 2, "second life")
        log = slurm.log("narrows-broker")
        assert "everything is durable" in log.partition("serving on")[2]
        before = len(rounds())
        wait(lambda: both_in(before), "pushes of both to the second life")
        slurm.run("scontrol", "requeue", jobs["site-b"])
        wait(lambda: slurm.log("site-b").count("admitted") >= 2, "second life of site-b")
        before = len(rounds())
        wait(lambda: both_in(before), "pushes of both after that")
        for job in (*jobs.values(), broker):
            slurm.run("scancel", job)
        wait(lambda: not slurm.run("squeue", "-h").strip(), "an empty queue")
        told = slurm.run("narrows", "journal", "audit", "state")
        assert "rounds are in order" in told and "problems" not in told, told
