"""Trains with hivemind: local SGD, parameters averaged by `DecentralizedAverager`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.utils import get_dht_time

# The environment of another system has no narrows.
sys.path.append(str(Path(__file__).resolve().parents[3] / "src"))

from narrows.bench.peers.member import (
    ROUND_TIMEOUT_S,
    PeerMember,
    PeerTraining,
    stay,
    tell_ready,
    training_of,
)

MATCHMAKING_S = 1.0
"""The default of 5 s is longer than a round of this model takes."""


def start_dht(training: PeerTraining, port: int, initial_peers: list[str]) -> DHT:
    """A node that contacts nobody outside."""
    identity = {"identity_path": str(training.folder / "identity")} if port else {}
    return DHT(
        initial_peers=initial_peers,
        start=True,
        host_maddrs=[f"/ip4/{training.host}/tcp/{port}"],
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
        **identity,
    )


class Rounds:
    """Looks for the group while the member trains; averages when the group is ready."""

    def __init__(self, member: PeerMember, averager: DecentralizedAverager) -> None:
        self.member, self.averager = member, averager
        self.parameters = [p.data for p in member.model.parameters()]
        self.control: Any = None

    def announce(self) -> None:
        self.control = self.averager.step(
            scheduled_time=get_dht_time() + MATCHMAKING_S,
            timeout=ROUND_TIMEOUT_S,
            require_trigger=True,
            wait=False,
        )

    def average(self) -> None:
        """Averages once. A failed round leaves the local parameters, as for hivemind's users."""
        with self.averager.get_tensors() as tensors:
            torch._foreach_copy_(list(tensors), self.parameters)
        try:
            self.control.allow_allreduce()
            group = self.control.result(timeout=2 * ROUND_TIMEOUT_S)
        except Exception as error:
            print(f"step {self.member.step}: {error!r}", flush=True)
            self.control.cancel()
            return
        if group is not None and len(group) > 1:
            self.adopt()
            self.member.exchanged(len(group))

    def adopt(self) -> None:
        with self.averager.get_tensors() as tensors:
            torch._foreach_copy_(self.parameters, list(tensors))

    def catch_up(self) -> None:
        """A member that returns takes the newest average from another one."""
        state = self.averager.load_state_from_peers(timeout=ROUND_TIMEOUT_S)
        if state is not None:
            torch._foreach_copy_(self.parameters, list(state[1]))


def main() -> None:
    training = training_of()
    place = training.folder / "place"
    if training.coordinator:
        dht = start_dht(training, training.port, [])
        place.write_text(str(dht.get_visible_maddrs()[0]))
        tell_ready(training)
        stay()
        dht.shutdown()
        return
    member = PeerMember(training)
    member.wait_for_start()
    dht = start_dht(training, 0, [place.read_text()])
    averager = DecentralizedAverager(
        [p.detach().clone() for p in member.model.parameters()],
        dht,
        start=True,
        prefix="train",
        target_group_size=training.world,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=MATCHMAKING_S / 2,
        allreduce_timeout=ROUND_TIMEOUT_S,
        sender_timeout=ROUND_TIMEOUT_S / 4,
        reducer_timeout=ROUND_TIMEOUT_S / 2,
    )
    rounds = Rounds(member, averager)
    if training.start_step:
        rounds.catch_up()
    while not member.done:
        rounds.announce()
        member.train(training.sync_steps)
        rounds.average()
    member.finish()
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
