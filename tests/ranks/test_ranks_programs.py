"""The page on several ranks says to type this, under torchrun, beside a learner of one process."""

import re
import sys
from pathlib import Path

from acceptance.kit import Site

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fsdp.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PATIENCE_S = 90.0
"""Each rank imports torch and compiles nothing, but there are three of them."""


def test_the_reference_learner_shards_its_model_and_saves_the_bits_of_a_single_process(
    site: Site,
) -> None:
    """Holds `narrows.bench.reference.worker.train`."""
    site.wait_s = PATIENCE_S
    broker = site.broker("run.learners_at_start=2", goal_tokens=150_000)
    learner = ("learner", "--preset", "nano", "--broker", site.address)
    island = site.shell(
        "island", *TORCHRUN, "-m", "narrows", *learner, "--fsdp", "--name", "island",
        "--json", "island.json", "--save", "island.safetensors",
    )  # fmt: skip
    solo = site.command("solo", *learner, "--name", "solo", "--save", "solo.safetensors")
    for child in (island, solo, broker):
        child.ends(0)
    assert site.contributions("island") > 0 < site.contributions("solo")
    files = [(site.folder / f"{name}.safetensors").read_bytes() for name in ("island", "solo")]
    assert files[0] == files[1]
    (said,) = re.findall(r"island: ([\d,]+) steps, ([\d,]+) tokens", island.log)
    steps, tokens = [int(number.replace(",", "")) for number in said]
    assert tokens == 2 * 256 * steps, "said once, for both ranks"


def test_the_example_of_an_island_trains_with_a_single_process(site: Site) -> None:
    """Holds examples/fsdp.py."""
    source = EXAMPLE.read_text()
    assert source.count("tcp://127.0.0.1:7070") == 1
    script = site.folder / "fsdp.py"
    script.write_text(source.replace("tcp://127.0.0.1:7070", site.address))
    site.wait_s = PATIENCE_S
    broker = site.broker("run.learners_at_start=2", goal_tokens=600_000)
    island = site.shell("island", *TORCHRUN, str(script), "island")
    solo = site.shell("solo", sys.executable, str(script), "solo")
    for child in (island, solo, broker):
        child.ends(0)
    assert site.contributions("island") > 0 < site.contributions("solo")
    files = [(site.folder / f"{name}.safetensors").read_bytes() for name in ("island", "solo")]
    assert files[0] == files[1]
