"""Loops as users write them in PyTorch: a plain model and a compiled one in one run."""

from __future__ import annotations

import json

import torch
from acceptance.kit import Site, equal, is_final
from acceptance.tied_loop import BATCH, Tied, train


def test_tied_and_half_precision_weights_two_optimizers_and_compile(site: Site) -> None:
    broker = site.broker(goal_tokens=200 * BATCH, learners_at_start=2)
    learners = [
        site.python(name, train, name, site.address, site.folder, seed, name == "compiled")
        for seed, name in enumerate(("plain", "compiled"))
    ]
    for child in (*learners, broker):
        child.ends(0)
    for name in ("plain", "compiled"):
        losses = json.loads((site.folder / f"{name}-losses.json").read_text())
        assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
        assert site.contributions(name) > 0
        model = Tied()
        model.load_state_dict(site.final(name), strict=True)
        assert model.head.weight is model.table.weight
        assert site.final(name)["hidden.weight"].dtype == torch.bfloat16
        assert not is_final(site.folder / f"{name}-first.safetensors")
        assert is_final(site.folder / f"{name}.safetensors")
    assert equal(site.final("plain"), site.final("compiled"))
    site.check_equal_copies("plain", "compiled")
    # Two names of one weight travel once.
    assert site.export().keys() == {"table.weight", "hidden.weight", "hidden.bias"}
