"""`narrows bench peers`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path

from narrows.bench.kit.torch_needed import need_torch


def bench_peers(
    *,
    rows: Path = Path("runs/peers.jsonl"),
    json: Path | None = None,
    members: int = 4,
    steps: int = 800,
    sync_steps: int = 20,
    preset: str = "nano",
    step_wait_s: float = 0.02,
    systems: str = "",
) -> None:
    """Measure other systems beside ours: loss, bytes, seconds, and what a SIGKILL does to them.

    Builds an environment for each other system once, in ~/.cache/narrows/peers or
    $NARROWS_PEER_CACHE; one that cannot be built is left out with the reason.

    Parameters
    ----------
    rows
        File that gets one JSON line per run; what is in it is not run again.
    json
        File for the rows of this selection.
    members
        Members of each run, besides the coordinator.
    steps
        Inner steps of each member.
    sync_steps
        H, inner steps between two exchanges; data parallel exchanges in every step.
    preset
        Size of the model, as for `narrows learner`.
    step_wait_s
        Seconds added to every inner step, so that few cores carry many members.
    systems
        Only these, separated by commas, such as "narrows,torchft" (default: all).
    """
    need_torch()
    from narrows.bench.peers.bench import run_peers_bench
    from narrows.bench.peers.systems import PeerPlan

    plan = PeerPlan(members, steps, sync_steps, preset, step_wait_s)
    names = [name.strip() for name in systems.split(",") if name.strip()]
    run_peers_bench(rows, json, plan, systems=names)
