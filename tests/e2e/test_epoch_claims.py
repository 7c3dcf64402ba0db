"""A member that claims epochs of its own making does nothing to a broker that serves."""

from __future__ import annotations

from pathlib import Path

from peer import Peer, World
from running import broker_config, live_broker

from narrows.proto import messages as msg

WILD = [(2**62, 2**62, 2**62), (2, 0, 0), (1, 2**62, 1), (9, 9, 9)]


def test_wild_epochs_of_a_member_stop_nobody(world: World, mallory: Peer) -> None:
    mallory.send(mallory.hello())
    welcome = mallory.receive(msg.Welcome)
    run_id, own = welcome.run_id, welcome.epoch_proof
    for proof in ("", own, "0" * 64):
        for epoch in WILD:
            mallory.send(mallory.hello(run_id=run_id, epoch=epoch, epoch_proof=proof))
            if epoch[0] > welcome.epoch[0]:
                refuse = mallory.receive(msg.Refuse)
                assert refuse.code == "wrong_epoch" and "does not prove" in refuse.message
            else:
                assert mallory.receive(msg.Welcome).epoch == welcome.epoch
    assert not world.service.syncer.lifecycle.stopping
    assert mallory.status().epoch == welcome.epoch


def test_the_proof_of_a_successor_stops_a_broker(tmp_path: Path) -> None:
    """Two brokers of one run would make two models."""
    with (
        live_broker(broker_config(tmp_path, wan__streams=1)) as service,
        Peer(service.wires.address, "a") as a,
    ):
        a.join()
        state = service.syncer.state
        epoch = (state.epoch[0] + 1, 1, 1)
        proof = state.secret.proof(state.run_id, epoch)
        a.send(a.hello(run_id=state.run_id, epoch=epoch, epoch_proof=proof))
        assert a.receive(msg.Refuse).remedy == "this broker was replaced: stop it"
        assert "serves this run now" in a.receive(msg.Bye).reason
