"""Learners are slow, come late, freeze, die and come back: nobody is held up, no work is lost. The
model that a run makes is that of classic DiLoCo; and at the goal everybody leaves with the final
model, bit for bit, in which everybody's work is."""

import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from acceptance.kit import LOSSLESS, Site, equal
from acceptance.toy import start_model, target_of
from safetensors import safe_open
from torch import Tensor

from narrows.bench.kit.processes import wait_until

SLOW = ("slow-a", "slow-b", "slow-c")
SHARE = 0.9
"""Part of its own tokens that each learner has merged. The rest is on its way: about two steps."""

WIDTH = 24
INNER_LR = 0.1
INNER_STEPS = 5
ROUNDS = 3
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
    rounds = site.merges()
    assert [one["version"] for one in rounds] == list(range(1, ROUNDS + 1))
    assert all(len(one["contributors"]) == len(numbers) for one in rounds)
    models = [site.saved(f"site-{n}") for n in numbers]
    assert all(equal(model, models[0]) for model in [*models, site.export()])
    got = torch.cat([models[0]["weight"].flatten(), models[0]["bias"]]).double()
    expected = classic_diloco(numbers, lr, momentum)
    torch.testing.assert_close(got, expected, atol=ROUNDING, rtol=0)


def test_at_the_goal_everybody_leaves_with_the_final_model(site: Site) -> None:
    goal = 15_000
    seeds = {"a": 1, "b": 2}
    settings = ("run.learners_at_start=2", "fragments.sync_period_steps=20")
    broker = site.broker(*settings, goal_tokens=goal)
    children = [site.learner(name, seed=s, leave_timeout_s=None) for name, s in seeds.items()]
    for child in (*children, broker):
        child.ends(0)
    assert "without the final model" not in broker.log
    durable = site.journal()
    newest = {fragment: max(v for f, v in durable if f == fragment) for fragment, _ in durable}
    assert newest
    for name in seeds:
        assert {(*last, durable[last]) for last in newest.items()} <= site.adopted(name)
        for file, is_final in ((f"{name}-first", "false"), (name, "true")):
            with safe_open(site.folder / f"{file}.safetensors", "pt") as saved:
                assert saved.metadata()["narrows.final"] == is_final
    assert equal(site.saved("a"), site.saved("b"))
    site.check_run(*seeds)
    # What was trained until the goal is in it: one last round of each fragment follows, though one
    # or two may have nothing to merge. Without last rounds at most one is still under way.
    assert len({one["fragment"] for one in site.merges() if one["run_tokens"] >= goal}) >= 2
    # The export has the global model, which no learner holds before it is coded.
    exported = site.export()["weight"]
    way = torch.dist(start_model(48).weight.detach(), exported)
    behind = torch.dist(site.saved("a")["weight"], exported)
    assert 0 < behind < 0.25 * way, f"{behind:.3f} of {way:.3f}"


def test_slow_and_late_learners_beside_a_fast_one_have_their_work_merged(site: Site) -> None:
    settings = ("run.learners_at_start=4", "fragments.count=1", "fragments.sync_period_steps=12")
    broker = site.broker(*settings)
    for seed, name in enumerate(SLOW):
        site.learner(name, seed=seed, step_s=0.3)
    site.learner("fast", seed=3)
    site.contribute("fast", *SLOW)
    before = len(site.merges())
    site.learner("late", seed=4)
    site.steps_on(28, *SLOW, "fast")
    learners = site.status()["learners"]
    shares = {name: one["merged_tokens"] / one["logged_tokens"] for name, one in learners.items()}
    assert len(shares) == 5 and min(shares.values()) >= SHARE, shares
    site.contribute(*SLOW, "late", count=3)
    broker.stop()
    rounds = site.merges()
    ended = site.final()
    assert not any("late" in one["contributors"] for one in rounds[:before])
    # The clock counts what was merged, no more and no less.
    merged = sum(one["merged_tokens"] for one in ended["learners"].values())
    assert ended["run_tokens"] == merged == sum(one["tokens"] for one in rounds)
    site.check_run(*SLOW, "fast", "late")


def test_who_freezes_or_dies_holds_nobody_up_and_comes_back(site: Site) -> None:
    broker = site.broker("run.learners_at_start=3", "fragments.count=2")
    a, b, c = [site.learner(name, seed=seed) for seed, name in enumerate("abc")]
    site.contribute("a", "b", "c", count=2)
    for is_long in (False, True):
        a.signal(signal.SIGSTOP)
        site.contribute("b", "c", count=5)
        # Its last pushes had arrived before; from here on the others are on their own.
        alone = len(site.merges())
        site.contribute("b", "c", count=20)
        if is_long:
            wait_until(lambda: site.status()["learners"]["a"]["state"] == "silent", "its silence")
        assert not any("a" in one["contributors"] for one in site.merges()[alone:])
        a.signal(signal.SIGCONT)
        site.contribute("a", "b", "c", count=3)

    before = site.status()
    c.kill()
    b.signal(signal.SIGSTOP)
    for name in "bc":  # Another process takes the name.
        joined = site.folder / f"{name}.steps"
        joined.unlink()
        wait_until(joined.exists, f"another {name} to join", site.learner(name, seed=3), broker)
    site.contribute("a", "b", "c", count=2)
    taken = site.status()
    b.signal(signal.SIGCONT)
    b.ends(3)
    site.contribute("a", "b", "c", count=6)
    broker.stop()
    after = site.final()
    for name in "bc":
        first, second, third = (
            view["learners"][name]["incarnation"] for view in (before, taken, after)
        )
        assert first != second == third
    assert before["run_tokens"] <= taken["run_tokens"] <= after["run_tokens"]
    assert 0 < after["run_tokens"] <= sum(one["tokens"] for one in site.merges()) / 2
    for each in after["learners"].values():
        assert 0 < each["merged_tokens"] <= each["logged_tokens"]
    site.check_run("a", "b", "c")
