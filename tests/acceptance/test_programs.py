"""Programs as users start them: the installed script, the demo, the examples, among them a learner
that knows the protocol's text alone."""

import csv
import json
import math
import re
import signal
import socket
import sys
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import zmq
from acceptance.kit import Site, equal
from acceptance.toy import start_model
from torch.nn.functional import cosine_similarity

from narrows.bench.kit.processes import LOOPBACK, Child, three_ports, wait_until

PATIENCE_S = 60.0
"""The demo starts programs one by one, none of which has imported torch before."""

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "minimal_learner.py"
WIDTH = 128
FRAGMENTS = 4


def test_a_script_says_what_is_wrong_and_with_which_code(site: Site) -> None:
    with three_ports(LOOPBACK) as unused, socket.create_server((LOOPBACK, 0)) as mute:
        nowhere = f"tcp://{LOOPBACK}:{unused}"
        script = site.shell("status", "narrows", "status", nowhere, "--timeout-s", "0.1")
        silent = f"tcp://{LOOPBACK}:{mute.getsockname()[1]}"
        waiting = site.shell("waiting", "narrows", "status", silent)
        mute.accept()[0].close()
        waiting.signal(signal.SIGINT)
        learner = site.learner("a", broker=nowhere, join_timeout_s=0.1)
        learner.ends(4)
        assert f"no broker answered at {nowhere}" in learner.log
        for child, code, word in ((waiting, 130, "interrupted"), (script, 4, "did not answer")):
            child.ends(code)
            (said,) = child.log.splitlines()
            assert said.startswith("narrows: ") and word in said
    assert site.tell("--version").strip() == version("narrows")


@pytest.mark.timeout(180)
def test_a_killed_learner_comes_back_and_all_copies_are_equal(site: Site) -> None:
    kept = site.folder / "demo"
    results = site.folder / "results.json"
    picture = site.folder / "demo.svg"
    site.wait_s = PATIENCE_S
    demo = site.shell(
        "demo", "narrows", "demo", "--learners", "2", "--steps", "120", "--plain",
        "--keep", str(kept), "--json", str(results), "--picture", str(picture),
    )  # fmt: skip
    site.folder = kept  # There the run's files of events lie.
    wait_until(
        lambda: "is starting again" in demo.log, "site-b to be killed", demo, timeout_s=PATIENCE_S
    )
    # So short a run would be over before site-b is back: the other one stands still meanwhile.
    children = psutil.Process(demo.pid).children(recursive=True)
    (other,) = [each for each in children if each.name() == "site-a"]
    other.suspend()
    merged = site.contributions("site-b")
    wait_until(lambda: site.contributions("site-b") >= merged + 2, "it to be merged again", demo)
    other.resume()
    demo.ends(0)
    (result,) = json.loads(results.read_text())["rows"]
    assert result["killed"] and result["rejoin_s"] is not None
    assert result["digests_compared"] > 0 == result["digests_differing"]
    site.check_copies("site-a", "site-b")
    # A model that has learned nothing takes every byte for equally likely.
    assert result["loss_global"] < math.log(256) - 2
    moved = result["up_bytes"] + result["down_bytes"]
    assert moved < result["data_parallel_bytes"] / 10
    assert max(map(len, demo.log.splitlines())) <= 100
    assert "was killed" in picture.read_text().replace("&#160;", " ")


def test_a_second_implementation_is_merged_and_holds_the_brokers_bits(site: Site) -> None:
    source = SCRIPT.read_text()
    assert "import narrows" not in source and "from narrows" not in source
    # Ours seeds the run and stands still, but no round is merged without the other.
    settings = ("merge.quorum=0", "run.learners_at_start=2", f"fragments.count={FRAGMENTS}")
    broker = site.broker(*settings, goal_tokens=150)
    ours = site.learner("ours", tokens=1, width=WIDTH, lr=0.0)

    wait_until(
        lambda: any(note["kind"] == "seeded" for note in site.events("broker", "note")),
        "our learner to seed the run",
        ours,
        broker,
    )
    layout = site.folder / "layout.json"
    layout.write_text(site.tell("export", str(site.state), "--layout"))
    command = [sys.executable, "-I", str(SCRIPT), site.address, "other", str(layout)]
    other = site.shell("other", *command)
    for child in (other, ours, broker):
        child.ends(0)
    rounds = site.merges()
    newest = {one["fragment"]: (one["version"], one["digest"]) for one in rounds}
    ends = [json.loads(line) for line in other.log.splitlines()]
    assert {end["fragment"]: (end["version"], end["digest"]) for end in ends} == newest
    for end in ends:
        its = [one for one in rounds if one["fragment"] == end["fragment"]]
        assert end["merged"] == sum("other" in one["contributors"] for one in its) > 0
        assert (end["fragment"], end["version"], end["digest"]) in site.adopted("ours")
    site.check_copies("ours")
    # What it calls its loss falls with its parameters, and the journal has its curve.
    curve = list(csv.DictReader(site.tell("journal", "curve", str(site.state)).splitlines()))
    losses = [float(each["loss"]) for each in curve if each["learner"] == "other"]
    assert len(losses) == sum("other" in one["contributors"] for one in rounds)
    assert 0 < losses[-1] < losses[0]
    # The broker read the other's pushes: its step is weight decay, and so is the run's way.
    start = start_model(WIDTH).weight.detach()
    final = site.saved("ours")["weight"]
    assert cosine_similarity((start - final).flatten(), start.flatten(), dim=0) > 0.9
    # And the other read publications: a copy of the model instead of each would fill the line.
    copies = site.final()["line"]["down_bytes"] / (4 * WIDTH * (WIDTH + 1))
    assert copies < 2 + len(rounds) / FRAGMENTS / 2


