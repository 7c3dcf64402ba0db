"""The model that a run makes: that of classic DiLoCo, and that of loops as users write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from acceptance.kit import LOSSLESS, Site, equal, metadata
from acceptance.toy import Tied, start_model, target_of
from torch import Tensor

WIDTH, INNER_LR, INNER_STEPS, ROUNDS = 24, 0.1, 5, 3
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


@pytest.mark.parametrize(
    ("numbers", "lr", "momentum"),
    [((1, 2, 3), 0.7, 0.6), ((1,), 1.0, 0.0)],
    ids=["three learners", "one learner and outer SGD at rate one: plain training"],
)
def test_diloco_mode_is_classic_diloco(
    site: Site, numbers: Sequence[int], lr: float, momentum: float
) -> None:
    broker = site.broker(
        f"run.learners_at_start={len(numbers)}", f"fragments.sync_period_steps={INNER_STEPS}",
        "fragments.count=1", f"merge.outer_lr={lr}", f"merge.outer_momentum={momentum}", *LOSSLESS,
        mode="diloco", goal_tokens=ROUNDS * INNER_STEPS * len(numbers),
    )  # fmt: skip
    toy: dict[str, Any] = {"tokens": 1, "width": WIDTH, "lr": INNER_LR, "noise": 0.0}
    children = [site.learner(f"site-{n}", seed=n, **toy) for n in numbers]
    for child in (*children, broker):
        child.ends(0)
    rounds = site.merged()
    assert [one["version"] for one in rounds] == list(range(1, ROUNDS + 1))
    assert all(len(one["contributors"]) == len(numbers) for one in rounds)
    models = [site.final(f"site-{n}") for n in numbers]
    assert all(equal(model, models[0]) for model in [*models, site.export()])
    got = torch.cat([models[0]["weight"].flatten(), models[0]["bias"]]).double()
    expected = classic_diloco(numbers, lr, momentum)
    torch.testing.assert_close(got, expected, atol=ROUNDING, rtol=0)


def test_tied_and_half_precision_weights_two_optimizers_and_compile(site: Site) -> None:
    broker = site.broker("run.learners_at_start=2", goal_tokens=20_000)
    names = ("tied", "compiled")
    learners = [site.learner(name, model=name, seed=seed) for seed, name in enumerate(names)]
    for child in (*learners, broker):
        child.ends(0)
    for name in names:
        losses = site.told(name)["losses"]
        assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
        assert site.contributions(name) > 0
        model = Tied()
        model.load_state_dict(site.final(name), strict=True)
        assert model.head.weight is model.table.weight
        assert site.final(name)["hidden.weight"].dtype == torch.bfloat16
        for file, is_final in ((f"{name}-first", "false"), (name, "true")):
            told = metadata(site.folder / f"{file}.safetensors")
            assert told["narrows.final"] == is_final
    assert equal(*map(site.final, names))
    site.check_copies(*names)
    # Two names of one weight travel once.
    assert site.export().keys() == {"table.weight", "hidden.weight", "hidden.bias"}
