"""The whole algorithm once, in one process: three unequal learners and a broker, no network.

Learners train alone. Every few steps each sends its outer gradient (what it learned since the last
published copy) of one fragment, here a tensor, in about 3 bits per parameter. The broker averages
what has come, takes an outer step, and publishes the difference, coded as well. Nobody waits, and
nothing that was learned is thrown away. Time is counted in ticks.
"""

from __future__ import annotations

from collections import namedtuple
from copy import deepcopy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

STEP_TICKS = {"fast": 1, "middle": 3, "slow": 30}  # Ticks that an inner step of a learner takes.
TICKS, LATENCY, BATCH = 6000, 3, 64  # LATENCY: ticks that a push or a publication travels.
P, H = 4, 16  # Fragments, and sync period in inner steps.
OUTER_LR, MOMENTUM, KEEP, RHO = (np.float32(x) for x in (0.4, 0.6, 0.5, 0.5))
# Ticks between two rounds of a fragment, in which n learners make n * H steps at whatever speeds.
PERIOD = H * len(STEP_TICKS) / sum(1 / ticks for ticks in STEP_TICKS.values())
# An outer gradient of so many steps, on its way until tick `at`, or waiting for a round after it.
Push = namedtuple("Push", "gradient steps at")
F32 = NDArray[np.float32]


def code(values: F32) -> tuple[F32, float]:
    """Decoded values and the bits that they took: codes from -7 to 7, entropy-coded, and a
    scale in bfloat16, so that scale * code is exact and all who add it get the same bits."""
    scale = torch.tensor(RHO * np.sqrt(np.mean(values**2))).bfloat16().float().numpy()
    codes = np.clip(np.rint(values / (scale or np.inf)), -7, 7)
    share = np.unique(codes, return_counts=True)[1] / codes.size
    return scale * codes, 16 - codes.size * float(share @ np.log2(share))


def average(pushes: list[Push], is_head: bool) -> F32:
    """The weighted mean for the output head, and for one push. Else the radial-directional
    average, in which orthogonal gradients do not shrink: mean norm times mean direction."""
    raw = np.array([(BATCH * push.steps) ** 2 / push.steps for push in pushes], np.float32)
    weights, stack = raw / raw.sum(), np.stack([push.gradient for push in pushes])
    mean, norms = np.tensordot(weights, stack, 1), np.sqrt((stack**2).sum((1, 2)))
    if is_head or len(pushes) < 2 or not norms.all():
        return mean
    direction = np.tensordot(weights / norms, stack, 1)
    length = min(weights @ norms, len(pushes) ** 0.5 * np.linalg.norm(mean))
    return direction * np.float32(length / np.linalg.norm(direction))


class Broker:
    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())  # Of the model that users evaluate.
        self.published = [each.detach().numpy().copy() for each in self.params]  # At all learners.
        self.momentum = [np.zeros_like(values) for values in self.published]
        self.inbox: list[dict[str, Push]] = [{} for _ in range(P)]
        self.publications: list[list[tuple[int, F32, dict[str, Push]]]] = [[] for _ in range(P)]
        self.open: dict[int, int] = {}  # Fragments whose round is open -> tick of its launch.
        self.next, self.next_at, self.bits = 0, 0.0, 0.0  # Bits per parameter, of all rounds.

    def turn(self, now: int) -> None:
        """Launches round robin, at most two rounds at once, and merges what is due: pushes to any
        version. What comes late is in the next round."""
        if now >= self.next_at and len(self.open) < 2 and self.next not in self.open:
            self.open[self.next], self.next_at = now, now + PERIOD / P
            self.next = (self.next + 1) % P
        for f, launched in list(self.open.items()):
            here = {n: push for n, push in sorted(self.inbox[f].items()) if push.at <= now}
            first = min((max(launched, push.at) for push in here.values()), default=now)
            missing = [n for n, t in STEP_TICKS.items() if n not in here and t < PERIOD / P]
            if here and (not missing or now >= first + PERIOD / P):
                self.merge(f, here, now)

    def merge(self, f: int, here: dict[str, Push], now: int) -> None:
        """Nesterov's outer step, and the publication, which tells whose pushes it holds. What its
        code drops stays in the model, and so is in the next one."""
        del self.open[f]
        gradient = average([self.inbox[f].pop(name) for name in here], is_head=f == P - 1)
        self.momentum[f] = MOMENTUM * self.momentum[f] + gradient
        self.params[f].data -= torch.from_numpy(OUTER_LR * (gradient + MOMENTUM * self.momentum[f]))
        change, bits = code(self.params[f].detach().numpy() - self.published[f])
        self.published[f] = self.published[f] + change
        self.publications[f].append((now + LATENCY, change, here))
        self.bits += bits / change.size


