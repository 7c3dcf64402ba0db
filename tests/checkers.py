"""Laws of every simulated run, whatever went wrong in it; independent of the state machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from narrows.bench.sim.broker import SimulatedContributor, SimulatedRound
from narrows.bench.sim.learner import TORN, SimulatedLearner
from narrows.bench.sim.records import AdoptionRecord, Failed, Installed
from narrows.bench.sim.simulation import Simulation
from narrows.broker.merging.weights import token_weights
from narrows.proto.messages import Epoch, Phase

THAW_S = 5.0
"""A learner that was stopped has this long to come back before the run ends without it."""


def commits(simulation: Simulation) -> list[SimulatedRound]:
    return [record for record in simulation.trace if isinstance(record, SimulatedRound)]


def check_safety(simulation: Simulation) -> None:
    """Checks the laws that hold even while everything fails."""
    assert not [record for record in simulation.trace if isinstance(record, Failed)]
    check_contributions(simulation)
    check_clock(simulation)
    check_versions(simulation)
    check_digests(simulation)
    check_ledgers(simulation)
    check_merged(simulation)
    check_payloads(simulation)


def check_clock(simulation: Simulation) -> None:
    """The run's clock never has more tokens than were merged."""
    assert simulation.broker is not None
    clock = simulation.broker.syncer.state.clock
    merged = sum(done.tokens for done in contributors(simulation))
    assert 0 <= clock.units <= merged, (clock.units, merged)


def check_contributions(simulation: Simulation) -> None:
    """Each push is merged at most once, at most one per learner and base, never fewer than K."""
    quorum = simulation.config.merge.quorum
    merged: Counter[tuple[str, int]] = Counter()
    for commit in commits(simulation):
        names = [done.learner for done in commit.contributors]
        assert names == sorted(set(names)), f"not one contribution per name, in order: {names}"
        assert len(names) >= quorum, f"{len(names)} contributors, quorum {quorum}"
        merged.update((done.incarnation, done.push_id) for done in commit.contributors)
        work = [(done.tokens, done.steps) for done in commit.contributors]
        assert min(min(pair) for pair in work) >= 1, work
        weights = token_weights(work, rule="tokens")
        assert abs(sum(weights) - 1.0) < 1e-12, weights
        assert min(weights) > 0.0
    twice = [push for push, count in merged.items() if count > 1]
    assert not twice, f"merged more than once: {twice}"


def check_versions(simulation: Simulation) -> None:
    """Versions rise by one within an epoch at the broker, and only rise at each learner."""
    newest: dict[tuple[Epoch, int], int] = {}
    for commit in commits(simulation):
        key = (commit.epoch, commit.fragment)
        assert commit.version == newest.get(key, commit.version - 1) + 1, commit
        newest[key] = commit.version
    adopted: dict[tuple[str, Epoch, int], int] = {}
    over: set[tuple[str, Epoch, int]] = set()
    for record in simulation.trace:
        if isinstance(record, AdoptionRecord):
            place = (record.incarnation, record.epoch, record.fragment)
            assert place not in over, record
            before = adopted.get(place, -1)
            # The same version again only as the last one: the run's end undoes a late step.
            assert record.version >= before, record
            if record.version == before:
                over.add(place)
            adopted[place] = record.version


def check_digests(simulation: Simulation) -> None:
    """Within an epoch equal (fragment, version) means equal bytes, at the broker and everywhere."""
    digests: dict[tuple[Epoch, int, int], int] = {}
    for record in simulation.trace:
        if isinstance(record, SimulatedRound | Installed | AdoptionRecord):
            key = (record.epoch, record.fragment, record.version)
            assert digests.setdefault(key, record.digest) == record.digest, record


def check_ledgers(simulation: Simulation) -> None:
    """No learner believes that more of its tokens were merged than were. If the broker never died,
    learners that left in order know exactly which were; but a push that was withdrawn too late is
    merged, and the next one to the same round refused: these tokens a ledger counts as refused."""
    merged: Counter[str] = Counter()
    for done in contributors(simulation):
        merged[done.incarnation] += done.tokens
    one_epoch = len({commit.epoch for commit in commits(simulation)}) <= 1
    for learner in (*simulation.learners.values(), *simulation.ended.values()):
        ledger = learner.session.fragments.ledger.total()
        told, actual = ledger.merged, merged[learner.incarnation]
        assert told <= actual, (learner.spec.name, told, actual)
        if one_epoch and learner.spec.name in simulation.ended:
            assert actual <= told + ledger.refused, (learner.spec.name, told, actual)


