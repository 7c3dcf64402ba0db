"""Known methods as special cases: classic DiLoCo, and training without Narrows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from acceptance.kit import CODECS, Site, equal
from acceptance.toy import start_model, target_of
from torch import Tensor

WIDTH, INNER_LR, INNER_STEPS, ROUNDS = 24, 0.1, 5, 3
LOSSLESS = {"push_codec": CODECS["lossless"], "publish_codec": CODECS["lossless"]}
ROUNDING = 3e-6
"""Most that a parameter may be off: learners and broker compute in float32, the test in float64."""


def classic_diloco(seeds: Sequence[int], lr: float, momentum: float) -> Tensor:
    """DiLoCo (arXiv 2311.08105, Alg. 1): inner SGD, and Nesterov on the mean outer gradient."""
    start = start_model(WIDTH)
    model = torch.cat([start.weight.detach().flatten(), start.bias.detach()]).double()
    targets = [torch.cat([target_of(WIDTH, s).flatten(), torch.zeros(WIDTH)]) for s in seeds]
    velocity = torch.zeros_like(model)
    for _ in range(ROUNDS):
        locals_ = [model.clone() for _ in seeds]
        for _ in range(INNER_STEPS):
            locals_ = [x - INNER_LR * (x - t) for x, t in zip(locals_, targets, strict=True)]
        outer_gradient = model - torch.stack(locals_).mean(0)
        velocity = momentum * velocity + outer_gradient
        model = model - lr * (outer_gradient + momentum * velocity)
    return model


def run(site: Site, seeds: Sequence[int], **outer: Any) -> Tensor:
    """Trains ROUNDS rounds in mode diloco; gives the final model, which all learners share."""
    tokens = ROUNDS * INNER_STEPS * len(seeds)
    broker = site.broker(
        mode="diloco", learners_at_start=len(seeds), sync_period=INNER_STEPS, goal_tokens=tokens,
        fragments=1, **LOSSLESS, **outer,
    )  # fmt: skip
    toy = {"tokens": 1, "width": WIDTH, "lr": INNER_LR, "noise": 0.0}
    children = [site.learner(f"site-{s}", seed=s, **toy) for s in seeds]
    for child in (*children, broker):
        child.ends(0)
    rounds = site.merged()
    assert [one["version"] for one in rounds] == list(range(1, ROUNDS + 1))
    assert all(len(one["contributors"]) == len(seeds) for one in rounds)
    models = [site.final(f"site-{s}") for s in seeds]
    assert all(equal(model, models[0]) for model in [*models, site.export()])
    return torch.cat([models[0]["weight"].flatten(), models[0]["bias"]]).double()


def test_diloco_mode_is_classic_diloco(site: Site) -> None:
    got = run(site, (1, 2, 3), outer_lr=0.7, outer_momentum=0.6)
    torch.testing.assert_close(got, classic_diloco((1, 2, 3), 0.7, 0.6), atol=ROUNDING, rtol=0)


def test_one_learner_and_outer_sgd_at_rate_one_is_plain_training(site: Site) -> None:
    got = run(site, (1,), outer_lr=1.0, outer_momentum=0.0)
    x, target = start_model(WIDTH).weight.detach().double(), target_of(WIDTH, 1)
    for _ in range(ROUNDS * INNER_STEPS):
        x = x - INNER_LR * (x - target)
    torch.testing.assert_close(got[: WIDTH * WIDTH], x.flatten(), atol=ROUNDING, rtol=0)
