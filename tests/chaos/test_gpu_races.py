"""A GPU under pressure: what is encoded beside training has the kernels' bits, and harms nothing.

Training queues more than the GPU has done, in memory of the size of a fragment, and gives it back
at once. The allocator hands such memory out again while kernels still wait to write to it: encoding
that took it from training's stream would be overwritten, or would overwrite an activation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from narrows.broker.config import BrokerConfig
from narrows.broker.shared_settings import settings
from narrows.learner.module.gpu import DeviceParameters, DeviceSnapshot
from narrows.learner.transport.push import PushWork, Residuals, encode_push
from narrows.proto.codec import F32
from narrows.proto.codec.codecs import warm_up
from narrows.proto.codec.transfer import EncodedChunk
from narrows.proto.fragments import Fragment, build_table

ROWS, COLUMNS, TENSORS = 2048, 4096, 4
"""33 M parameters in fragments of 8 M."""
PUSHES = 6
"""Pushes of each fragment."""
AHEAD_STEPS = 4
"""Steps that training queues before it waits for one."""
MULTIPLICATIONS = 24
"""Per step, of bfloat16 matrices of 4096 x 4096: some 5 ms on a large GPU."""
SETTINGS = settings(BrokerConfig())


class Training:
    """Steps on the default stream; `wrong` counts elements of activations that others changed."""

    def __init__(self, device: torch.device, elements: int) -> None:
        self.device, self.elements = device, elements
        self.matrix = torch.eye(4096, device=device, dtype=torch.bfloat16)
        self.wrong = torch.zeros((), device=device, dtype=torch.int64)
        self.steps = 0
        self._queued: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """Two activations, each written late and looked at later, then given back."""
        while len(self._queued) >= AHEAD_STEPS:
            self._queued.popleft().synchronize()
        self.steps += 1
        for mark in (self.steps, -self.steps):
            activation = torch.empty(self.elements, device=self.device)
            self._multiply()
            activation.fill_(mark)
            self._multiply()
            self.wrong += (activation != mark).sum()
            del activation
        self._queued.append(mark_on(self.device))

    def _multiply(self) -> None:
        for _ in range(MULTIPLICATIONS // 4):
            self.matrix = self.matrix @ self.matrix


@dataclass
class Times:
    """Times in milliseconds, one entry each."""

    encode: list[float] = field(default_factory=list[float])
    capture_thread: list[float] = field(default_factory=list[float])
    capture_stream: list[float] = field(default_factory=list[float])
    step: list[float] = field(default_factory=list[float])
    """Times of a training step while pushes were encoded."""


def mark_on(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def milliseconds(start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
    stop.synchronize()
    return float(start.elapsed_time(stop))


class Rig:
    """The parameters on the GPU, and per fragment the residuals there and on the host."""

    def __init__(self, device: torch.device, codec: str) -> None:
        module = nn.Module()
        for index in range(TENSORS):
            values = torch.zeros(ROWS, COLUMNS, device=device)
            module.register_parameter(f"weight{index}", nn.Parameter(values))
        self.device, self.codec = device, codec
        self.parameters = DeviceParameters(module)
        self.table = build_table(self.parameters.layout, TENSORS)
        self.there, self.here = Residuals(True), Residuals(True)
        self.times = Times()
        self._random = np.random.default_rng(7)
        self._push_id = 0

    def works(self, part: Fragment) -> tuple[PushWork, PushWork]:
        """A push to be encoded on the GPU, and its twin for the host."""
        base = self._random.standard_normal(part.elements, np.float32)
        self.parameters.adopt(part, base)
        with torch.no_grad():
            for parameter in self.parameters.module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        local = np.empty(part.elements, np.float32)
        self.parameters.snapshot(part, local)
        start, started = mark_on(self.device), time.perf_counter()
        snapshot = self.parameters.capture(part)
        self.times.capture_thread.append(1000 * (time.perf_counter() - started))
        self.times.capture_stream.append(milliseconds(start, mark_on(self.device)))
        self._push_id += 1
        return (
            self._work(part, base, snapshot, self.there),
            self._work(part, base, local, self.here),
        )

    def _work(
        self, part: Fragment, base: F32, local: F32 | DeviceSnapshot, residuals: Residuals
    ) -> PushWork:
        residual = residuals.of(part.index)
        return PushWork(self._push_id, part, 0, base, local, residual, self.codec, 0.5)

    def encode(self, work: PushWork) -> list[EncodedChunk]:
        chunks: list[EncodedChunk] = []
        started = time.perf_counter()
        encode_push(work, SETTINGS, self.parameters.layout, chunks.append)
        if isinstance(work.local, DeviceSnapshot):
            self.times.encode.append(1000 * (time.perf_counter() - started))
        return chunks


def trained(
    training: Training, steps_min: int, futures: Sequence[Future[list[EncodedChunk]]] = ()
) -> list[float]:
    """Trains until everything is encoded; returns milliseconds per step."""
    marks = [mark_on(training.device)]
    while len(marks) <= steps_min or not all(future.done() for future in futures):
        training.step()
        marks.append(mark_on(training.device))
    return [milliseconds(start, stop) for start, stop in pairwise(marks)]


def rounds(rig: Rig, training: Training, pool: ThreadPoolExecutor) -> Iterator[str]:
    """Differences of the pushes from their twins; empty if there are none."""
    for number in range(PUSHES):
        for first in range(0, len(rig.table), 2):
            pairs = [rig.works(part) for part in rig.table[first : first + 2]]
            training.step()  # Queued, and its memory given back, before anything is encoded.
            futures = [pool.submit(rig.encode, there) for there, _ in pairs]
            rig.times.step += trained(training, 1, futures)
            torch.cuda.synchronize(rig.device)
            merged = number % 3 != 1
            for (there, here), future in zip(pairs, futures, strict=True):
                name = f"push {there.push_id} of fragment {there.fragment.index}"
                if future.result() != rig.encode(here):
                    yield f"{name} is coded otherwise"
                next_residual = there.next_residual
                assert isinstance(next_residual, Tensor) and isinstance(
                    here.next_residual, np.ndarray
                )
                differ = int((next_residual.cpu().numpy() != here.next_residual).sum())
                if differ:
                    of = f"{differ:,} of {here.next_residual.size:,} elements"
                    yield f"{name} leaves otherwise: {of}"
                rig.there.settle(there, merged=merged)
                rig.here.settle(here, merged=merged)


def report(rig: Rig, idle: Times, before: list[float]) -> str:
    def middle(values: list[float]) -> float:
        return float(np.median(values))

    gigabytes = 4 * rig.table[0].elements / 1e9
    times, step = rig.times, middle(before)
    return (
        f"\n{rig.codec} on {torch.cuda.get_device_name(rig.device)}, fragments of"
        f" {gigabytes:.3f} GB:\n"
        f"  encoding alone     {gigabytes / middle(idle.encode) * 1000:.2f} GB/s"
        f" ({middle(idle.encode):.1f} ms)\n"
        f"  beside training    {gigabytes / middle(times.encode) * 1000:.2f} GB/s"
        f" ({middle(times.encode):.1f} ms, two at a time)\n"
        f"  a training step    {step:.2f} ms alone, {middle(times.step):.2f} ms beside encoding"
        f" ({100 * (middle(times.step) / step - 1):+.1f}%, {len(times.step)} steps)\n"
        f"  a capture holds up the thread {middle(times.capture_thread):.3f} ms,"
        f" its stream {middle(times.capture_stream):.3f} ms"
    )


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("codec", ["int4-zstd", "int8-zstd"])
def test_a_gpu_under_pressure_encodes_the_kernels_bits(
    codec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # With several GPUs not the one that is current: a worker's thread begins on that.
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    warm_up()
    rig = Rig(device, codec)
    training = Training(device, rig.table[0].elements)
    with ThreadPoolExecutor(2) as pool:
        for part in rig.table:  # Alone, and the first one to warm up.
            pool.submit(rig.encode, rig.works(part)[0]).result()
        idle, rig.times = Times(rig.times.encode[1:]), Times()
        before = trained(training, 20)
        wrong = list(rounds(rig, training, pool))
    with capsys.disabled():
        print(report(rig, idle, before), flush=True)
    assert wrong == []
    assert int(training.wrong) == 0, "encoding wrote into activations"
