"""The simulator with real models in it: what settings and mishaps do to the loss of a run.

The state machines, the merge, the codecs and the outer optimizer are the real ones; only sockets,
processes and time are simulated. The same arguments give the same run on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal, TypeAlias

import numpy as np
import torch

from narrows.bench.codec.codings import Coding
from narrows.bench.sim.broker import SimulatedBroker
from narrows.bench.sim.learner import LearnerSpec, SimulatedLearner
from narrows.bench.sim.otherwise import encode_otherwise
from narrows.bench.sim.payloads import digest_of
from narrows.bench.sim.simulation import Simulation
from narrows.bench.sim.virtual import Faults
from narrows.broker.config import BrokerConfig
from narrows.broker.merging import FragmentState, GlobalModel, policy_of, version_zero
from narrows.broker.syncer import Resumed
from narrows.broker.syncer import events as broker_events
from narrows.learner.module import ModuleParameters, ramp_steps
from narrows.learner.reference.corpus import Bytes, Corpus, Reader
from narrows.learner.reference.gpt import GPT, learning_rate, set_learning_rate, token_tensor
from narrows.learner.session import events as learner_events
from narrows.learner.transport import PushWork, Residuals, encode_push
from narrows.proto import messages as msg
from narrows.proto.codec import (
    F32,
    BitControl,
    DecodedChunk,
    EncodedChunk,
    decode_chunk,
    make_bit_control,
)
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.fragments import Fragment

Adoption: TypeAlias = Literal["overwrite", "blend", "carry", "lean"]
Optimizers: TypeAlias = Callable[[GPT, float], Sequence[torch.optim.Optimizer]]
ModelMaker: TypeAlias = Callable[
    [BrokerConfig, Sequence[Fragment], Sequence[FragmentState]], GlobalModel
]
Poison: TypeAlias = Callable[[F32, F32, Random], F32]
"""A poisoned snapshot out of base and honest snapshot, both (n,)."""
Lie: TypeAlias = Callable[[msg.Push], msg.Push]


@dataclass(frozen=True)
class Training:
    """The training that the learners of a run do between two exchanges."""

    corpus: Corpus
    make_model: Callable[[], GPT]
    make_optimizers: Optimizers
    peak_learning_rate: float
    batch: int
    seed: int
    """Seed of the order of the text."""
    adoption: Adoption = "overwrite"
    """blend: half own, half published. carry: what was trained since the snapshot stays. lean: the
    residual of a push stays in the parameters, not in memory of its own."""
    ramp: bool = True
    """A learner without inner state begins with small steps and contributes after them."""
    poison: Mapping[str, Poison] = field(default_factory=dict[str, Poison])
    """Poison by the name of the learner that sends it."""
    lies: Mapping[str, Lie] = field(default_factory=dict[str, Lie])
    """Lies in the place of the announcements of pushes, by the name of the learner."""
    texts: Mapping[str, Bytes] = field(default_factory=dict[str, Bytes])
    """Training text by the name of a learner that reads another one than the corpus."""
    make_global: ModelMaker = GlobalModel
    coding: Coding | None = None
    """Codes the pushes in place of a codec."""


@dataclass
class Shelf:
    """The values behind the simulator's messages, by the name that a message carries."""

    founding: dict[int, F32] = field(default_factory=dict[int, F32])
    pushes: dict[str, list[tuple[int, DecodedChunk]]] = field(
        default_factory=dict[str, list[tuple[int, DecodedChunk]]]
    )
    published: dict[tuple[int, int], F32] = field(default_factory=dict[tuple[int, int], F32])
    """By fragment and version."""
    up_bits: int = 0
    up_elements: int = 0
    """Payload of all pushes, merged or not, headers left out."""
    down_bits: int = 0
    down_elements: int = 0
    """Payload of all publications, once."""
    steps: int = 0
    """Inner steps of all learners."""


