"""The whole algorithm once, in one process: three unequal learners and a broker, no network.

Learners train alone. Every few steps each sends its outer gradient (what it learned since the last
published copy) of one fragment, here a tensor, in about 3 bits per parameter. The broker averages
what has come, takes an outer step, and publishes the difference, coded as well. Nobody waits, and
nothing that was learned is thrown away. Time is counted in ticks.
"""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

STEP_TICKS = {"fast": 1, "middle": 3, "slow": 30}  # Ticks that an inner step of a learner takes.
TICKS = 6000
LATENCY = 3  # Ticks that a push or a publication travels.
BATCH = 64
FRAGMENTS = 4
SYNC_PERIOD_STEPS = 16
OUTER_LR = np.float32(0.4)
MOMENTUM = np.float32(0.6)
KEEP = np.float32(0.5)  # Share of the steps after a snapshot that an adoption keeps.
RHO = np.float32(0.5)  # Step of the codes, in units of the root mean square.

# Ticks between two rounds of a fragment: n learners make n * SYNC_PERIOD_STEPS steps meanwhile, at
# whatever speeds.
PERIOD = SYNC_PERIOD_STEPS * len(STEP_TICKS) / sum(1 / ticks for ticks in STEP_TICKS.values())
LAUNCH_TICKS = PERIOD / FRAGMENTS  # Ticks between the rounds of two fragments.

F32 = NDArray[np.float32]


class Push(NamedTuple):
    gradient: F32
    steps: int  # Inner steps that it holds.
    at: int  # Tick at which it reaches the broker.


class Publication(NamedTuple):
    change: F32
    pushes: dict[str, Push]  # The pushes that it holds, by learner.
    at: int  # Tick at which it reaches the learners.


def code(values: F32) -> tuple[F32, float]:
    """Decoded values, and the bits that they took.

    Codes from -7 to 7 are entropy-coded. The scale is a bfloat16, so that scale * code is exact and
    all who add it get the same bits.
    """
    scale = torch.tensor(RHO * np.sqrt(np.mean(values**2))).bfloat16().float().numpy()
    codes = np.zeros_like(values)
    if scale > 0:
        codes = np.clip(np.rint(values / scale), -7, 7)
    share = np.unique(codes, return_counts=True)[1] / codes.size
    return scale * codes, 16 - codes.size * float(share @ np.log2(share))


def average(pushes: list[Push], is_head: bool) -> F32:
    """The weighted mean for the output head, and for one push. Else the radial-directional
    average, in which orthogonal gradients do not shrink: mean norm times mean direction."""
    raw = np.array([(BATCH * push.steps) ** 2 / push.steps for push in pushes], np.float32)
    weights = raw / raw.sum()
    gradients = np.stack([push.gradient for push in pushes])
    mean = np.tensordot(weights, gradients, 1)
    norms = np.sqrt((gradients**2).sum((1, 2)))
    if is_head or len(pushes) < 2 or not norms.all():
        return mean

    direction = np.tensordot(weights / norms, gradients, 1)
    length = min(weights @ norms, len(pushes) ** 0.5 * np.linalg.norm(mean))
    return direction * np.float32(length / np.linalg.norm(direction))


class Broker:
    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())  # Of the model that users evaluate.
        self.published = [each.detach().numpy().copy() for each in self.params]  # At all learners.
        self.momentum = [np.zeros_like(values) for values in self.published]
        self.inbox: list[dict[str, Push]] = [{} for _ in range(FRAGMENTS)]
        self.publications: list[list[Publication]] = [[] for _ in range(FRAGMENTS)]
        self.open: dict[int, int] = {}  # Fragments whose round is open -> tick of its launch.
        self.next = 0  # The fragment whose round is launched next,
        self.next_at = 0.0  # and the tick from which it may be.
        self.bits = 0.0  # Bits per parameter, summed over all rounds.

    def turn(self, now: int) -> None:
        """Launches rounds in turn, at most two at once, and merges those that are due.

        A push may stand on any version. One that comes late is in the next round of its fragment.
        """
        if now >= self.next_at and len(self.open) < 2 and self.next not in self.open:
            self.open[self.next] = now
            self.next_at = now + LAUNCH_TICKS
            self.next = (self.next + 1) % FRAGMENTS

        # A round waits for the learners that can answer it in time, but not long.
        for fragment, launched in list(self.open.items()):
            here = {n: push for n, push in sorted(self.inbox[fragment].items()) if push.at <= now}
            first = min((max(launched, push.at) for push in here.values()), default=now)
            missing = [n for n, t in STEP_TICKS.items() if n not in here and t < LAUNCH_TICKS]
            if here and (not missing or now >= first + LAUNCH_TICKS):
                self.merge(fragment, here, now)

    def merge(self, fragment: int, here: dict[str, Push], now: int) -> None:
        """Takes Nesterov's outer step, and publishes it with the names of the pushes.

        What the code of a publication drops stays in the model, and so is in the next one.
        """
        del self.open[fragment]
        pushes = [self.inbox[fragment].pop(name) for name in here]
        gradient = average(pushes, is_head=fragment == FRAGMENTS - 1)
        momentum = MOMENTUM * self.momentum[fragment] + gradient
        self.momentum[fragment] = momentum
        params = self.params[fragment]
        params.data -= torch.from_numpy(OUTER_LR * (gradient + MOMENTUM * momentum))

        change, bits = code(params.detach().numpy() - self.published[fragment])
        self.published[fragment] = self.published[fragment] + change
        self.publications[fragment].append(Publication(change, here, now + LATENCY))
        self.bits += bits / change.size


