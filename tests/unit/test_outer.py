"""Outer optimizers against their definition, the same optimizer of torch, and misuse."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch

from narrows.broker.config import OUTER_OPTIMIZERS
from narrows.broker.merging.outer import outer_optimizer
from narrows.proto.codec import F32
from narrows.proto.errors import ConfigError, ErrorCode, LocalProtocolError

ELEMENTS = 16_421


def random_values(seed: int, count: int = ELEMENTS) -> F32:
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)


def run(name: str, lr: float, momentum: float, rounds: int) -> tuple[F32, F32]:
    optimizer = outer_optimizer(name, lr=lr, momentum=momentum)
    params, state = random_values(0), np.zeros(ELEMENTS, np.float32)
    for seed in range(1, rounds + 1):
        params, state = optimizer.step(params, state, random_values(seed))
    return params, state


def run_torch(lr: float, momentum: float, rounds: int) -> F32:
    params = torch.tensor(random_values(0), requires_grad=True)
    optimizer = torch.optim.SGD([params], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for seed in range(1, rounds + 1):
        params.grad = torch.tensor(random_values(seed))
        optimizer.step()
    return np.asarray(params.tolist(), np.float32)


@pytest.mark.parametrize(
    ("name", "lr", "momentum"),
    [("sgd", 0.7, 0.0), ("nesterov", 0.7, 0.9), ("nesterov", 0.4, 0.6)],
)
def test_equals_the_optimizer_of_torch(name: str, lr: float, momentum: float) -> None:
    params, _ = run(name, lr, momentum, rounds=4)
    np.testing.assert_allclose(params, run_torch(lr, momentum, rounds=4), rtol=1e-5, atol=1e-6)


def test_nesterov_by_hand() -> None:
    optimizer = outer_optimizer("nesterov", lr=0.5, momentum=0.5)
    one, two, four = (np.array([x], np.float32) for x in (1, 2, 4))
    params, momentum = optimizer.step(one, two, four)
    # b = 0.5 * 2 + 4 = 5, p = 1 - 0.5 * (4 + 0.5 * 5).
    assert (params.tolist(), momentum.tolist()) == ([-2.25], [5.0])


def test_every_operation_is_rounded_to_float32_in_the_written_order() -> None:
    optimizer = outer_optimizer("nesterov", lr=0.7, momentum=0.6)
    p, b, d = random_values(1), random_values(2), random_values(3)
    params, momentum = optimizer.step(p, b, d)
    lr, mu = np.float32(0.7), np.float32(0.6)
    for i in range(0, ELEMENTS, 499):
        speed = np.float32(np.float32(b[i] * mu) + d[i])
        change = np.float32(np.float32(d[i] + np.float32(speed * mu)) * lr)
        assert momentum[i] == speed
        assert params[i] == np.float32(p[i] - change)


def test_sgd_at_rate_one_gives_the_local_parameters() -> None:
    # Parameters that differ from the base by a power of two come back without any rounding.
    base = random_values(1)
    local = np.nextafter(base, np.float32(0)).astype(np.float32)
    momentum = random_values(2)
    params, after = outer_optimizer("sgd", lr=1.0, momentum=0.0).step(base, momentum, base - local)
    assert params.tobytes() == local.tobytes() and np.array_equal(after, momentum)


@pytest.mark.parametrize("name", OUTER_OPTIMIZERS)
def test_inputs_stay_untouched_and_results_are_new(name: str) -> None:
    optimizer = outer_optimizer(name, lr=0.7, momentum=0.6)
    inputs = [random_values(1), random_values(2), random_values(3)]
    before = [each.tobytes() for each in inputs]
    for each in inputs:
        each.setflags(write=False)
    results = optimizer.step(*inputs)
    assert [each.tobytes() for each in inputs] == before
    for result in results:
        assert result.dtype == np.float32 and result.flags.writeable
        assert not any(np.shares_memory(result, each) for each in inputs)
    assert optimizer.name == name


@pytest.mark.parametrize("name", OUTER_OPTIMIZERS)
def test_arrays_that_do_not_fit_are_misuse(name: str) -> None:
    optimizer = outer_optimizer(name, lr=0.7, momentum=0.6)
    good = random_values(1, 4)
    double = cast(F32, good.astype(np.float64))
    wrong = [random_values(1, 3), good[:1], double, cast(F32, good.reshape(2, 2))]
    for arrays in [*((good, good, each) for each in wrong), (double, double, double)]:
        with pytest.raises(LocalProtocolError) as caught:
            optimizer.step(*arrays)
        assert caught.value.code == ErrorCode.MISUSE


@pytest.mark.parametrize(
    ("name", "lr", "momentum", "message"),
    [
        ("nestrov", 0.7, 0.9, "did you mean nesterov"),
        ("sgd", 0.0, 0.0, "outer learning rate"),
        ("sgd", float("nan"), 0.0, "outer learning rate"),
        ("sgd", float("inf"), 0.0, "outer learning rate"),
        ("nesterov", 0.7, 1.0, "outer momentum"),
        ("nesterov", 0.7, -0.1, "outer momentum"),
    ],
)
def test_what_no_optimizer_can_do_is_refused(
    name: str, lr: float, momentum: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        outer_optimizer(name, lr=lr, momentum=momentum)