class TrainedLearner(SimulatedLearner):
    """One incarnation of a learner that trains."""

    def __init__(self, run: TrainedSimulation, spec: LearnerSpec) -> None:
        self.training, self.shelf = run.training, run.shelf
        self.model = self.training.make_model()
        self.parameters_of = ModuleParameters(self.model)
        self.optimizers = self.training.make_optimizers(self.model, 1.0)
        newcomer = run.has_begun and self.training.ramp
        self.ramp_steps = ramp_steps(self.optimizers) if newcomer else 0
        super().__init__(
            run.clock, run.random, run.faults, run,
            LearnerSpec(
                spec.name, spec.step_s, spec.tokens_per_step, spec.joins_at_s, self.ramp_steps
            ),
            run.layout,
        )  # fmt: skip
        self._run = run
        self._reader: Reader | None = None
        self._residuals = Residuals(False)
        self._rates: list[BitControl] = []
        self._works: dict[int, PushWork] = {}
        self._snapshots: dict[int, F32] = {}
        self._in_parameters: dict[int, F32] = {}

    def _step(self) -> None:
        if self._reader is None:
            self._reader = Reader(
                self.training.texts.get(self.spec.name, self.training.corpus.train),
                batch=self.training.batch,
                context=self.model.config.context,
                name=self.spec.name,
                seed=self.training.seed,
                start_batch=int(self._progress() * self._run.run_steps),
            )
        scale = min(1.0, (self.session.view().steps + 1) / max(1, self.ramp_steps))
        rate = learning_rate(self._progress(), self.training.peak_learning_rate) * scale
        x, y = next(self._reader)
        loss = self.model.loss(token_tensor(x), token_tensor(y))
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad()
        self.shelf.steps += 1
        super()._step()

    def _progress(self) -> float:
        return self.session.view().run_tokens(self.clock.now) / self._run.config.run.goal_tokens

    # Founding, pushing.

    def _local(self, fragment: int) -> F32:
        part = self._table[fragment]
        local = np.empty(part.elements, np.float32)
        self.parameters_of.snapshot(part, local)
        return local

    def _open_streams(self, effect: learner_events.OpenStreams) -> None:
        super()._open_streams(effect)
        if not self._rates:
            settings = effect.settings
            self._residuals = Residuals(settings.error_feedback)
            self._rates = [
                make_bit_control(
                    settings.push_codec, rho=settings.push_rho, bits=settings.push_bits
                )
                for _ in effect.table
            ]

    def _send_founding(self, effect: learner_events.SendFounding) -> None:
        digest = digest_of("version 0", self.incarnation, effect.fragment)
        self.shelf.founding[digest] = self._local(effect.fragment)
        super()._send_founding(effect)

    def encode(self, effect: learner_events.Snapshot) -> str:
        fragment, settings = effect.fragment, self.session.settings
        assert settings is not None
        base = self.shelf.published[fragment, effect.base_version]
        local = self._snapshots[fragment] = self._local(fragment)
        if self.spec.name in self.training.poison:
            local = self.training.poison[self.spec.name](base, local, self.random)
        lean = self.training.adoption == "lean"
        residual = None if lean else self._residuals.of(fragment)
        rate, coding = self._rates[fragment], self.training.coding
        work = PushWork(
            effect.push_id, self._table[fragment], effect.base_version, base, local, residual,
            "raw32" if coding else rate.codec, rate.rho,
        )  # fmt: skip
        try:
            if coding:
                size = encode_otherwise(coding, work, settings.chunk_elements)
            else:
                encode_push(work, settings, self._run.layout, work.chunks.append)
                size = sum(len(chunk.payload) for chunk in work.chunks)
        except LocalProtocolError as error:
            if error.code is not ErrorCode.NOT_FINITE:
                raise
            return error.message  # The learner has diverged.
        if rate.target_bits is not None:
            rate.observe(work.bits_per_param, work.error_ratio())
        self._works[effect.push_id] = work
        source = f"{self.spec.name}/{self.incarnation}/{effect.push_id}"
        self.shelf.pushes[source] = [
            (chunk.offset, decode_chunk(work.fragment, work.codec, *_content(chunk)))
            for chunk in work.chunks
        ]
        self.shelf.up_bits += 8 * size
        self.shelf.up_elements += work.fragment.elements
        return ""

    def _send(self, effect: learner_events.Send) -> None:
        if (lie := self.training.lies.get(self.spec.name)) and isinstance(effect.message, msg.Push):
            effect = learner_events.Send(lie(effect.message))
        super()._send(effect)

    def _settle(self, effect: learner_events.SettlePush) -> None:
        super()._settle(effect)
        work = self._works.pop(effect.push_id, None)
        if work is not None:
            self._residuals.settle(work, merged=effect.merged)
            if effect.merged and isinstance(work.next_residual, np.ndarray):
                self._in_parameters[work.fragment.index] = work.next_residual

    # Adopting.

    def _adopt(self, effect: learner_events.Adopt) -> None:
        super()._adopt(effect)
        fragment = effect.fragment
        values = self.shelf.published[fragment, effect.version]
        before = self._snapshots.pop(fragment, None)
        residual = self._in_parameters.pop(fragment, None)
        match self.training.adoption:
            case "blend":
                if before is not None:
                    values = np.float32(0.5) * (values + self._local(fragment))
            case "carry":
                if before is not None:
                    values = values + (self._local(fragment) - before)
            case "lean":
                if residual is not None:
                    values = values - residual
            case "overwrite":
                pass
        self.parameters_of.adopt(self._table[fragment], values)