class Learner:
    def __init__(self, name: str, model: nn.Module, broker: Broker) -> None:
        self.name, self.model, self.broker, self.steps = name, model, broker, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        self.params, self.copies = list(model.parameters()), list(broker.published)
        self.waiting: list[Push | None] = [None] * P
        self.versions, self.pushed, self.merged = [0] * P, [0] * P, [0] * P

    def boundary(self, now: int) -> None:
        """After an inner step: adopts what has come, then pushes to the rounds that are open. A
        learner too slow for that pushes always, and keeps all that it did meanwhile."""
        self.steps += 1
        slow = STEP_TICKS[self.name] > PERIOD / 2
        for f in range(P):
            self.adopt(f, now, np.float32(1) if slow else KEEP)
            is_newest = self.versions[f] == len(self.broker.publications[f])
            assert not is_newest or np.array_equal(self.copies[f], self.broker.published[f])
            if not self.waiting[f] and (slow or (f in self.broker.open and is_newest)):
                gradient, _ = code(self.copies[f] - self.params[f].detach().numpy())
                push = Push(gradient, self.steps - self.pushed[f], now + LATENCY)
                self.waiting[f] = self.broker.inbox[f][self.name] = push
                self.pushed[f] = self.steps

    def adopt(self, f: int, now: int, keep: np.float32) -> None:
        """params = new + keep * (params - old + g) - (0 if merged else g), g the waiting push:
        steps since the snapshot count by `keep`, and a push that still waits stays whole."""
        push, old, new, merged = self.waiting[f], self.copies[f], self.copies[f], False
        for at, change, held in self.broker.publications[f][self.versions[f] :]:
            if at <= now:
                new, merged = new + change, merged or held.get(self.name, 0) is push
                self.versions[f] += 1
        if new is not old:
            g = push.gradient if push else np.zeros_like(old)
            own = self.params[f].detach().numpy() - old + g
            self.params[f].data = torch.from_numpy(new + keep * own - (0 if merged else g))
        self.copies[f] = new
        if push and merged:
            self.waiting[f], self.merged[f] = None, self.merged[f] + push.steps


def loss_of(model: nn.Module, examples: int) -> torch.Tensor:
    x = torch.randn(examples, 16)
    return nn.functional.mse_loss(model(x), x[:, :8].sin() * x[:, 8:])


torch.manual_seed(1)
torch.set_num_threads(1)
sizes = (16, 128), (128, 128), (128, 128), (128, 8)
model = nn.Sequential(*(m for n in sizes for m in (nn.Linear(*n, bias=False), nn.GELU())))[:-1]
broker = Broker(model)
learners = [Learner(name, deepcopy(model), broker) for name in STEP_TICKS]
for now in range(1, TICKS + 1):
    broker.turn(now)
    for learner in (each for each in learners if now % STEP_TICKS[each.name] == 0):
        learner.optimizer.zero_grad()
        torch.autograd.backward(loss_of(learner.model, BATCH))
        learner.optimizer.step()
        learner.boundary(now)
    if now % 1000 == 0:
        loss, bits = loss_of(model, 4096).item(), broker.bits / sum(map(len, broker.publications))
        print(f"tick {now}: loss {loss:.4f}, {bits:.2f} bits per parameter and publication")
for each in learners:
    print(f"{each.name}: {each.steps} steps, {sum(each.merged) / each.steps / P:.1%} merged")
