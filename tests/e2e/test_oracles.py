"""Known methods as special cases, over real sockets: classic DiLoCo, plain training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from running import ELEMENTS, ToyHost, broker_config, live_broker, train, vector

from narrows.proto.codec import F32


def classic_diloco(
    targets: list[F32], *, rounds: int, inner_steps: int, inner_rate: float, outer_lr: float,
    momentum: float,
) -> F32:  # fmt: skip
    """DiLoCo (arXiv 2311.08105, Alg. 1) in one process: inner SGD, outer Nesterov, plain mean."""
    params = np.zeros(ELEMENTS, np.float64)
    velocity = np.zeros(ELEMENTS, np.float64)
    for _ in range(rounds):
        outer_grad = np.zeros(ELEMENTS, np.float64)
        for target in targets:
            local = params.copy()
            for _ in range(inner_steps):
                local -= inner_rate * (local - target)
            outer_grad += (params - local) / len(targets)
        velocity = momentum * velocity + outer_grad
        params = params - outer_lr * (outer_grad + momentum * velocity)
    return params.astype(np.float32)


def test_diloco_mode_is_classic_diloco(tmp_path: Path) -> None:
    rounds, inner_steps, learners = 3, 5, 3
    targets = [vector(seed) for seed in range(learners)]
    config = broker_config(
        tmp_path,
        run__mode="diloco",
        run__learners_at_start=learners,
        fragments__sync_period_steps=inner_steps,
        codec__push="raw32",
        codec__publish="raw32",
        outer__lr=0.7,
        outer__momentum=0.6,
    )
    hosts = {f"learner-{index}": ToyHost(target) for index, target in enumerate(targets)}
    with live_broker(config) as service:
        train(service, hosts, rate=0.1, steps_max=rounds * inner_steps)
        versions = service.syncer.state.versions
    expected = classic_diloco(
        targets, rounds=rounds, inner_steps=inner_steps, inner_rate=0.1, outer_lr=0.7,
        momentum=0.6,
    )  # fmt: skip
    assert versions == (rounds,)
    for host in hosts.values():
        np.testing.assert_allclose(host.x, expected, atol=1e-6)


def test_one_learner_with_outer_sgd_at_rate_one_is_plain_training(tmp_path: Path) -> None:
    steps = 40
    config = broker_config(
        tmp_path,
        run__mode="diloco",
        fragments__sync_period_steps=10,
        codec__push="raw32",
        codec__publish="raw32",
        outer__optimizer="sgd",
        outer__lr=1.0,
    )
    host, alone = ToyHost(vector(1)), ToyHost(vector(1))
    with live_broker(config) as service:
        train(service, {"only": host}, rate=0.05, steps_max=steps)
    for _ in range(steps):
        alone.step(0.05)
    np.testing.assert_allclose(host.x, alone.x, atol=1e-6)


@pytest.mark.parametrize("mode", ["decoupled", "streaming"])
def test_all_learners_end_with_the_broker_s_published_copy(tmp_path: Path, mode: str) -> None:
    targets = [vector(seed) for seed in range(3)]
    config = broker_config(
        tmp_path,
        run__mode=mode,
        run__goal_tokens=1200,
        run__learners_at_start=3,
        fragments__sync_period_steps=8,
    )
    hosts = {f"learner-{index}": ToyHost(target) for index, target in enumerate(targets)}
    with live_broker(config) as service:
        train(service, hosts, rate=0.05, step_s=0.003)
        model, table = service.jobs.model, service.syncer.state.table
        merges = service.syncer.state.tally.merges
    assert model is not None
    final = ToyHost(targets[0])
    for fragment, state in zip(table, model.fragments, strict=True):
        final.adopt(fragment, state.published)
    assert merges > len(table)
    for host in hosts.values():
        assert np.array_equal(host.x, final.x)


@pytest.mark.parametrize("bits", [2.0, 6.5])
def test_a_bit_rate_in_place_of_a_codec(tmp_path: Path, bits: float) -> None:
    """Both ways, finely and coarsely coded."""
    targets = [vector(seed) for seed in range(2)]
    config = broker_config(
        tmp_path,
        run__goal_tokens=1500,
        run__learners_at_start=2,
        fragments__sync_period_steps=8,
        codec__push="auto",
        codec__publish="auto",
        codec__push_bits=bits,
        codec__publish_bits=bits,
    )
    hosts = {f"learner-{index}": ToyHost(target) for index, target in enumerate(targets)}
    with live_broker(config) as service:
        train(service, hosts, rate=0.05, step_s=0.003)
        model, refused = service.jobs.model, service.syncer.state.tally.refused
        merges = service.syncer.state.tally.merges
    assert model is not None and merges > 10
    assert not {"unknown_codec", "bad_payload"} & set(refused)
    for fragment in range(2):
        version = model.fragments[fragment].version
        publication = model.publication(fragment, version)
        assert publication is not None
        assert publication.codec == ("int8-zstd" if bits > 4 else "int4-zstd")
    for host in hosts.values():
        for fragment, part in enumerate(model.table):
            held = np.empty(part.elements, np.float32)
            host.snapshot(part, held)
            assert np.array_equal(held, model.fragments[fragment].published)