def _content(chunk: EncodedChunk) -> tuple[int, int, bytes]:
    return chunk.offset, chunk.count, chunk.payload


class TrainedBroker(SimulatedBroker):
    """The broker of a trained run; it does not restart."""

    def __init__(self, run: TrainedSimulation, epoch: msg.Epoch, durable: Resumed | None) -> None:
        assert durable is None, "a trained broker has one life"
        # What the watch says of each fragment's newest round.
        self._suspects: dict[int, Mapping[str, str]] = {}
        self._forgiven: dict[int, frozenset[str]] = {}
        super().__init__(
            run.clock, run.random, run.faults, run, run.config, epoch=epoch, durable=None
        )
        self._run = run

    def _found(self, effect: broker_events.Found) -> None:
        assert effect.handles is not None
        run = self._run
        values = [run.shelf.founding[self.store[part[0]].result] for part in effect.handles]
        for fragment, each in enumerate(values):
            run.shelf.published[fragment, 0] = each
        table = self.syncer.state.table
        run.model = run.training.make_global(run.config, table, [*map(version_zero, values)])
        super()._found(effect)

    def _merge(self, effect: broker_events.StartMerge) -> None:
        run, model = self._run, self._run.model
        assert model is not None
        chunks: dict[int, tuple[int, DecodedChunk]] = {}
        for done in effect.contributions:
            source = f"{done.learner}/{done.incarnation}/{done.push_id}"
            chunks.update(zip(done.handles, run.shelf.pushes.pop(source), strict=True))
        outcome = model.merge(
            effect.fragment, effect.version, effect.contributions, chunks, policy_of(model.config)
        )
        model.install(outcome)
        evidence = outcome.merged.evidence
        self._suspects[effect.fragment] = model.watch.suspects(evidence)
        self._forgiven[effect.fragment] = model.watch.forgiven(evidence)
        run.committed(effect.fragment, outcome.state.published, effect.version)
        run.shelf.down_bits += 8 * sum(len(c.payload) for c in outcome.publication.chunks)
        run.shelf.down_elements += model.table[effect.fragment].elements
        super()._merge(effect)

    def _judged(self, merged: broker_events.Merged) -> broker_events.Merged:
        return replace(
            merged,
            suspects=self._suspects[merged.fragment],
            forgiven=self._forgiven[merged.fragment],
        )


VERSIONS_KEPT = 64
"""Published copies on the shelf: a learner further behind is sent the newest one."""


class TrainedSimulation(Simulation):
    """A seeded run of `goal_tokens` with real models; `model` is the global one."""

    def __init__(
        self,
        config: BrokerConfig,
        seed: int,
        faults: Faults,
        learners: Sequence[LearnerSpec],
        training: Training,
        *,
        on_commit: Callable[[TrainedSimulation], None] = lambda run: None,
    ) -> None:
        """`on_commit` is called after each merge. The configuration needs a goal and
        `tokens_per_run_step`."""
        self.training, self.shelf = training, Shelf()
        self.model: GlobalModel | None = None
        self._on_commit_do = on_commit
        self.run_steps = config.run.goal_tokens // config.run.tokens_per_run_step
        layout = ModuleParameters(training.make_model()).layout
        super().__init__(config, seed, faults, learners, layout=layout)

    @property
    def has_begun(self) -> bool:
        """Some version has been merged: whoever starts now is a newcomer."""
        return self.model is not None and any(f.version for f in self.model.fragments)

    def make_broker(self, epoch: msg.Epoch, durable: Resumed | None) -> SimulatedBroker:
        return TrainedBroker(self, epoch, durable)

    def make_learner(self, spec: LearnerSpec) -> SimulatedLearner:
        return TrainedLearner(self, spec)

    def committed(self, fragment: int, published: F32, version: int) -> None:
        self.shelf.published[fragment, version] = published
        self.shelf.published.pop((fragment, version - VERSIONS_KEPT), None)
        self._on_commit_do(self)

    def write_global(self, target: GPT) -> None:
        """Copies the global parameters, the model that users evaluate, into `target`."""
        assert self.model is not None
        parameters = ModuleParameters(target)
        for part, state in zip(self.model.table, self.model.fragments, strict=True):
            parameters.adopt(part, state.global_)
