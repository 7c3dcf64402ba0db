"""The reference model: causal, tied, the same for the same seed; its schedule and optimizer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from narrows.learner.reference.gpt import (
    GPT,
    PRESETS,
    GPTConfig,
    learning_rate,
    make_optimizer,
    parameter_count,
    parameter_groups,
    preset,
    rotary_table,
    rotate,
    scheduled_rate,
    set_learning_rate,
    token_tensor,
    validation_loss,
)
from narrows.proto.errors import ConfigError

NANO = GPTConfig(layers=2, heads=2, width=16, context=12, batch=2, peak_learning_rate=1e-2)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


def test_logits_and_first_loss() -> None:
    model = GPT(NANO)
    assert model(tokens(3, 7)).shape == (3, 7, 256)
    # A fresh model knows nothing: close to a uniform guess among 256 bytes.
    assert model.loss(tokens(8, 12), tokens(8, 12)).item() == pytest.approx(math.log(256), abs=0.5)


def test_no_position_sees_a_later_one() -> None:
    model, x = GPT(NANO), tokens(1, 12)
    changed = x.clone()
    changed[0, 6:] = (changed[0, 6:] + 1) % 256
    ours, theirs = model(x), model(changed)
    torch.testing.assert_close(ours[0, :6], theirs[0, :6])
    assert not torch.allclose(ours[0, 6:], theirs[0, 6:])


def test_attention_sees_distances_not_places() -> None:
    table = rotary_table(12, 8)
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = rotate(q.expand(12, 8), table), rotate(k.expand(12, 8), table)
    torch.testing.assert_close(turned_q[3] @ turned_k[1], turned_q[9] @ turned_k[7])
    torch.testing.assert_close(turned_q.square().sum(dim=1), q.square().sum().expand(12))


def test_the_head_is_tied_and_the_seed_decides() -> None:
    model, twin, other = GPT(NANO), GPT(NANO), GPT(NANO, seed=1)
    assert model.head.weight is model.embedding.weight
    pairs = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert not torch.equal(model.head.weight, other.head.weight)


def test_presets_have_the_sizes_that_they_promise() -> None:
    sizes = {name: parameter_count(GPT(config)) for name, config in PRESETS.items()}
    assert 5e5 < sizes["tiny"] < 1e6 < sizes["small"] < 1e7 < 2e7 < sizes["medium"] < 3e7
    with pytest.raises(ConfigError, match="tiny"):
        preset("huge")


def test_matrices_decay_and_vectors_do_not() -> None:
    model = GPT(NANO)
    matrices, vectors = parameter_groups(model, weight_decay=0.3)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in matrices["params"]} == {2} and {
        p.dim() for p in vectors["params"]
    } == {1}
    assert sum(p.numel() for g in (matrices, vectors) for p in g["params"]) == parameter_count(
        model
    )


def test_it_learns() -> None:
    model, x = GPT(NANO), tokens(4, 13)
    optimizer = make_optimizer(model, 1e-2)
    first = model.loss(x[:, :-1], x[:, 1:]).item()
    for _ in range(30):
        model.loss(x[:, :-1], x[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert model.loss(x[:, :-1], x[:, 1:]).item() < first - 1.0


def test_the_rate_warms_up_then_falls_to_its_floor() -> None:
    rates = [learning_rate(progress / 100, 1.0) for progress in range(101)]
    top = rates.index(max(rates))
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[0] <= 0.05 and max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(7.0, 1.0) == rates[-1] and learning_rate(-1.0, 1.0) == rates[0]


def test_a_run_without_a_goal_keeps_its_rate() -> None:
    assert scheduled_rate(0.0, 0.0, 1.0) == pytest.approx(0.01)
    assert scheduled_rate(0.0, 1e6, 1.0) == 1.0
    assert scheduled_rate(1.0, 1e6, 1.0) == learning_rate(1.0, 1.0)


def test_one_rate_for_all_groups() -> None:
    optimizer = make_optimizer(GPT(NANO), 1.0)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_validation_loss_weighs_every_window_alike() -> None:
    model = GPT(NANO).train()
    windows = tokens(5, 13).numpy().astype(np.uint8)
    whole = token_tensor(windows)
    expected = model.loss(whole[:, :-1], whole[:, 1:]).item()
    assert validation_loss(model, windows, batch=2) == pytest.approx(expected, rel=1e-5)
    assert model.training
