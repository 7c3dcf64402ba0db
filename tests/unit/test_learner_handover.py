"""Momentum hand-over: the rule beside a plain one in numpy, where it applies and where not."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_learner_host import Calm, Stage
from test_learner_island import DEVICE, FRAGMENT, GPU, Model
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from narrows.bench.sim.run import Site, Walk
from narrows.learner import handover
from narrows.learner.effects import Adopt
from narrows.learner.gpu import TorchIsland
from narrows.learner.handover import AdamMoments, Held, Part
from narrows.learner.parameters import Parameters
from narrows.proto.codec import F32
from narrows.proto.layout import Fragment
from narrows.proto.messages import Header
from narrows.proto.ports import Adoption

F64 = NDArray[np.float64]
RATE = 3e-3
STEPS = 20
SHARE = 0.5


class Trained:
    """A model after some steps of an optimizer, and two published copies."""

    def __init__(
        self,
        make: Callable[..., torch.optim.Optimizer],
        dtype: torch.dtype = torch.float32,
        *,
        on_device: bool = False,
        transposed: bool = False,
        **options: Any,
    ) -> None:
        self.model = Model(dtype, transposed=transposed, device=DEVICE[on_device])
        self.parameters = Parameters(self.model)
        # In two groups of one optimizer, the first of which has a rate of its own.
        w, *others = self.model.parameters()
        groups = [{"params": [w], "lr": RATE / 2}, {"params": others}]
        self.optimizer = make(groups, lr=RATE, **options)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for tensor in self.model.parameters():
                gradient = torch.randn(tensor.shape, generator=generator)
                tensor.grad = torch.empty_like(tensor).copy_(gradient)
            self.optimizer.step()
        self.moments = AdamMoments(self.parameters, [self.optimizer])
        self.island = TorchIsland(self.parameters, self.moments.hand_over, on_device=on_device)
        rng = np.random.default_rng(2)
        start = rng.standard_normal(FRAGMENT.elements).astype(np.float32)
        moved = start + 1e-4 * rng.standard_normal(FRAGMENT.elements).astype(np.float32)
        self.old = self.island.copy(FRAGMENT, start)
        self.new = self.island.copy(FRAGMENT, moved)

    def hand_over(self) -> None:
        rule = Adoption(self.old, self.new, None, 0.5, False, SHARE, STEPS)
        self.island.adopt(FRAGMENT, self.island.prepare(FRAGMENT, rule))

    def read(self, moment: str) -> list[F64]:
        """A moment of each parameter, flat."""
        states = [self.optimizer.state[each] for each in self.model.parameters()]
        return [state[moment].detach().double().cpu().numpy().ravel() for state in states]

    def due(self) -> list[F64]:
        """The first moments after the rule, in float64."""
        movement = (self.old.values.astype(np.float64) - self.new.values) / STEPS
        due = list[F64]()
        for piece, m, v, rate in zip(
            FRAGMENT.pieces,
            self.read("exp_avg"),
            self.read("exp_avg_sq"),
            [RATE / 2, RATE, RATE],
            strict=True,
        ):
            own = movement[piece.offset : piece.offset + piece.count]
            root = np.sqrt(v / (1 - 0.999**3))
            due.append((1 - SHARE) * m + SHARE * (1 - 0.9**3) * root * own / rate)
        return due


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)], ids=["f32", "bf16"]
)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("kind", ["plain", "foreach", "fused", "capturable", "transposed"])
def test_the_rule_is_that_of_a_plain_one(
    kind: str, make: Any, dtype: torch.dtype, rounding: float, on_device: bool
) -> None:
    """Whatever the precision and the kernels of the optimizer; the difference of bfloat16 copies
    would be 0 in most places."""
    options: dict[str, bool] = {
        "foreach": kind == "foreach",
        "fused": kind == "fused",
        # On a CPU there is none: there it differs in nothing but what the groups hold.
        "capturable": kind == "capturable" and on_device and GPU.type == "cuda",
    }
    transposed = kind == "transposed"
    trained = Trained(make, dtype, on_device=on_device, transposed=transposed, **options)
    if kind == "capturable":
        for group in trained.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=DEVICE[on_device])
            group["betas"] = tuple(torch.tensor(each) for each in group["betas"])
    due = trained.due()
    second = trained.read("exp_avg_sq")
    trained.hand_over()
    for became, was_due in zip(trained.read("exp_avg"), due, strict=True):
        np.testing.assert_allclose(became, was_due, rtol=rounding, atol=rounding * 1e-2)
    for became, was in zip(trained.read("exp_avg_sq"), second, strict=True):
        assert np.array_equal(became, was)


def test_nothing_waits_for_the_device() -> None:
    """A fake GPU raises for whoever asks for a number that lies there."""
    trained = Trained(torch.optim.AdamW)
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = list[Part]()
        for number, tensor in enumerate(trained.parameters.tensors):
            names = ("exp_avg", "exp_avg_sq", "movement")
            *moments, movement = (torch.zeros(tensor.shape, device="cuda") for _ in names)
            state = dict(zip(names, moments, strict=False), step=torch.tensor(3.0, device="cuda"))
            trained.optimizer.state[tensor] = state
            parts.append(Part(number, lambda moment: moment, movement))
        trained.optimizer.param_groups[0]["lr"] = torch.tensor(RATE, device="cuda")
        trained.moments.mend(parts, SHARE)
        with pytest.raises(DataDependentOutputException):
            bool(state["step"])


@pytest.mark.parametrize(("place", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"lr": torch.tensor(RATE, device="cuda"), "betas": (0.9, 0.999)},
        lambda: {"lr": RATE, "betas": (0.9, torch.tensor(0.999, device="cuda"))},
    ],
    ids=["lr", "beta2"],
)
def test_a_rate_on_a_device_meets_a_count_in_host_memory(
    make: Callable[[], dict[str, Any]], place: str, dtype: torch.dtype
) -> None:
    """AdamW has it so with a rate that is a tensor of the device, unless it is capturable. Holds
    `_factors`, `_mix`."""
    with FakeTensorMode():
        first, second, movement = torch.zeros(3, 4, dtype=dtype, device=place)
        held = Held(make(), first, second, torch.tensor(3.0))
        (keep,), (scale,) = handover._factors([held], SHARE)
        handover._mix(first, second, movement, keep, scale)
        assert {keep.device.type, scale.device.type} == {"cuda"}


@pytest.mark.parametrize(
    ("make", "lacks", "words"),
    [
        (torch.optim.AdamW, "lr", "AdamW keeps other things than torch's own"),
        (torch.optim.AdamW, "betas", "AdamW keeps other"),
        (torch.optim.AdamW, "exp_avg", "AdamW keeps other"),
        (torch.optim.AdamW, "exp_avg_sq", "AdamW keeps other"),
        (torch.optim.AdamW, "step", "AdamW keeps other"),
        (torch.optim.NAdam, "lr", "NAdam is neither"),
        (torch.optim.NAdam, "step", "NAdam is neither"),
    ],
)
def test_an_optimizer_that_keeps_other_things_is_told_and_left_alone(
    make: Any, lacks: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as an int as its count."""
    trained = Trained(make)
    for held in (*trained.optimizer.param_groups, *trained.optimizer.state.values()):
        if held.pop(lacks, None) is not None and lacks == "step":
            held["step"] = 3
    trained.hand_over()
    (line,) = caplog.messages
    assert "'w'" in line and words in line


