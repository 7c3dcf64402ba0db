"""Bits on the wire of a real run: small, but broker, learners and arithmetic are the real ones."""

from __future__ import annotations

import pytest

from narrows.bench.bandwidth.wire import LEARNERS, measure

pytestmark = pytest.mark.slow


def test_a_real_run_takes_the_bits_that_a_plan_says() -> None:
    rows = measure(steps=60, cases=[("nano", 0.5)])
    assert [row.direction for row in rows] == ["up", "down"]
    for row in rows:
        assert row.learners == LEARNERS
        assert row.exchanges > 0
        # The first outer gradients are sparse, and a slow disk leaves few others.
        assert -30 < row.difference_percent < 5
        # First copies make up nearly all that is not an exchange.
        assert row.measured_other_bytes > 0.9 * row.modelled_first_copy_bytes
