"""Statuses of a made-up run, at about the sizes and speeds of a real one: no broker, no clock."""

import random

from narrows.proto.messages import (
    DiskStatus,
    FragmentStatus,
    LearnerState,
    LearnerStatus,
    LineStatus,
    MergeStatus,
    QuorumStatus,
    SettingsStatus,
    Status,
)

FRAGMENTS = 24
STEP_TOKENS = 4096


class MadeUpRun:
    """A run of `count` learners, each of which makes a step a second and is sometimes away."""

    def __init__(self, count: int, *, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.learners = {f"site-{index:04d}": LearnerStatus() for index in range(count)}
        for name, each in self.learners.items():
            each.incarnation = f"{name}.00000000"
            each.state = LearnerState.TRAINING
            each.steps_per_s = 1.0
        self.versions = [0] * FRAGMENTS
        self.run_tokens = 0
        self.up_bytes = 0
        self.merges = 0
        self.seconds = 0.0

    def step(self, name: str) -> None:
        """One second of a learner."""
        each = self.learners[name]
        each.since_s += 1.0
        if self._random.random() < 0.002:
            each.state = self._random.choice(list(LearnerState))
            each.since_s = 0.0
        elif self._random.random() < 0.05:
            each.state = LearnerState.TRAINING
        if each.state != LearnerState.TRAINING:
            return
        each.steps += 1
        each.logged_tokens = each.merged_tokens = each.steps * STEP_TOKENS
        each.loss = 2 + 6 / (1 + each.steps / 60) + self._random.gauss(0, 0.05)
        each.contributions += self._random.randrange(3)

    def ask(self) -> Status:
        """The status a second later."""
        self.seconds += 1.0
        for name in self.learners:
            self.step(name)
        self.run_tokens += STEP_TOKENS * len(self.learners)
        self.up_bytes += 1_200_000
        self.merges += 2
        for _ in range(2):
            self.versions[self._random.randrange(FRAGMENTS)] += 1
        training = sum(each.state == LearnerState.TRAINING for each in self.learners.values())
        return Status(
            narrows="0.1.0",
            run_id="madeup",
            epoch="1-00",
            phase="running",
            uptime_s=self.seconds,
            run_tokens=self.run_tokens,
            goal_tokens=10**10,
            tokens_per_s=float(STEP_TOKENS * len(self.learners)),
            left_s=86_400.0,
            period_s=24.0,
            sync_s=0.2,
            merges=self.merges,
            contributions=self.merges * max(1, training),
            last_merge=MergeStatus(0, self.versions[0], 0.4, "everybody", tuple(self.learners)[:4]),
            quorum=QuorumStatus(here=training, ready=training, training=training),
            settings=SettingsStatus(mode="decoupled", fragments=FRAGMENTS),
            line=LineStatus(
                total_up_limit=20e6,
                total_down_limit=20e6,
                up_bits_per_s=9.6e6 + self._random.gauss(0, 3e5),
                down_bits_per_s=1.1e7 + self._random.gauss(0, 3e5),
                up_bytes=self.up_bytes,
                down_bytes=self.up_bytes,
            ),
            disk=DiskStatus(free_bytes=412 << 30, commit_p50_ms=3.0, commit_p99_ms=12.0),
            fragments=tuple(
                FragmentStatus(5_000_000, version, 1.0, "collecting" if index < 2 else "idle")
                for index, version in enumerate(self.versions)
            ),
            learners={name: msgspec_copy(each) for name, each in self.learners.items()},
        )


def msgspec_copy(each: LearnerStatus) -> LearnerStatus:
    """A copy: the next second must not change a status that was given away."""
    return LearnerStatus(*(getattr(each, field) for field in each.__struct_fields__))