@pytest.mark.parametrize("place", ["lr", "step"])
def test_a_rate_or_a_count_of_0_leaves_the_moments_alone(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so, unless the number lies on a device."""
    trained = Trained(torch.optim.AdamW)
    before = trained.read("exp_avg")
    for group in trained.optimizer.param_groups:
        group["lr"] = torch.tensor(RATE)
        numbers = [trained.optimizer.state[each]["step"] for each in group["params"]]
        for number in [group["lr"]] if place == "lr" else numbers:
            number.zero_()
    trained.hand_over()
    (line,) = caplog.messages
    assert "'w'" in line and "rate is 0, or its optimizer has made no step" in line
    monkeypatch.setattr(handover, "_is_known_zero", lambda number: False)
    trained.hand_over()
    for became, was in zip(trained.read("exp_avg"), before, strict=True):
        assert np.array_equal(became, was)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (torch.optim.Adam, {"weight_decay": 0.1}, "weight decay in the gradients"),
        (torch.optim.AdamW, {"amsgrad": True}, "AMSGrad"),
        (torch.optim.Adam, {"amsgrad": True}, "AMSGrad"),
        (torch.optim.NAdam, {}, "NAdam is neither Adam nor AdamW of torch"),
        (torch.optim.Adamax, {}, "Adamax is neither"),
        (torch.optim.Adafactor, {}, "Adafactor is neither"),
    ],
)
def test_where_it_would_be_wrong_the_log_says_so_once_and_nothing_is_done(
    make: Any, options: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained = Trained(make, **options)
    states = [trained.optimizer.state[each] for each in trained.model.parameters()]
    before = [{name: each.clone() for name, each in state.items()} for state in states]
    for _ in range(2):
        trained.hand_over()
    (line,) = caplog.messages
    assert "'w'" in line and words in line
    for state, was in zip(states, before, strict=True):
        assert all(torch.equal(state[name], was[name]) for name in was)


def test_each_parameter_is_looked_up_in_its_own_optimizer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One has it in the second one, one has no gradients there, one is in none."""
    trained = Trained(torch.optim.AdamW)
    model = trained.model
    second = torch.optim.AdamW([model.b, model.v], lr=RATE)
    empty = torch.optim.AdamW([model.w], lr=RATE)
    trained.moments = AdamMoments(trained.parameters, [empty, second])
    trained.island = TorchIsland(trained.parameters, trained.moments.hand_over)
    trained.hand_over()
    assert not caplog.messages, "nobody has made a step"
    model.v.grad = None
    second.step()
    before = second.state[model.b]["exp_avg"].clone()
    trained.hand_over()
    assert not torch.equal(second.state[model.b]["exp_avg"], before)
    assert model.v not in second.state
    trained.moments = AdamMoments(trained.parameters, [second])
    trained.island = TorchIsland(trained.parameters, trained.moments.hand_over)
    trained.hand_over()
    told = "\n".join(caplog.messages)
    assert len(caplog.messages) == 3
    assert "'v'" in told and "no step with it" in told
    assert "'w'" in told and "no optimizer of this learner holds it" in told


class Recorder(Walk):
    """Its moments are the list of what was handed over, by fragment and version."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.hand_over = self._note
        self.handed: dict[tuple[int, int], tuple[F32, float]] = {}
        self._learner = site

    def _note(self, fragment: Fragment, movement: F32, share: float) -> None:
        version = self._learner.adopting.version
        self.handed[fragment.index, version] = movement.copy(), share


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_each_adoption_hands_the_published_movement_over(tmp_path: Path, share: float) -> None:
    """Not the first one, nor that of the first version, nor one of parameters that are not worth
    keeping, nor that of the final model; after an absence all versions since."""
    plan = Calm(2, Recorder, run__goal_tokens=2400, fragments__handover=share)
    plan.befalls(2.0, 0, Site.freeze, 1.5)
    stage = Stage(plan, tmp_path)
    checkers = stage.run.checkers
    copies: dict[tuple[int, int], F32] = {}
    adopted: list[Adopt] = []
    real_saw = checkers.saw
    real_adopting = checkers.adopting

    def saw(header: Header, published: F32) -> None:
        copies[header.fragment, header.version] = published.copy()
        real_saw(header, published)

    def adopting(site: Site, effect: Adopt) -> None:
        if site is stage.run.sites[0]:
            adopted.append(effect)
        real_adopting(site, effect)

    checkers.saw = saw  # type: ignore[method-assign]
    checkers.adopting = adopting  # type: ignore[method-assign,assignment]
    stage.run.until(4.0)
    trainee = stage.run.sites[0].trainee
    assert isinstance(trainee, Recorder)
    trainee.tensors[1][3] = np.nan
    stage.run.finish()
    assert "encode_failed" in stage.noted and stage.host.session.final
    overwritten = [each for each in adopted if each.base < 0]
    assert len(overwritten) == 2 * 2 + 1, "the first and the last of each fragment, and the nan"
    due = dict[tuple[int, int], F64]()
    for index in range(2):
        mine = [each for each in adopted if each.fragment == index]
        for before, each in itertools.pairwise(mine):
            if each not in overwritten and before.version > 0 and share > 0:
                steps = 4 * (each.version - before.version)
                old, new = copies[index, before.version], copies[index, each.version]
                due[index, each.version] = (old.astype(np.float64) - new) / steps
    assert trainee.handed.keys() == due.keys()
    assert any(each.version - each.base > 1 for each in adopted if each.base > 0)
    for place, (movement, told) in trainee.handed.items():
        assert told == share
        np.testing.assert_allclose(movement, due[place], rtol=1e-6)
