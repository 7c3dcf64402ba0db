"""The examples of frameworks, as users start them: two learners each, and one model at the end."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from acceptance.kit import Site
from safetensors.torch import load_file
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PATIENCE_S = 110.0
"""Two programs that nobody has imported a framework for."""


def checkpoint(path: Path) -> dict[str, Tensor]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return dict(loaded["state_dict"])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("example", "goal_tokens", "file", "read"),
    [
        ("hf_trainer", 400_000, "{}/model.safetensors", load_file),
        ("trl_sft", 200_000, "{}/adapter_model.safetensors", load_file),
        ("lightning_fit", 400_000, "{}.ckpt", checkpoint),
        ("accelerate_loop", 400_000, "{}.safetensors", load_file),
    ],
)
def test_an_example_trains_with_another_and_saves_the_runs_model(
    site: Site, example: str, goal_tokens: int, file: str, read: Callable[[Path], dict[str, Tensor]]
) -> None:
    source = (EXAMPLES / f"{example}.py").read_text()
    assert source.count('"tcp://127.0.0.1:7070"') == 1
    site.wait_s = PATIENCE_S
    script = site.folder / f"{example}.py"
    script.write_text(source.replace("tcp://127.0.0.1:7070", site.address))
    names = ("site-a", "site-b")
    broker = site.broker("run.learners_at_start=2", goal_tokens=goal_tokens)
    for name in names:
        site.environment[name] = {"HF_HUB_OFFLINE": "1"}
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    ways = [[], torchrun if example == "hf_trainer" else []]  # One site of two ranks.
    children = [
        site.shell(name, sys.executable, *way, str(script), name)
        for name, way in zip(names, ways, strict=True)
    ]
    for child in (*children, broker):
        child.ends(0)
    for child in children:
        assert f"{child.name}: the run's" in child.log
        assert site.contributions(child.name) > 0
    one, other = [read(site.folder / file.format(name)) for name in names]
    assert one.keys() == other.keys() and one
    assert all(each.equal(other[name]) for name, each in one.items())