def test_the_example_ends_with_one_line_when_it_is_interrupted(site: Site) -> None:
    layout = site.folder / "layout.json"
    layout.write_text('{"frozen_digest": 0, "entries": [["w", [2], "float32", "mean"]]}')
    with zmq.Context() as context, context.socket(zmq.ROUTER) as broker:
        broker.rcvtimeo = 1000 * int(PATIENCE_S)
        port = broker.bind_to_random_port(f"tcp://{LOOPBACK}")
        command = [sys.executable, "-I", str(SCRIPT), f"tcp://{LOOPBACK}:{port}", "other"]
        other = site.shell("other", *command, str(layout))
        assert broker.recv_multipart(), "its Hello: it runs"
        other.signal(signal.SIGINT)
        other.ends(1)
    assert other.log.splitlines() == ["interrupted"]


def test_the_example_of_a_loop_trains_with_another_and_saves_the_runs_model(site: Site) -> None:
    source = (EXAMPLES / "train.py").read_text()
    assert source.count("tcp://127.0.0.1:7070") == 1
    site.wait_s = PATIENCE_S
    script = site.folder / "train.py"
    script.write_text(source.replace("tcp://127.0.0.1:7070", site.address))
    broker = site.broker("run.learners_at_start=2", goal_tokens=200_000)
    a, b = [site.shell(name, sys.executable, str(script), name) for name in ("site-a", "site-b")]
    for child in (a, b, broker):
        child.ends(0)
    for child in (a, b):
        assert f"{child.name}: step 0, loss" in child.log
        assert f"{child.name}: the run's model is in {child.name}.safetensors" in child.log
        assert site.contributions(child.name) > 0
    assert equal(site.saved("site-a"), site.saved("site-b"))


def test_signals_to_a_learner_write_its_inputs_and_end_it_as_it_says(site: Site) -> None:
    """Holds `narrows.bench.reference.worker.learner`."""
    site.broker("run.learners_at_start=2")

    def start(name: str) -> Child:
        given = ("--preset", "nano", "--broker", site.address, "--name", name)
        return site.command(name, "learner", *given, "--events", f"{name}.jsonl")

    waiting = start("waiting")
    wait_until(lambda: "the run has not begun" in waiting.log, "it to wait", waiting)
    waiting.signal(signal.SIGUSR1)
    wait_until(lambda: "the last inputs are in" in waiting.log, "its inputs", waiting)
    (inputs,) = site.folder.glob("inputs-waiting.*.jsonl")
    assert "All decisions are as recorded" in site.tell("debug", "replay", str(inputs))
    waiting.signal(signal.SIGINT)
    waiting.ends(130)

    one, _ = start("one"), start("other")
    site.contribute("one")
    one.signal(signal.SIGINT)
    one.ends(0)
    assert "leaves the run in order; a second Ctrl-C ends at once" in one.log


def test_the_algorithm_in_one_file_learns_and_merges_the_work_of_all(site: Site) -> None:
    site.wait_s = PATIENCE_S
    mini = site.shell("mini", sys.executable, "-I", str(EXAMPLES / "mini.py"))
    mini.ends(0)
    losses = [float(each) for each in re.findall(r"loss ([0-9.]+),", mini.log)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 4
    shares = dict(re.findall(r"^(\w+): .* ([0-9.]+)% merged$", mini.log, re.MULTILINE))
    assert shares.keys() == {"fast", "middle", "slow"}
    assert all(float(share) > 98 for share in shares.values())
