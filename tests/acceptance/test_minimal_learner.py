"""A learner that knows the protocol's text alone trains beside one of ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from acceptance.kit import Site, wait_until
from acceptance.toy import start_model
from torch.nn.functional import cosine_similarity

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "minimal_learner.py"
WIDTH, FRAGMENTS = 128, 4


def test_a_second_implementation_is_merged_and_holds_the_brokers_bits(site: Site) -> None:
    source = SCRIPT.read_text()
    assert "import narrows" not in source and "from narrows" not in source
    # Ours seeds the run and stands still, but no round is merged without the other.
    settings = ("merge.quorum=0", "run.learners_at_start=2", f"fragments.count={FRAGMENTS}")
    broker = site.broker(*settings, goal_tokens=150)
    ours = site.learner("ours", tokens=1, width=WIDTH, lr=0.0)

    def seeded() -> bool:
        return any(note["kind"] == "seeded" for note in site.events("broker", "note"))

    wait_until(seeded, "our learner to seed the run", ours, broker)
    layout = site.folder / "layout.json"
    layout.write_text(site.tell("export", str(site.state), "--layout"))
    command = [sys.executable, "-I", str(SCRIPT), site.address, "other", str(layout)]
    other = site.shell("other", *command)
    for child in (other, ours, broker):
        child.ends(0)
    rounds = site.merged()
    newest = {one["fragment"]: (one["version"], one["digest"]) for one in rounds}
    ends = [json.loads(line) for line in other.log.splitlines()]
    assert {end["fragment"]: (end["version"], end["digest"]) for end in ends} == newest
    for end in ends:
        its = [one for one in rounds if one["fragment"] == end["fragment"]]
        assert end["merged"] == sum("other" in one["contributors"] for one in its) > 0
        assert (end["fragment"], end["version"], end["digest"]) in site.adopted("ours")
    site.check_copies("ours")
    # The broker read the other's pushes: its step is weight decay, and so is the run's way.
    start, final = start_model(WIDTH).weight.detach(), site.final("ours")["weight"]
    assert cosine_similarity((start - final).flatten(), start.flatten(), dim=0) > 0.9
    # And the other read publications: a copy of the model instead of each would fill the line.
    copies = site.last_status()["down_bytes"] / (4 * WIDTH * (WIDTH + 1))
    assert copies < 2 + len(rounds) / FRAGMENTS / 2