class Learner:
    def __init__(self, name: str, model: nn.Module, broker: Broker) -> None:
        self.name = name
        self.model = model
        self.broker = broker
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        self.params = list(model.parameters())
        self.copies = list(broker.published)
        self.versions = [0] * FRAGMENTS
        self.waiting: list[Push | None] = [None] * FRAGMENTS  # Pushes that no version holds yet.
        self.steps = 0
        self.pushed = [0] * FRAGMENTS  # Steps that are in pushes,
        self.merged = [0] * FRAGMENTS  # and those that are in versions.
        # A learner too slow to answer open rounds pushes always, and keeps all that it did
        # meanwhile.
        self.is_slow = STEP_TICKS[name] > PERIOD / 2
        self.keep = np.float32(1) if self.is_slow else KEEP

    def step(self, now: int) -> None:
        """Makes an inner step. Then it adopts what has come, and pushes to the open rounds."""
        self.optimizer.zero_grad()
        torch.autograd.backward(loss_of(self.model, BATCH))
        self.optimizer.step()
        self.steps += 1
        for fragment in range(FRAGMENTS):
            self.adopt(fragment, now)
            is_newest = self.versions[fragment] == len(self.broker.publications[fragment])
            published = self.broker.published[fragment]
            assert not is_newest or np.array_equal(self.copies[fragment], published)
            is_asked = fragment in self.broker.open and is_newest
            if self.waiting[fragment] is None and (is_asked or self.is_slow):
                self.push(fragment, now)

    def push(self, fragment: int, now: int) -> None:
        """Sends what it learned since its copy. The push waits until a publication holds it."""
        gradient, _ = code(self.copies[fragment] - self.params[fragment].detach().numpy())
        push = Push(gradient, self.steps - self.pushed[fragment], now + LATENCY)
        self.waiting[fragment] = push
        self.broker.inbox[fragment][self.name] = push
        self.pushed[fragment] = self.steps

    def adopt(self, fragment: int, now: int) -> None:
        """params = new + keep * (params - old + waiting) - (0 if merged else waiting).

        Steps since the snapshot count by `keep`, and a push that still waits stays whole.
        """
        push = self.waiting[fragment]
        old = self.copies[fragment]
        new = old
        merged = False
        for publication in self.broker.publications[fragment][self.versions[fragment] :]:
            if publication.at <= now:
                new = new + publication.change
                if publication.pushes.get(self.name) is push:
                    merged = True
                self.versions[fragment] += 1
        if new is old:
            return

        self.copies[fragment] = new
        own = self.params[fragment].detach().numpy() - old
        if push is None:
            params = new + self.keep * own
        elif merged:
            params = new + self.keep * (own + push.gradient)
            self.waiting[fragment] = None
            self.merged[fragment] += push.steps
        else:
            params = new + self.keep * (own + push.gradient) - push.gradient
        self.params[fragment].data = torch.from_numpy(params)


def loss_of(model: nn.Module, examples: int) -> torch.Tensor:
    x = torch.randn(examples, 16)
    return nn.functional.mse_loss(model(x), x[:, :8].sin() * x[:, 8:])


torch.manual_seed(1)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Linear(16, 128, bias=False),
    nn.GELU(),
    nn.Linear(128, 128, bias=False),
    nn.GELU(),
    nn.Linear(128, 128, bias=False),
    nn.GELU(),
    nn.Linear(128, 8, bias=False),
)
broker = Broker(model)
learners = [Learner(name, deepcopy(model), broker) for name in STEP_TICKS]
for now in range(1, TICKS + 1):
    broker.turn(now)
    for learner in learners:
        if now % STEP_TICKS[learner.name] == 0:
            learner.step(now)
    if now % 1000 == 0:
        loss = loss_of(model, 4096).item()
        bits = broker.bits / sum(map(len, broker.publications))
        print(f"tick {now}: loss {loss:.4f}, {bits:.2f} bits per parameter and publication")
for learner in learners:
    share = sum(learner.merged) / learner.steps / FRAGMENTS
    print(f"{learner.name}: {learner.steps} steps, {share:.1%} merged")
