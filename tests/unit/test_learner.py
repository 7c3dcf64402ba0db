"""The context manager against a connection that records its calls."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from chaos.end_of_run import metadata
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from narrows.learner import Learner, LocalProtocolError, Refused, Unfinished
from narrows.learner.module.parameters import ModuleParameters
from narrows.learner.module.ramp import ramp_steps
from narrows.learner.module.step_log import Logged, detached
from narrows.learner.transport import ClientOptions
from narrows.proto.codec import F32
from narrows.proto.errors import ErrorCode
from narrows.proto.fragments import build_table

torch.set_num_threads(1)

Call: TypeAlias = tuple[object, ...]


class Recorder:
    """Takes the place of Client: keeps its calls, does on each what a test wants done."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        assert isinstance(options.host, ModuleParameters)
        self.host = options.host
        self.calls: list[Call] = []
        self.joined_version_sum = 0
        self.should_stop = False
        self.progress = 0.25
        self.run_step = 7.5
        self.run_tokens = 750.0
        self.health = "connected"
        self.on: dict[str, Callable[[], None]] = {}

    def _called(self, *call: object) -> None:
        self.calls.append(call)
        self.on.get(str(call[0]), lambda: None)()

    def start(self) -> None:
        self._called("start")

    def boundary(self, tokens: int, loss: float | None) -> None:
        self._called("boundary", tokens, loss)

    def skipped(self, tokens: int) -> None:
        self._called("skipped", tokens)

    def pause(self, reason: str) -> None:
        self._called("pause", reason)

    def resume(self) -> None:
        self._called("resume")

    def finish(self, timeout_s: float | None) -> None:
        self._called("finish", timeout_s)

    def abort(self) -> None:
        self._called("abort")

    def stats(self) -> dict[str, Any]:
        return {"up_bytes": 3, "code_s": -1.0}

    def standing(self) -> dict[str, str]:
        return {"narrows.final": "true", "narrows.versions": "[4, 3]"}

    def adopt_all(self, change: Callable[[F32], F32]) -> None:
        for fragment in build_table(self.host.layout, 2):
            values = np.empty(fragment.elements, np.float32)
            self.host.snapshot(fragment, values)
            self.host.adopt(fragment, change(values))


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1)


class Loop:
    """A tiny model, its optimizers, a Learner and the recorder behind it."""

    def __init__(
        self,
        *optimizers: Callable[[list[nn.Parameter]], Optimizer],
        last: nn.Module | None = None,
        versions: int = 0,
        prepare: Callable[[Recorder], None] = lambda recorder: None,
        **options: Any,
    ) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), last or nn.Linear(4, 4))
        kinds = optimizers or (sgd,)
        parts = [self.model] if len(kinds) == 1 else list(self.model)
        self.optimizers = [
            kind(list(part.parameters())) for kind, part in zip(kinds, parts, strict=True)
        ]

        self._prepare = prepare
        self._versions = versions
        self._recorder: Recorder | None = None
        self.learner = Learner(
            self.model, self.optimizers, broker="tcp://127.0.0.1:1", name="a",
            connect=self._connect, **options,
        )  # fmt: skip

    def _connect(self, options: ClientOptions) -> Recorder:
        self._recorder = Recorder(options)
        self._recorder.joined_version_sum = self._versions
        self._prepare(self._recorder)
        return self._recorder

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None
        return self._recorder

    @property
    def calls(self) -> list[Call]:
        return self.recorder.calls

    def loss(self) -> Tensor:
        output: Tensor = self.model(torch.ones(2, 3))
        return output.square().mean()

    def log(self, tokens: int) -> None:
        self.learner.log(tokens=tokens, loss=0.5)

    def backward(self) -> None:
        self.loss().backward()  # type: ignore[no-untyped-call]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def told(loop: Loop) -> list[Call]:
    """Calls of the connection between start and finish, without losses."""
    return [call[:2] for call in loop.calls if call[0] in ("boundary", "skipped")]


