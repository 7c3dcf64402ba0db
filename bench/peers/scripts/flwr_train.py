"""Trains with Flower: FedAvgM at the server, the inner steps of a round at each client."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

# No usage data leave the machine.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import grpc
import torch
from flwr.client import NumPyClient, start_client
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvgM

# The environment of another system has no narrows.
sys.path.append(str(Path(__file__).resolve().parents[3] / "src"))

from narrows.bench.peers.member import (
    OUTER_LR,
    OUTER_MOMENTUM,
    ROUND_TIMEOUT_S,
    PeerMember,
    PeerTraining,
    tell_ready,
    training_of,
)
from narrows.learner.reference.gpt import GPT

RETRY_S = 0.5


def arrays_of(model: GPT) -> list[Any]:
    return [p.detach().numpy().copy() for p in model.parameters()]


def install(model: GPT, arrays: list[Any]) -> None:
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), arrays, strict=True):
            parameter.copy_(torch.from_numpy(array.copy()))


class FlowerMember(NumPyClient):
    """A member: a round is `sync_steps` inner steps from the server's parameters."""

    def __init__(self, member: PeerMember) -> None:
        self.member = member

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, Any]:
        install(self.member.model, parameters)
        # A member that missed rounds goes on where the run stands.
        self.member.step = int(config["step"])
        self.member.train(self.member.training.sync_steps)
        return arrays_of(self.member.model), 1, {}


class Strategy(FedAvgM):
    """FedAvgM that reports each round and keeps the newest parameters."""

    def __init__(self, training: PeerTraining, member: PeerMember) -> None:
        self.training, self.member = training, member
        super().__init__(
            fraction_evaluate=0.0,
            min_fit_clients=1,
            min_available_clients=training.world,
            on_fit_config_fn=lambda number: {"step": self.step_of(number - 1)},
            initial_parameters=ndarrays_to_parameters(arrays_of(member.model)),
            server_learning_rate=OUTER_LR,
            server_momentum=OUTER_MOMENTUM,
        )

    def step_of(self, rounds: int) -> int:
        return self.training.start_step + rounds * self.training.sync_steps

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        if results:
            # All members are there at the start; later nobody is waited for.
            self.min_available_clients = 1
            install(self.member.model, parameters_to_ndarrays(parameters))
            self.member.step = self.step_of(server_round)
            self.member.exchanged(len(results))
        return parameters, metrics


def serve(training: PeerTraining) -> None:
    """A server. One that starts again begins with the first parameters, because it keeps none."""
    member = PeerMember(training)
    rounds = (training.steps - training.start_step) // training.sync_steps
    tell_ready(training)
    start_server(
        server_address=f"{training.host}:{training.port}",
        config=ServerConfig(num_rounds=rounds, round_timeout=ROUND_TIMEOUT_S),
        strategy=Strategy(training, member),
    )
    member.finish()


def main() -> None:
    training = training_of()
    if training.coordinator:
        serve(training)
        return
    member = PeerMember(training)
    member.wait_for_start()
    client, address = FlowerMember(member).to_client(), f"{training.host}:{training.port}"
    while True:
        try:
            start_client(server_address=address, client=client, insecure=True)
            break
        except grpc.RpcError as error:
            # A client ends with its server. Here it comes back, as under a supervisor.
            print(repr(error), flush=True)
            time.sleep(RETRY_S)
    member.finish()


if __name__ == "__main__":
    main()
