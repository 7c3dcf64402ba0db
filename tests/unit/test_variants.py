"""Variants that only the bench has: other codings of a step, other outer rules."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from narrows.bench.codec.codings import BLOCK, CODINGS
from narrows.bench.quality.variants import VARIANTS
from narrows.broker.config import load_config
from narrows.broker.merging.model import version_zero
from narrows.broker.merging.policy import policy_of
from narrows.proto.fragments import build_table
from narrows.proto.messages import LayoutEntry


def test_codings_send_what_they_say() -> None:
    sizes_of = {"w": 16 * BLOCK, "b": 4 * BLOCK}
    layout = [LayoutEntry(name, (size,), "float32", "mean") for name, size in sizes_of.items()]
    part = build_table(layout, 1)[0]
    values = np.random.default_rng(1).standard_normal(part.elements).astype(np.float32)
    values[part.bounds[1] :] *= np.float32(1000.0)
    errors, sizes = dict[str, float](), dict[str, int]()
    for name, coding in CODINGS.items():
        sent, sizes[name] = coding(part, values)
        first = slice(0, part.bounds[1])
        errors[name] = float(np.linalg.norm((sent - values)[first]) / np.linalg.norm(values[first]))
    # One step for both pieces is coarser than anything in the small one.
    assert errors["one step per fragment"] == 1.0 and errors["a step per block"] < 0.2
    names = ["a step per block", "largest 15%", "largest 5%", "largest 2%"]
    assert sorted(names, key=errors.__getitem__) == names
    assert sorted(names, key=sizes.__getitem__, reverse=True) == names
    assert errors["largest 2%"] < 1 and 8 * sizes["largest 15%"] < 1.5 * part.elements
    sent, size = CODINGS["largest 5%"](part, values)
    # Where they are is chance: nobody codes that in less than its entropy.
    places = [share * math.log2(1 / share) for share in (0.05, 0.95)]
    assert 8 * size > part.elements * sum(places)
    for piece in part.pieces:
        where = slice(piece.offset, piece.offset + piece.count)
        kept = np.abs(values[where])[sent[where] != 0]
        assert kept.size == round(0.05 * piece.count)
        assert kept.min() >= np.abs(values[where])[sent[where] == 0].max()


def test_delayed_nesterov_moves_by_the_momentum_in_every_second_merge_of_two_learners() -> None:
    settings = {"outer.lr": 1.0, "outer.momentum": 0.5, "run.learners_at_start": 2}
    part = build_table([LayoutEntry("w", (1,), "float32", "mean")], 1)[0]
    state = version_zero(np.zeros(1, np.float32))
    model = VARIANTS["delayed nesterov"](load_config(None, settings), [part], [state])
    seen: list[tuple[float, float]] = []
    for version, grad in enumerate((2.0, 4.0, 2.0, 2.0)):
        params, momentum = model.outer_step(
            part, state, np.array([grad], np.float32), policy_of(model.config)
        )
        state = replace(state, version=version + 1, global_=params, momentum=momentum)
        seen.append((float(params[0]), float(momentum[0])))
    # By g / 2 each; then the momentum is half of itself plus the mean of two, and half of it moves.
    assert seen == [(-1.0, 0.0), (-4.5, 3.0), (-5.5, 3.0), (-8.25, 3.5)]


def test_heloco_halves_what_opposes_the_momentum() -> None:
    config = load_config(None, {"outer.optimizer": "sgd", "outer.lr": 1.0})
    part = build_table([LayoutEntry("w", (4,), "float32", "mean")], 1)[0]
    momentum = np.array([1, 2, 3, 4], np.float32)
    state = replace(version_zero(np.zeros(4, np.float32)), momentum=momentum)
    model = VARIANTS["heloco"](config, [part], [state])
    for opposed, kept in ((-1.0, -0.5), (1.0, 1.0)):
        params, _ = model.outer_step(
            part, state, np.float32(opposed) * momentum, policy_of(model.config)
        )
        np.testing.assert_allclose(params, -np.float32(kept) * momentum, rtol=1e-6)