def test_a_whole_life() -> None:
    loop = Loop()
    with loop.learner as learner:
        for tokens in learner.until_end([10, 20]):
            loss = loop.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            learner.log(tokens=tokens, loss=loss)
            loop.step()
            loop.zero_grad()
    assert [call[0] for call in loop.calls] == ["start", "boundary", "boundary", "finish"]
    assert [call[1] for call in loop.calls[1:3]] == [10, 20]
    assert all(isinstance(call[2], float) for call in loop.calls[1:3])
    assert loop.calls[-1] == ("finish", None)


def test_what_the_connection_is_made_with(tmp_path: Path) -> None:
    loop = Loop(
        lambda parameters: Adam(parameters, betas=(0.9, 0.95)),
        merge_rules={"1.weight": "mean"},
        join_timeout_s=5.0,
        events=str(tmp_path / "events.jsonl"),
    )
    with loop.learner:
        pass
    host, options = loop.recorder.host, loop.recorder.options
    assert options == ClientOptions(
        broker="tcp://127.0.0.1:1", name="a", layout=host.layout, frozen_digest=0, host=host,
        join_timeout_s=5.0, events=tmp_path / "events.jsonl", contribute_after_steps=20,
        incarnation=options.incarnation,
    )  # fmt: skip
    assert {e.name: e.rule for e in host.layout}["1.weight"] == "mean"


def test_until_end_stops_at_the_goal_and_asks_the_loader_for_no_more() -> None:
    drawn: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            drawn.append(len(drawn))
            yield drawn[-1]

    loop = Loop()
    with loop.learner as learner:
        for number in learner.until_end(endless()):
            loop.recorder.should_stop = number == 2
        assert list(learner.until_end(endless())) == []
    assert drawn == [0, 1, 2]


def test_gradient_accumulation_is_one_boundary_with_the_mean_loss() -> None:
    loop = Loop()
    with loop.learner as learner:
        learner.log(tokens=10, loss=1.0)
        learner.log(tokens=10, loss=torch.tensor(4.0))
        learner.log(tokens=20)
        loop.step()
    ((_, tokens, loss),) = [call for call in loop.calls if call[0] == "boundary"]
    assert tokens == 40
    assert loss == pytest.approx(2.5)


def test_a_step_without_logged_tokens_names_the_missing_line() -> None:
    loop = Loop()
    line = "learner.log(tokens=batch.numel(), loss=loss)"
    with pytest.raises(LocalProtocolError) as caught, loop.learner:
        loop.step()
    assert caught.value.code == ErrorCode.MISUSE
    assert line in caught.value.remedy
    assert [call[0] for call in loop.calls] == ["start", "abort"]


def test_of_several_optimizers_the_last_one_is_the_boundary() -> None:
    loop = Loop(sgd, lambda p: Adam(p))
    with loop.learner:
        loop.log(5)
        loop.optimizers[0].step()
        loop.optimizers[0].zero_grad()
        assert told(loop) == []
        loop.optimizers[1].step()
        loop.optimizers[1].zero_grad()
        assert told(loop) == [("boundary", 5)]


def forward_backward_step_clear(loop: Loop, tokens: int, *, step: bool) -> None:
    loop.log(tokens)
    if step:
        loop.step()
    loop.zero_grad()


def clear_forward_backward_step(loop: Loop, tokens: int, *, step: bool) -> None:
    loop.zero_grad()
    loop.log(tokens)
    if step:
        loop.step()


def forward_clear_backward_step(loop: Loop, tokens: int, *, step: bool) -> None:
    loop.log(tokens)
    loop.zero_grad()
    if step:
        loop.step()


