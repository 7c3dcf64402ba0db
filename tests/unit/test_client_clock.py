"""The run's clock as a training loop reads it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from narrows.learner.transport.client import Client


@dataclass
class Clock:
    """A view whose broker may come back with an older clock."""

    tokens: float

    def run_tokens(self, now: float) -> float:
        return self.tokens

    def run_step(self, now: float) -> float:
        return self.tokens / 10

    def progress(self, now: float) -> float:
        return self.tokens / 1000


def test_schedules_never_go_back_with_a_restarted_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(500.0)
    monkeypatch.setattr(Client, "_view", clock)
    client = Client.__new__(Client)
    for name in ("_run_step", "_run_tokens", "_progress"):
        setattr(client, name, 0.0)
    seen = [(client.run_tokens, client.run_step, client.progress)]
    for tokens in (200.0, 600.0):
        clock.tokens = tokens
        seen.append((client.run_tokens, client.run_step, client.progress))
    assert seen == [(500.0, 50.0, 0.5), (500.0, 50.0, 0.5), (600.0, 60.0, 0.6)]
