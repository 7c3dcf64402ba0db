"""Trains with torchft: `torchft.local_sgd.DiLoCo` over Gloo, a lighthouse as coordinator."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

# The environment of another system has no narrows.
sys.path.append(str(Path(__file__).resolve().parents[3] / "src"))

from narrows.bench.peers.exchange import use_interface_of
from narrows.bench.peers.member import (
    OUTER_LR,
    OUTER_MOMENTUM,
    ROUND_TIMEOUT_S,
    PeerMember,
    PeerTraining,
    stay,
    tell_ready,
    training_of,
)

MIN_REPLICAS = 1
"""Smallest quorum; torchft also asks for more than half of the live members."""

JOIN_TIMEOUT_MS = 1000
"""Longest wait of a possible quorum for members that are alive but not there yet."""

QUORUM_RETRIES = 3


def manager_of(training: PeerTraining, member: PeerMember, own: TCPStore) -> Manager:
    def state() -> dict[str, Any]:
        return {"model": member.model.state_dict(), "inner": member.optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        member.model.load_state_dict(state["model"])
        member.optimizer.load_state_dict(state["inner"])

    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=ROUND_TIMEOUT_S)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=MIN_REPLICAS,
        use_async_quorum=False,
        timeout=timedelta(seconds=ROUND_TIMEOUT_S),
        quorum_timeout=timedelta(seconds=ROUND_TIMEOUT_S),
        # By default a member ends with the first quorum that times out.
        quorum_retries=QUORUM_RETRIES,
        rank=0,
        world_size=1,
        store_addr=training.host,
        store_port=own.port,
        lighthouse_addr=f"http://{training.host}:{training.port}",
        replica_id=f"member_{training.rank}",
        hostname=training.host,
    )


def main() -> None:
    training = training_of()
    if training.coordinator:
        lighthouse = LighthouseServer(
            bind=f"0.0.0.0:{training.port}",
            min_replicas=MIN_REPLICAS,
            join_timeout_ms=JOIN_TIMEOUT_MS,
        )
        tell_ready(training)
        stay()
        lighthouse.shutdown()
        return
    # State for returning members is offered at the host's name, which may not resolve.
    socket.gethostname = lambda: training.host
    use_interface_of(training.host)
    member = PeerMember(training)
    member.wait_for_start()
    own = TCPStore(training.host, 0, is_master=True, wait_for_workers=False)
    manager = manager_of(training, member, own)
    outer = torch.optim.SGD(
        member.model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True
    )
    with DiLoCo(manager, [member.model], member.optimizer, outer, training.sync_steps):
        while not member.done:
            committed = manager.current_step()
            member.train(training.sync_steps)
            if manager.current_step() > committed:
                member.exchanged(manager.num_participants())
    # A member that is done but still beats would count as one that the others wait for.
    manager.shutdown(wait=False)
    member.finish()


if __name__ == "__main__":
    main()
