"""Modules that are mutated, and the tests of each, the most telling first."""

from __future__ import annotations

from dataclasses import dataclass

FAST = ("tests/unit", "tests/property", "tests/protocol", "tests/golden", "tests/test_paper.py")
"""Here is what a mutant has to survive besides the tests of its module: all that import it."""

LINES = ("tests/protocol/test_lines.py",)
DECISIONS = ("tests/protocol/test_transcripts.py", "tests/protocol/test_seeds.py")
SOCKETS = (
    "tests/e2e/test_client.py", "tests/e2e/test_wires.py", "tests/e2e/test_learner.py",
    "tests/e2e/test_bad_data.py", "tests/e2e/test_bad_messages.py", "tests/e2e/test_bad_frames.py",
    "tests/e2e/test_journal.py", "tests/e2e/test_oracles.py", "tests/e2e/test_commands.py",
)  # fmt: skip
PROCESSES = (
    "tests/e2e/test_client.py", "tests/e2e/test_processes.py", "tests/chaos/test_broker_kills.py",
    "tests/chaos/test_proxy.py", "tests/chaos/test_connections.py",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One module and its tests."""

    path: str
    near: tuple[str, ...]
    """Fast tests of the module itself."""
    sockets: tuple[str, ...] = SOCKETS
    """Quick ones with real sockets and files."""
    slow: tuple[str, ...] = PROCESSES
    """Tests of which only those that are marked slow run."""


def _unit(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/test_{name}.py" for name in names)


TARGETS = {
    "syncer": Target(
        "broker/syncer/machine.py",
        (
            *_unit("intake", "admission", "bad_messages", "quorum", "reload", "members", "shares"),
            *DECISIONS,
        ),
    ),
    "intake": Target(
        "broker/syncer/pushes.py",
        (*_unit("intake", "rounds", "bad_messages", "quorum", "reload", "admission"), *DECISIONS),
    ),
    "scheduler": Target(
        "broker/syncer/scheduler.py",
        (*_unit("quorum", "intake", "rounds", "reload", "admission"), *DECISIONS),
    ),
    "downlink": Target(
        "broker/process/downlink.py",
        (*_unit("downlink", "reload"), "tests/protocol/test_transcripts.py"),
    ),
    "sender": Target(
        "proto/flow/sender.py",
        (*_unit("sender", "hub", "downlink"), "tests/property/test_sender.py", *LINES),
    ),
    "hub": Target("proto/flow/hub.py", (*_unit("hub", "downlink"), *LINES)),
    "journal": Target(
        "broker/storage/journal.py",
        (
            *_unit("journal"),
            "tests/golden/test_journal.py",
            "tests/property/test_journal.py",
            *_unit("journal_faults"),
        ),
        (
            "tests/e2e/test_journal.py",
            "tests/e2e/test_commands.py",
            "tests/chaos/test_bit_flips.py",
        ),
        ("tests/chaos/test_broker_kills.py", "tests/e2e/test_processes.py"),
    ),
    "merge": Target(
        "broker/merging/merge.py",
        (*_unit("merge"), "tests/golden/test_merge.py", "tests/property/test_merge.py"),
        ("tests/e2e/test_oracles.py", "tests/e2e/test_journal.py"),
        ("tests/unit/test_merge.py", "tests/golden/test_merge.py"),
    ),
    "session": Target(
        "learner/session/machine.py",
        (*_unit("session", "fragment_session", "bad_messages"), *DECISIONS),
    ),
    "fragment": Target(
        "learner/session/fragment.py",
        (*_unit("fragment_session", "session", "ledger", "bad_messages"), *DECISIONS),
    ),
}
