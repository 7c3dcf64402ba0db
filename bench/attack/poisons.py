"""The attacks of `narrows bench attack poison`: what is pushed, and what is claimed about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Final

import msgspec
import numpy as np

from narrows.bench.sim.trained import Lie, Poison
from narrows.proto import messages as msg
from narrows.proto.codec import F32
from narrows.proto.limits import TOKENS_MAX

TOKENS_FACTOR: Final = 1 << 20
"""Tokens that a liar claims, in units of those that it trained."""


def one_step(push: msg.Push) -> msg.Push:
    """The work of the push, claimed to be done in one step: the best that there is."""
    return msgspec.structs.replace(push, steps=1)


def many_tokens(push: msg.Push) -> msg.Push:
    """Far more work than was done, and all of it in one step."""
    tokens = min(TOKENS_MAX, push.tokens * TOKENS_FACTOR)
    return msgspec.structs.replace(push, tokens=tokens, steps=1)


CLAIMS: Final[Mapping[str, Lie | None]] = {
    "": None,
    "one step": one_step,
    "tokens, one step": many_tokens,
}
"""Claims about the work behind each push of the attacker; "": the truth."""


def scaled(factor: float, base: F32, local: F32, random: Random) -> F32:
    """The honest outer gradient times a factor."""
    return _pushing(base, np.float32(factor) * (base - local))


def noise(length: float, base: F32, local: F32, random: Random) -> F32:
    """Noise in a random direction, in units of the length of the honest outer gradient."""
    rng = np.random.default_rng(random.getrandbits(64))
    drawn = rng.standard_normal(base.size).astype(np.float32)
    unit = float(np.linalg.norm(base - local)) / max(float(np.linalg.norm(drawn)), 1e-30)
    return _pushing(base, np.float32(length * unit) * drawn)


def _pushing(base: F32, outer_grad: F32) -> F32:
    """The snapshot whose outer gradient is this one."""
    poisoned: F32 = (base - outer_grad).astype(np.float32)
    return poisoned


ATTACKS: Final[Mapping[str, Poison | None]] = {
    "nobody": None,
    "sign-flip x1": partial(scaled, -1.0),
    "sign-flip x1.5": partial(scaled, -1.5),
    "sign-flip x3": partial(scaled, -3.0),
    "sign-flip x10": partial(scaled, -10.0),
    "push x10^4": partial(scaled, 1e4),
    "noise at the bound": partial(noise, 1.5),
    "noise x1000": partial(noise, 1e3),
}


def claimed_weights(claims: Sequence[tuple[int, int]]) -> list[float]:
    """Weights of the releases before: tokens^2 / steps as claimed, from three on half at most."""
    raw = [tokens * tokens / steps for tokens, steps in claims]
    weights = [each / sum(raw) for each in raw]
    if len(weights) < 3 or max(weights) <= 0.5:
        return weights
    rest = 1.0 - max(weights)
    return [0.5 if each > 0.5 else 0.5 * each / rest for each in weights]
