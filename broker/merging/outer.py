"""The outer optimizer: an averaged outer gradient becomes new global parameters.

All arithmetic is float32, with one rounding per operation, in the order that is written here: the
result has the same bits on every machine.

Another optimizer is a kernel here and a name in records.Policy and config.Merge. What it keeps
between two steps is `momentum`, whose length is its own business: zeros (n,) before the first step.

Source: DiLoCo (arXiv 2311.08105), with the recursion of torch.optim.SGD(nesterov=True).
"""

from __future__ import annotations

import numpy as np

from narrows.broker.records import FragmentState, Policy
from narrows.proto.codec import F32, I64, empty_f32, kernel, read_only
from narrows.proto.codec.kernels import INFINITE_BITS
from narrows.proto.layout import Fragment


def outer_step(
    fragment: Fragment, before: FragmentState, values: F32, gains: F32, policy: Policy
) -> tuple[F32, F32]:
    """New parameters and momentum (n,), in new arrays: b <- mu*b + d, then p <- p - lr*(d + mu*b).

    The outer gradient d is `values` (n,) times `gains` (k,), one for each piece. A first step from
    b = 0 moves by lr * (1 + mu) * d; with mu = 0 this is plain SGD. Raises FloatingPointError if a
    result is not finite: one NaN would spread to every learner.
    """
    params, momentum, elements = before.global_, before.momentum, fragment.elements
    assert params.shape == momentum.shape == values.shape == (elements,), params.shape
    assert policy.outer_lr > 0 and 0 <= policy.momentum < 1, policy
    inputs = read_only(params), read_only(momentum), read_only(values), fragment.bounds
    rates = np.float32(policy.outer_lr), np.float32(policy.momentum)
    updated, velocity = empty_f32(elements), empty_f32(elements)
    largest = nesterov_step(*inputs, read_only(gains), *rates, updated, velocity)
    if largest >= INFINITE_BITS:
        raise FloatingPointError("the outer step would make a parameter infinite or NaN")
    return updated, velocity


@kernel
def nesterov_step(
    params: F32,
    momentum: F32,
    values: F32,
    bounds: I64,
    gains: F32,
    lr: np.float32,
    mu: np.float32,
    updated: F32,
    velocity: F32,
) -> int:
    """Sets velocity = mu * momentum + d and updated = params - lr * (d + mu * velocity), where
    d = value * gain; all (n,).

    Returns the largest magnitude of a parameter as float32 bits: from INFINITE_BITS on it is not
    finite.
    """
    largest = np.uint32(0)
    for span in range(gains.size):
        gain, first, end = gains[span], bounds[span], bounds[span + 1]
        part, part_params, part_momentum = values[first:end], params[first:end], momentum[first:end]
        part_updated, part_velocity = updated[first:end], velocity[first:end]
        for i in range(part.size):
            # This order of products and sums is promised, bit by bit.
            step = part[i] * gain
            speed = part_momentum[i] * mu + step
            moved = part_params[i] - (step + speed * mu) * lr
            part_velocity[i] = speed
            part_updated[i] = moved
            # A speed that is not finite makes such a parameter, even where mu is 0.
            largest = max(largest, np.float32(moved).view(np.uint32) & np.uint32(0x7FFFFFFF))
    return int(largest)