def check_merged(simulation: Simulation) -> None:
    """Tokens that a learner believes merged are in the history of the parameters that it holds,
    whatever became of the lives of the broker that it followed."""
    made = {commit.digest: commit for commit in commits(simulation)}
    for learner in simulation.learners.values():
        for index, adopted in learner.parameters.items():
            # After a copy that failed, the parameters are due to be the published copy.
            digest = (learner.published[index] if adopted == TORN else adopted)[1]
            held = 0
            while digest in made:
                merged = made[digest].contributors
                held += sum(c.tokens for c in merged if c.incarnation == learner.incarnation)
                digest = made[digest].base
            told = learner.session.fragments[index].account.merged
            assert told <= held, f"{learner.spec.name}, fragment {index}: {told} of {held}"


def contributors(simulation: Simulation) -> Iterator[SimulatedContributor]:
    for commit in commits(simulation):
        yield from commit.contributors


def check_payloads(simulation: Simulation) -> None:
    """Every payload that a process still holds is part of something unfinished."""
    broker = simulation.broker
    assert broker is not None
    syncer, held = broker.syncer, set(broker.store) - broker.busy
    needed = set(syncer.founding.held_handles())
    for round_ in syncer.state.rounds.values():
        for incoming in round_.incoming.values():
            needed.update(incoming.assembly.handles)
        for done in round_.contributed.values():
            needed.update(done.handles)
    assert held <= needed, f"broker leaks {sorted(held - needed)}"
    for learner in simulation.ended.values():
        assert not learner.store, f"{learner.spec.name} leaks {sorted(learner.store)}"
    for learner in simulation.learners.values():
        parts = {handle for each in learner.session.fragments for handle in each.held_handles()}
        assert set(learner.store) <= parts, f"{learner.spec.name} leaks"


def check_end(simulation: Simulation, hanging: str = "") -> None:
    """At the goal everybody has left with the broker's final model, except the one that hangs."""
    assert simulation.finished, "the run does not end"
    broker = simulation.broker
    assert broker is not None
    assert broker.syncer.state.phase.stored is Phase.ENDED
    assert not broker.store or set(broker.store) == broker.busy
    check_left_out(simulation, hanging)
    heads = {i: (h.version, h.digest) for i, h in enumerate(broker.syncer.state.heads)}
    for learner in simulation.ended.values():
        assert learner.parameters == heads, f"{learner.spec.name} has not the final model"
    assert broker.durable is not None and broker.durable.phase is Phase.ENDED
    assert tuple(broker.syncer.state.heads) == broker.durable.heads


def check_left_out(simulation: Simulation, hanging: str) -> None:
    """Only learners that hang are left out, and the broker's last message says so."""
    told = simulation.finished
    # Whoever was stopped for so long that it counted as dead when the run ended has missed it.
    thawed_s = simulation.clock.now - THAW_S
    running = {n: each for n, each in simulation.learners.items() if each.frozen_until < thawed_s}
    left_out = [name for name in running if name != hanging]
    assert not left_out, f"still running: {left_out}"
    broker = simulation.broker
    assert broker is not None
    heads = {i: (h.version, h.digest) for i, h in enumerate(broker.syncer.state.heads)}
    lacking = [name for name, learner in running.items() if learner.parameters != heads]
    unnamed = [name for name in lacking if f"{name} (fragment" not in told]
    assert not unnamed, f"without the final model and not named: {unnamed}; said was: {told}"


def check_progress(simulation: Simulation, since_s: float) -> None:
    """After the faults merges go on, with nearly all learners, and all learners adopt them."""
    names = simulation.learners.keys()
    late = [commit for commit in commits(simulation) if commit.at_s >= since_s]
    fragments = simulation.config.fragments.count
    assert len(late) >= 2 * fragments, f"only {len(late)} merges since {since_s} s"
    mean = sum(len(commit.contributors) for commit in late) / len(late)
    # Lines may carry only twice what the fastest rounds need: some pushes come too late for theirs.
    assert mean >= 0.75 * len(names), f"{mean:.2f} of {len(names)} contribute"
    broker = simulation.broker
    assert broker is not None
    for learner in simulation.learners.values():
        check_up_to_date(learner, broker.syncer.state.versions)


def check_up_to_date(learner: SimulatedLearner, versions: tuple[int, ...]) -> None:
    adopted = tuple(each.adopted for each in learner.session.fragments)
    behind = max(new - old for new, old in zip(versions, adopted, strict=True))
    assert behind <= 1, f"{learner.spec.name} has adopted {adopted} of {versions}"