@pytest.mark.parametrize(
    "order",
    [forward_backward_step_clear, clear_forward_backward_step, forward_clear_backward_step],
)
@pytest.mark.parametrize("optimizer_count", [1, 2])
def test_tokens_thrown_away_without_a_step_are_told_in_every_order_of_a_loop(
    order: Callable[..., None], optimizer_count: int
) -> None:
    loop = Loop(*[sgd] * optimizer_count)
    with loop.learner:
        for tokens, step in [(1, True), (2, False), (4, False), (8, True), (16, True), (32, False)]:
            order(loop, tokens, step=step)
    stepped = [call for call in told(loop) if call[0] == "boundary"]
    skipped = [call[1] for call in told(loop) if call[0] == "skipped"]
    assert stepped == [("boundary", 1), ("boundary", 8), ("boundary", 16)]
    assert sum(int(str(tokens)) for tokens in skipped) == 2 + 4 + 32


def drop_by_optimizer(loop: Loop) -> None:
    loop.zero_grad()


def drop_by_model(loop: Loop) -> None:
    loop.model.zero_grad()


def drop_in_place(loop: Loop) -> None:
    loop.model.zero_grad(set_to_none=False)


def drop_by_hand(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = None


DROPS = [drop_by_optimizer, drop_by_model, drop_in_place, drop_by_hand]


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("place", ["first", "before backward", "last"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("optimizer_count", [1, 2])
def test_a_step_that_amp_withholds_is_told_however_gradients_are_dropped(
    drop: Callable[[Loop], None], place: str, parts: int, optimizer_count: int
) -> None:
    loop = Loop(*[sgd] * optimizer_count)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with loop.learner:
        for tokens, broken in [(1, True), (10, False), (20, True), (40, True), (80, False)]:
            for part in range(parts):
                if place == "first" and part == 0:
                    drop(loop)
                loss = loop.loss() * (float("inf") if broken else 1.0)
                loop.log(tokens)
                if place == "before backward" and part == 0:
                    drop(loop)
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            for optimizer in loop.optimizers:
                scaler.step(optimizer)
            scaler.update()
            if place == "last":
                drop(loop)
    boundaries = [call for call in told(loop) if call[0] == "boundary"]
    skipped = [call[1] for call in told(loop) if call[0] == "skipped"]
    assert boundaries == [("boundary", 10 * parts), ("boundary", 80 * parts)]
    assert sum(int(str(tokens)) for tokens in skipped) == (1 + 20 + 40) * parts


def test_a_step_that_a_fused_optimizer_skips_counts_with_its_own_tokens_only() -> None:
    """It looks whether gradients are finite where they are: nothing on the host knows."""
    loop = Loop(lambda parameters: SGD(parameters, lr=0.1, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with loop.learner:
        for tokens, broken in [(10, False), (20, True), (30, False)]:
            loop.model.zero_grad()
            loss = loop.loss() * (float("inf") if broken else 1.0)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            loop.log(tokens)
            scaler.step(loop.optimizers[0])
            scaler.update()
    assert told(loop) == [("boundary", 10), ("boundary", 20), ("boundary", 30)]


def test_of_two_optimizers_one_may_be_withheld() -> None:
    """Tokens of a step of either optimizer were learned from."""
    for broken in (0, 1):
        loop = Loop(sgd, sgd)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with loop.learner:
            for tokens, breaks in [(10, True), (20, False)]:
                loop.zero_grad()
                scaler.scale(loop.loss()).backward()  # type: ignore[no-untyped-call]
                loop.log(tokens)
                if breaks:
                    for parameter in loop.model[broken].parameters():
                        parameter.grad = torch.full_like(parameter, torch.inf)
                for optimizer in loop.optimizers:
                    scaler.step(optimizer)
                scaler.update()
        assert told(loop) == (
            [("boundary", 10), ("boundary", 20)] if not broken else [("boundary", 30)]
        )


def test_a_scaler_and_an_optimizer_of_somebody_else_change_nothing() -> None:
    loop, others = Loop(), Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with loop.learner:
        loop.log(10)
        scaler.scale(others.loss() * float("inf")).backward()  # type: ignore[no-untyped-call]
        scaler.step(others.optimizers[0])
        others.model.zero_grad()
        loop.log(20)
        loop.step()
    assert told(loop) == [("boundary", 30)]


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with loop.learner:
        for tokens in (10, 20):
            loop.model.zero_grad()
            loop.backward()
            loop.log(tokens)
            scaler.step(loop.optimizers[0])
    assert told(loop) == [("boundary", 10), ("boundary", 20)]


@pytest.mark.parametrize("drop", DROPS[:3])
def test_a_batch_that_the_loop_drops_is_told(drop: Callable[[Loop], None]) -> None:
    loop = Loop()
    with loop.learner:
        for tokens, finite in [(10, True), (20, False), (30, True)]:
            loop.backward()
            loop.log(tokens)
            if not finite:
                drop(loop)
                continue
            loop.step()
            drop(loop)
    assert told(loop) == [("boundary", 10), ("skipped", 20), ("boundary", 30)]


def test_a_batch_may_be_dropped_by_name() -> None:
    loop = Loop()
    with loop.learner as learner:
        for tokens, finite in [(10, True), (20, False), (30, True)]:
            loop.backward()
            loop.log(tokens)
            if finite:
                loop.step()
            else:
                learner.discard()
            drop_by_hand(loop)
        learner.discard()
    assert told(loop) == [("boundary", 10), ("skipped", 20), ("boundary", 30)]


def test_what_an_optimizer_has_stepped_on_cannot_be_dropped() -> None:
    loop = Loop(sgd, sgd)
    with loop.learner as learner:
        loop.log(10)
        loop.optimizers[0].step()
        loop.log(5)
        learner.discard()
        loop.optimizers[1].step()
    assert told(loop) == [("skipped", 5), ("boundary", 10)]


def test_the_model_inside_a_wrapper_is_watched_too() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    wrapper: Any = torch.compile(model, backend="eager")
    for outer, inner in ((wrapper, model), (model, wrapper)):
        recorder: list[Recorder] = []

        def connect(options: ClientOptions, recorder: list[Recorder] = recorder) -> Recorder:
            recorder.append(Recorder(options))
            return recorder[0]

        optimizer = SGD(model.parameters(), lr=0.1)
        with Learner(outer, optimizer, broker="", name="a", connect=connect) as learner:
            learner.log(tokens=10)
            inner.zero_grad()
            learner.log(tokens=20)
            inner.zero_grad()
        assert recorder[0].calls[1:] == [("skipped", 10), ("skipped", 20), ("finish", None)]


def test_optimizers_that_step_at_unequal_rates_lose_no_tokens() -> None:
    """As in a GAN: the first steps on five batches, then the last one on one."""
    loop = Loop(sgd, sgd)
    with loop.learner:
        for _ in range(2):
            for _ in range(5):
                loop.log(100)
                loop.optimizers[0].step()
                loop.optimizers[0].zero_grad()
            loop.log(10)
            loop.optimizers[1].step()
            loop.optimizers[1].zero_grad()
    assert told(loop) == [("boundary", 510), ("boundary", 510)]


def test_accumulation_that_clears_after_its_first_forward_loses_no_tokens() -> None:
    loop = Loop()
    with loop.learner:
        for _ in range(3):
            loop.log(1)
            loop.zero_grad()
            for tokens in (2, 4, 8):
                loop.log(tokens)
            loop.step()
    assert told(loop) == [("boundary", 15)] * 3


@pytest.mark.parametrize("tokens", [0, -3, True - 1])
def test_tokens_must_be_positive(tokens: int) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        Loop().learner.log(tokens=tokens)
    assert caught.value.code == ErrorCode.BAD_TOKENS


def test_tokens_and_losses_of_the_wrong_kind_are_refused() -> None:
    learner = Loop().learner
    tokens: Any = torch.tensor(4)
    with pytest.raises(LocalProtocolError, match="tokens is a tensor"):
        learner.log(tokens=tokens)
    with pytest.raises(LocalProtocolError, match="not one number"):
        learner.log(tokens=1, loss=torch.zeros(2))


class OnDevice(Tensor):
    """Acts like a tensor elsewhere: any look at its value raises."""

    is_cpu = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func not in (Tensor.item, Tensor.__float__, Tensor.__bool__, Tensor.cpu)
        base: Any = super()
        result = base.__torch_function__(func, types, args, kwargs or {})
        if func is Tensor.to:
            assert kwargs == {"non_blocking": True}
            return result.clone().as_subclass(Tensor)
        return result


class Arrivals:
    """In the place of events: says for each look at a copy, in turn, whether it has arrived."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)

    def query(self) -> bool:
        return self.answers.pop(0)


def on_device(value: float) -> Tensor:
    return torch.tensor(value).as_subclass(OnDevice)


def test_a_loss_on_a_device_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = Arrivals(False, True, True)

    def event_after_queued(_: torch.device) -> Arrivals:
        return arrivals

    monkeypatch.setattr("narrows.learner.module.step_log.event_after_queued", event_after_queued)
    loop = Loop()
    with loop.learner as learner:
        for value in (1.0, 2.0, 3.0, 4.0):
            learner.log(tokens=3, loss=on_device(value))
            learner.log(tokens=1, loss=on_device(value + 4.0))
            loop.step()
    assert [call[2] for call in loop.calls[1:-1]] == [None, None, 2.0, 4.0]
    assert arrivals.answers == []


def test_a_logged_loss_keeps_neither_graph_nor_memory() -> None:
    logged = Logged()
    for value in (1.0, 4.0):
        source = torch.tensor(value, requires_grad=True)
        leaf = weakref.ref(source)
        loss: Tensor = (source * 1.0).as_subclass(OnDevice)
        logged.add(2, detached(loss))
        with torch.no_grad():
            loss.fill_(99.0)
        del source
        assert leaf() is not None, "the graph must keep its leaf alive, or this test is empty"
        del loss
        gc.collect()
        assert leaf() is None
    assert isinstance(logged.loss, OnDevice)
    assert logged.loss.as_subclass(Tensor).item() == 2.5


def test_leaving_restores_torch_in_any_order() -> None:
    methods = [(nn.Module, "zero_grad"), (torch.amp.GradScaler, "step")]
    before = [vars(owner)[name] for owner, name in methods]
    loops = [Loop(), Loop()]
    for loop in loops:
        loop.learner.__enter__()
    assert [vars(owner)[name] for owner, name in methods] != before
    for loop in loops:
        loop.learner.__exit__(None, None, None)
    for loop in loops:
        loop.model.zero_grad()
        assert loop.calls == [("start",), ("finish", None)]
    assert [vars(owner)[name] for owner, name in methods] == before


def test_leaving_restores_the_optimizers() -> None:
    loop = Loop(sgd, lambda p: Adam(p))
    mine: Callable[..., None] = loop.optimizers[1].zero_grad
    vars(loop.optimizers[1])["zero_grad"] = mine
    with loop.learner:
        assert all("zero_grad" in vars(optimizer) for optimizer in loop.optimizers)
        loop.log(3)
    loop.zero_grad()
    loop.step()
    assert loop.calls == [("start",), ("skipped", 3), ("finish", None)]
    assert "zero_grad" not in vars(loop.optimizers[0])
    assert vars(loop.optimizers[1])["zero_grad"] is mine


def test_an_exception_in_the_body_aborts_and_is_never_masked() -> None:
    def broken() -> None:
        raise OSError("no way out")

    loop = Loop(prepare=lambda recorder: recorder.on.update(abort=broken))
    with pytest.raises(KeyError, match="mine"), loop.learner:
        raise KeyError("mine")
    assert [call[0] for call in loop.calls] == ["start", "abort"]
    loop.step()
    assert [call[0] for call in loop.calls] == ["start", "abort"]


def test_a_refusal_comes_out_of_the_step() -> None:
    def refuse() -> None:
        raise Refused(ErrorCode.LAYOUT_MISMATCH, "another model")

    loop = Loop(prepare=lambda recorder: recorder.on.update(boundary=refuse))
    with pytest.raises(Refused, match="another model"), loop.learner:
        loop.log(1)
        loop.step()


def test_an_error_on_leaving_ends_the_exchange() -> None:
    def refuse() -> None:
        raise Refused(ErrorCode.WRONG_RUN, "too late")

    for moment in ("skipped", "finish"):
        loop = Loop()
        with pytest.raises(Refused, match="too late"), loop.learner:
            loop.recorder.on[moment] = refuse
            loop.log(1)
        assert loop.calls[-1] == ("abort",)


def test_a_join_that_fails_leaves_nothing_behind() -> None:
    def refuse() -> None:
        raise Refused(ErrorCode.NAME_IN_USE, "taken")

    loop = Loop(prepare=lambda recorder: recorder.on.update(start=refuse))
    with pytest.raises(Refused, match="taken"), loop.learner:
        pytest.fail("the body must not run")
    assert loop.calls == [("start",), ("abort",)]
    loop.step()


def test_use_outside_of_the_block_and_twice() -> None:
    loop = Loop()
    with pytest.raises(LocalProtocolError, match="not joined"):
        _ = loop.learner.should_stop
    with loop.learner:
        pass
    assert loop.learner.run_tokens == 750.0
    with pytest.raises(LocalProtocolError, match="once"), loop.learner:
        pytest.fail("the body must not run")


def test_the_clock_and_health_are_those_of_the_connection() -> None:
    with Loop().learner as learner:
        assert (learner.progress, learner.run_step, learner.run_tokens) == (0.25, 7.5, 750.0)
        assert learner.health == "connected"
        assert not learner.should_stop


def test_pause_resumes_even_after_an_error() -> None:
    loop = Loop()
    with loop.learner as learner:
        with learner.pause("saving"):
            assert loop.calls[-1] == ("pause", "saving")
        with pytest.raises(KeyError), learner.pause():
            raise KeyError
    assert [call[0] for call in loop.calls] == [
        "start", "pause", "resume", "pause", "resume", "finish",
    ]  # fmt: skip
    assert loop.calls[3] == ("pause", "evaluating")


def test_newcomer_ramps_up_and_contributes_after_it() -> None:
    loop = Loop(lambda p: AdamW(p, betas=(0.9, 0.96)), versions=3)
    assert loop.learner.lr_scale == 1 / 25
    scales: list[float] = []
    with loop.learner as learner:
        for _ in range(27):
            scales.append(learner.lr_scale)
            loop.log(1)
            loop.step()
    assert scales == [min(1.0, k / 25) for k in range(1, 28)]
    assert loop.recorder.options.contribute_after_steps == 25


def test_no_ramp_for_one_of_the_first_or_with_inner_state() -> None:
    loop = Loop(lambda p: Adam(p))
    with loop.learner as learner:
        assert learner.lr_scale == 1.0

    def warm(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = Adam(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return optimizer

    loop = Loop(warm, versions=3)
    with loop.learner as learner:
        assert learner.lr_scale == 1.0
    assert loop.recorder.options.contribute_after_steps == 0


def test_the_optimizers_state_may_be_loaded_until_the_block_is_entered() -> None:
    source = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    stepped = Adam(source.parameters())
    source(torch.ones(2, 3)).sum().backward()
    stepped.step()
    loop = Loop(lambda p: Adam(p), versions=3)
    assert loop.learner.lr_scale == 1 / 1000
    loop.optimizers[0].load_state_dict(stepped.state_dict())
    assert loop.learner.lr_scale == 1.0
    with loop.learner as learner:
        assert learner.lr_scale == 1.0
    assert loop.recorder.options.contribute_after_steps == 0


def test_length_of_the_ramp() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    adam = Adam(parameters, betas=(0.9, 0.999))
    assert ramp_steps([adam]) == 1000
    assert ramp_steps([Adam(parameters, betas=(0.9, 0.99)), adam]) == 1000
    assert ramp_steps([Adam(parameters, betas=(0.9, 0.5))]) == 20
    assert ramp_steps([SGD(parameters, momentum=0.9)]) == 20
    assert ramp_steps([RMSprop(parameters)]) == 20
    assert ramp_steps([SGD(parameters)]) == 0


def test_seconds_in_our_code_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    loop = Loop()
    with loop.learner as learner:
        loop.log(1)
        loop.step()
        loop.zero_grad()
        stats = learner.stats()
    assert stats == {"up_bytes": 3, "code_s": 3.0}


def test_buffers_that_change_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(
        last=nn.BatchNorm1d(4),
    )
    with caplog.at_level(logging.WARNING, "narrows.learner"), loop.learner:
        for _ in range(4):
            loop.backward()
            loop.log(1)
            loop.step()
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "1.running_mean, 1.running_var"
    ]


def frozen_first(last: nn.Module | None = None) -> Loop:
    """The first layer does not require gradients when the Learner is made."""

    def freeze(parameters: list[nn.Parameter]) -> Optimizer:
        for parameter in parameters[:2]:
            parameter.requires_grad_(False)
        return SGD(parameters, lr=0.1)

    return Loop(freeze, last=last)


def first_layer(loop: Loop) -> nn.Module:
    layer: nn.Module = loop.model[0]
    return layer


def train_steps(loop: Loop, count: int) -> None:
    for _ in range(count):
        loop.backward()
        loop.log(1)
        loop.step()
        loop.zero_grad()


def test_parameters_unfrozen_later_are_named_at_the_next_step() -> None:
    loop = frozen_first()
    with pytest.raises(LocalProtocolError) as caught, loop.learner:
        train_steps(loop, 5)  # No power of two: every step looks.
        first_layer(loop).requires_grad_(True)
        train_steps(loop, 1)
    assert caught.value.code == ErrorCode.MISUSE
    assert "'0.weight', '0.bias'" in caught.value.message
    assert "before the Learner is made" in caught.value.remedy
    assert [call[0] for call in loop.calls].count("boundary") == 5


def test_parameters_unfrozen_before_entering_are_named_before_joining() -> None:
    loop = frozen_first()
    first_layer(loop).requires_grad_(True)
    with pytest.raises(LocalProtocolError, match=r"'0\.weight', '0\.bias'"), loop.learner:
        pytest.fail("the body must not run")
    assert loop._recorder is None


def test_parameters_unfrozen_for_an_optimizer_of_their_own_are_found_where_buffers_are() -> None:
    loop = frozen_first()
    loop.optimizers[0].param_groups[0]["params"] = [*loop.model[1].parameters()]
    with pytest.raises(LocalProtocolError, match=r"'0\.weight', '0\.bias'"), loop.learner:
        train_steps(loop, 3)
        first_layer(loop).requires_grad_(True)
        train_steps(loop, 1)


@pytest.mark.parametrize("of_the_model", [True, False])
def test_parameters_added_later_are_named(of_the_model: bool) -> None:
    loop = Loop()
    with pytest.raises(LocalProtocolError) as caught, loop.learner:
        train_steps(loop, 2)
        added = nn.Parameter(torch.zeros(2, 3))
        if of_the_model:
            first_layer(loop).register_parameter("adapter", added)
        loop.optimizers[0].add_param_group({"params": [added]})
        train_steps(loop, 1)
    name = "'0.adapter'" if of_the_model else "one of shape (2, 3) outside of the model"
    assert name in caught.value.message


def test_a_parameter_that_was_replaced_is_named() -> None:
    loop = Loop()
    with pytest.raises(LocalProtocolError, match=r"'1\.weight'"), loop.learner:
        train_steps(loop, 3)
        loop.model[1].register_parameter("weight", nn.Parameter(torch.zeros(4, 4)))
        train_steps(loop, 1)


def test_parameters_outside_of_the_model_from_the_start_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They may be meant to stay: a head of each learner's own, a temperature."""
    loop = Loop()
    loop.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2, 3))]})
    with caplog.at_level(logging.WARNING, "narrows.learner"), loop.learner:
        train_steps(loop, 5)
    (record,) = caplog.records
    assert "one of shape (2, 3) outside of the model" in record.getMessage()


