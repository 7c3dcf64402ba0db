"""Every end of a command has its exit code, and a failure says in one line what is wrong."""

from __future__ import annotations

import re
import signal
import socket
from contextlib import closing
from importlib.metadata import version

from acceptance.kit import Answer, Ports, Site, wait_until

LOGGED = re.compile(r"\d{4}-\d\d-\d\d ")

USAGE = [
    ("satus", "status"),
    ("broker --listne x", "--listen"),
    ("broker --set merge.quorun=2", "did you mean merge.quorum"),
    ("broker --set merge.quorum=many", "expected a whole number, got 'many'"),
    ("broker --listen nonsense", "expected tcp://HOST:PORT"),
    ("broker --config /nowhere/x.toml", "/nowhere/x.toml"),
    ("status nonsense", "expected tcp://HOST:PORT"),
    ("export /nowhere --to x", "/nowhere holds no run"),
    ("journal audit .", "holds no run"),
]


def check(answer: Answer, code: int, *words: str) -> None:
    """Checks the exit code, and that the complaint is one line with these words."""
    assert answer.code == code, answer.out + answer.err
    said = [line for line in answer.err.splitlines() if not LOGGED.match(line)]
    if said and said[0].startswith("╭"):  # The parser of the command line draws a box.
        said = ["narrows: " + " ".join(line.strip("│╭╮╰╯─ ") for line in said)]
    assert len(said) == 1 and said[0].startswith("narrows: "), answer.err
    assert all(word in said[0] for word in words), said


def test_wrong_usage_is_code_2_and_names_what_was_meant(site: Site) -> None:
    for line, word in USAGE:
        check(site.ask(*line.split()), 2, word)
    assert not [path for path in site.folder.iterdir() if not path.name.startswith("ask")]


def test_the_installed_script_helps_and_tells_its_version(site: Site) -> None:
    script, ask = site.shell("narrows", "--help"), site.ask("--version")
    assert (ask.code, ask.out.strip()) == (0, version("narrows"))
    script.ends(0)
    commands = set(re.findall(r"^│ ([a-z]+) ", script.log, re.MULTILINE))
    assert commands >= {"broker", "learner", "status", "journal", "export", "relay", "keys"}
    assert "Exit codes: 0 ok, 1 failure, 2 usage" in script.log


def test_nobody_there_is_code_4_and_ctrl_c_is_code_130(site: Site) -> None:
    with closing(Ports()) as unused, socket.create_server(("127.0.0.1", 0)) as mute:
        nowhere = f"tcp://127.0.0.1:{unused.first}"
        script = site.shell("narrows", "status", nowhere, "--timeout-s", "0.1")
        waiting = site.narrows("status", "status", f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        mute.accept()[0].close()
        waiting.send(signal.SIGINT)
        waiting.ends(130)
        check(Answer(130, "", waiting.log), 130, "interrupted")
        learner = site.learner("a", broker=nowhere, join_timeout_s=0.1)
        learner.ends(4)
        assert f"no broker answered at {nowhere}" in site.told("a")["said"]
        script.ends(4)
        check(Answer(4, "", script.log), 4, f"{nowhere} did not answer")


def test_a_run_is_shown_exported_and_replayed(site: Site) -> None:
    broker, learner = site.broker(fragments=2), site.learner("a", width=16)
    wait_until(lambda: len(site.merged()) >= 4, "merges", broker, learner)
    table, view = site.ask("status", site.address), site.view()
    assert (table.code, table.err) == (0, "")
    assert view.run_id in table.out and re.search(r"^a +training ", table.out, re.M)
    assert view.learners["a"].contributions > 0 and view.merges >= 4

    place, elsewhere = str(site.state), str(site.folder / "other")
    second = site.ask("broker", "--listen", "tcp://127.0.0.1:0", "--state-dir", place)
    check(second, 1, "is in use")
    third = site.ask("broker", "--listen", site.address, "--state-dir", elsewhere)
    check(third, 1, f"cannot listen on {site.address}", "is a broker running already?")
    for number in range(20):
        (site.folder / f"{number}.txt").write_text(f"{number} times {number}. " * 400)
    other = f"learner --broker {site.address} --name b --preset nano --data {site.folder}"
    check(site.ask(*other.split()), 3, "expected the run's model, got 'weight' is missing")

    learner.kill()
    broker.stop()
    exported, durable = site.export(), site.journal()
    assert {name: list(one.shape) for name, one in exported.items()} == {
        "weight": [16, 16], "bias": [16],
    }  # fmt: skip
    newest = [max(v for g, v in durable if g == f) for f in range(2)]
    assert site.export_names() == (view.run_id, newest)
    site.check_replay()
    for path in site.state.glob("fragments/*"):
        path.write_bytes(path.read_bytes()[:-1])
    check(site.ask("export", place, "--to", "x"), 1, "is damaged", place)
