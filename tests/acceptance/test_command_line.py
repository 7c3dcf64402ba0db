"""Every end of a command has its exit code, and a failure says in one line what is wrong."""

from __future__ import annotations

import json
import re
import signal
import socket
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from acceptance.kit import Answer, Ports, Site, metadata

LOGGED = re.compile(r"\d{4}-\d\d-\d\d ")


def check(answer: Answer, code: int, *words: str) -> None:
    """Checks the exit code, and that the complaint is one line with these words."""
    assert answer.code == code, answer.out + answer.err
    said = [line for line in answer.err.splitlines() if not LOGGED.match(line)]
    assert len(said) == 1 and said[0].startswith("narrows: "), answer.err
    assert all(word in said[0] for word in words), said


def test_a_script_says_what_is_wrong_and_with_which_code(site: Site) -> None:
    with closing(Ports()) as unused, socket.create_server(("127.0.0.1", 0)) as mute:
        nowhere = f"tcp://127.0.0.1:{unused.first}"
        helping = site.shell("help", "narrows", "--help")
        script = site.shell("status", "narrows", "status", nowhere, "--timeout-s", "0.1")
        silent = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        waiting = site.shell("waiting", "narrows", "status", silent)
        mute.accept()[0].close()
        waiting.ps.send_signal(signal.SIGINT)
        waiting.ends(130)
        check(Answer(130, "", waiting.log), 130, "interrupted")
        learner = site.learner("a", broker=nowhere, join_timeout_s=0.1)
        learner.ends(4)
        assert f"no broker answered at {nowhere}" in learner.log
        script.ends(4)
        check(Answer(4, "", script.log), 4, f"{nowhere} did not answer")
    check(site.ask("broker", "--set", "merge.quorun=2"), 2, "did you mean merge.quorum")
    assert not (site.folder / "runs").exists()
    assert site.tell("--version").strip() == version("narrows")
    helping.ends(0)
    commands = set(re.findall(r"^│ ([a-z]+) ", helping.log, re.MULTILINE))
    assert commands >= {"broker", "learner", "status", "journal", "export", "relay", "keys"}
    assert "Exit codes: 0 ok, 1 failure, 2 usage" in helping.log


def test_a_run_is_shown_exported_and_replayed(site: Site, data: Path) -> None:
    broker, learner = site.broker("fragments.count=2"), site.learner("a", width=16)
    site.merge(4)
    table, status = site.tell("status", site.address), site.status()
    assert status["run_id"] in table and re.search(r"^a +training ", table, re.M)
    assert status["learners"]["a"]["contributions"] > 0 and status["merges"] >= 4

    place, elsewhere = str(site.state), str(site.folder / "other")
    second = site.ask("broker", "--listen", "tcp://127.0.0.1:0", "--state-dir", place)
    check(second, 1, "is in use")
    third = site.ask("broker", "--listen", site.address, "--state-dir", elsewhere)
    check(third, 1, f"cannot listen on {site.address}", "is a broker running already?")
    other = f"learner --broker {site.address} --name b --preset nano --data {data}"
    check(site.ask(*other.split()), 3, "is not the run's: 'weight' is missing")

    learner.kill()
    broker.stop()
    exported, durable = site.export(), site.journal()
    shapes = {name: list(one.shape) for name, one in exported.items()}
    assert shapes == {"weight": [16, 16], "bias": [16]}
    told = metadata(site.folder / "export.safetensors")
    newest = [max(v for g, v in durable if g == f) for f in range(2)]
    assert told["narrows.run"] == status["run_id"]
    assert json.loads(told["narrows.versions"]) == newest
    site.check_run("a")
    for path in site.state.glob("fragments/*"):
        path.write_bytes(path.read_bytes()[:-1])
    check(site.ask("export", place, "--to", "x"), 1, "is damaged", place)