def test_parameters_that_are_frozen_tied_or_moved_are_no_reason_to_stop() -> None:
    def tie(parameters: list[nn.Parameter]) -> Optimizer:
        parameters[3].data = parameters[1].data
        return SGD(parameters, lr=0.1)

    loop = Loop(tie)
    with loop.learner:
        train_steps(loop, 2)
        first_layer(loop).requires_grad_(False)
        train_steps(loop, 2)
        first_layer(loop).requires_grad_(True)
        weight = next(loop.model[1].parameters())
        weight.data = weight.data.clone()
        train_steps(loop, 4)
    assert [call[0] for call in loop.calls].count("boundary") == 8


def test_master_weights_are_found_in_the_loop() -> None:
    class Stubborn(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.copy_(self.state[parameter].setdefault("master", parameter.clone()))

    loop = Loop(lambda p: Stubborn(p, lr=0.1))
    with pytest.raises(LocalProtocolError, match="master weights"), loop.learner:
        for boundary in range(8):
            loop.recorder.on["boundary"] = (
                functools.partial(loop.recorder.adopt_all, lambda values: values / np.float32(3))
                if boundary % 3 == 0
                else lambda: None
            )
            loop.log(1)
            loop.step()


def test_adopted_and_final_values_reach_the_file(tmp_path: Path) -> None:
    def ones(values: F32) -> F32:
        return np.ones_like(values)

    loop = Loop(
        prepare=lambda recorder: recorder.on.update(finish=lambda: recorder.adopt_all(ones))
    )
    with loop.learner as learner:
        pass
    learner.save(tmp_path / "final.safetensors")
    loaded: dict[str, Tensor] = load_file(tmp_path / "final.safetensors")
    loop.model.load_state_dict(loaded, strict=True)
    assert all((value == 1).all() for value in loaded.values())
    assert learner.state_dict().keys() == loaded.keys()


def test_a_file_tells_whether_it_is_final(tmp_path: Path) -> None:
    learner = Loop().learner

    def saved() -> dict[str, str]:
        learner.save(tmp_path / "model.safetensors")
        return metadata(tmp_path / "model.safetensors")

    assert saved() == {"format": "pt", "narrows.final": "false"}
    with learner:
        pass
    assert saved() == {"format": "pt", "narrows.final": "true", "narrows.versions": "[4, 3]"}


def test_an_end_without_the_final_model_is_raised_unless_the_body_did() -> None:
    def unfinished() -> None:
        raise Unfinished("left without the last rounds of the run", got="versions 3..4")

    def fail(recorder: Recorder) -> None:
        recorder.on["finish"] = unfinished

    with pytest.raises(Unfinished, match="narrows export"), Loop(prepare=fail).learner:
        pass
    with pytest.raises(ZeroDivisionError), Loop(prepare=fail).learner:
        raise ZeroDivisionError


def test_without_optimizers_or_with_something_else() -> None:
    model = nn.Linear(2, 2)
    for wrong in ([], [model], model):
        given: Any = wrong
        with pytest.raises(LocalProtocolError, match="optimizer"):
            Learner(model, given, broker="", name="a", connect=Recorder)


@pytest.fixture
def ranks() -> Generator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("ranks")
def test_several_ranks_are_refused_by_name() -> None:
    with pytest.raises(LocalProtocolError, match=r"torch\.distributed") as caught:
        Loop()
    assert caught.value.got == "2"
