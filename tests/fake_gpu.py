"""A GPU that is none: host memory that passes for a device's, and streams that only keep clocks.

Finds races that a real GPU shows once in a thousand runs. Every operation is stamped with the
stream on which it would be queued. What one stream does to memory must be ordered after what others
did to it, by events or by the host's waiting. Memory that is used on another stream than the one it
was allocated on must be known there (`record_stream`), or it is handed out again too soon.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

Clock: TypeAlias = dict["Stream", int]
"""How much of each stream's work has been done by then."""

HOST_READS = frozenset({"cpu", "item", "numpy", "tolist", "__bool__", "__float__"})
"""Functions for which the host waits until the stream is done."""


class Stream:
    """A queue of a device's work."""

    def __init__(self, device: object = None) -> None:
        self.device = torch.device(str(device))
        self.queued = 0
        self.clock: Clock = {}

    def wait_event(self, event: Event) -> None:
        _join(self.clock, event.clock)

    def synchronize(self) -> None:
        gpu = FakeGpu.active
        assert gpu is not None
        _join(gpu.host, {**self.clock, self: self.queued})


class Event:
    """A mark in a stream."""

    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        gpu = FakeGpu.active
        assert gpu is not None
        stream = stream or gpu.current_stream()
        self.clock = {**stream.clock, stream: stream.queued}


class OnGpu(Tensor):
    """A tensor in host memory that says it is on the device."""

    is_cuda = True
    is_cpu = False
    device = torch.device("cuda", 1)

    def record_stream(self, s: Any) -> None:
        """The allocator waits for this stream, too, before it hands the memory out again."""
        gpu = FakeGpu.active
        assert gpu is not None
        gpu.memory_of(self).known.add(s)


@dataclass
class _Memory:
    storage: torch.UntypedStorage
    """Kept, so that its address is not given to another."""
    owner: Stream
    allocated: int
    """Work that the owner had queued by then: it may still use this memory."""
    uses: Clock = field(default_factory=dict["Stream", int])
    writes: Clock = field(default_factory=dict["Stream", int])
    known: set[Stream] = field(default_factory=set["Stream"])


class FakeGpu(TorchFunctionMode):
    """While active: device cuda:1, while cuda:0 is the current device. `races` are sentences."""

    active: FakeGpu | None = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.host: Clock = {}
        self.races: list[str] = []
        self._device = torch.device("cuda", 0)
        self._current = {torch.device("cuda", i): Stream(f"cuda:{i}") for i in range(2)}
        self._memory: dict[int, _Memory] = {}
        for name in ("current_stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(FakeGpu, "active", self)

    def put(self, values: Tensor) -> Tensor:
        """A copy of the values on the device."""
        return values.to(OnGpu.device)

    def memory_of(self, tensor: Tensor) -> _Memory:
        return self._memory[_address(tensor)]

    # In the place of torch.cuda.

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self._current[device or self._device]

    @contextmanager
    def stream(self, stream: Stream) -> Generator[None]:
        before = self._device, self._current[stream.device]
        self._device, self._current[stream.device] = stream.device, stream
        try:
            yield
        finally:
            self._device, self._current[stream.device] = before

    # Every function of torch.

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name: str = getattr(func, "__name__", "")
        given: list[Any] = tree_flatten((args, kwargs))[0]
        inputs = [each for each in given if isinstance(each, OnGpu)]
        to_host = name == "cpu" or "cpu" in given or torch.device("cpu") in given
        kwargs.pop("pin_memory", None)
        result: Any
        with torch.DisableTorchFunctionSubclass():
            cpu = torch.device("cpu")
            given_args, given_kwargs = tree_map_only(torch.device, lambda _: cpu, (args, kwargs))
            result = func(*given_args, **given_kwargs)
            in_place = name.endswith("_") and not name.endswith("__")
            if (inputs or OnGpu.device in given) and not to_host and not in_place:
                result = tree_map_only(Tensor, _on_gpu, result)
        self._account(name, inputs, args[0] if in_place else kwargs.get("out"), result)
        return result

    def _account(self, name: str, inputs: list[Any], target: Any, result: Any) -> None:
        """Stamps what a function read and wrote; nothing for views and for attributes.

        `target`: what was there before and is written to.
        """
        outputs = [each for each in tree_flatten(result)[0] if isinstance(each, OnGpu)]
        new = [each for each in outputs if _address(each) not in self._memory]
        for each in new:
            stream = self.current_stream(OnGpu.device)
            self._memory[_address(each)] = _Memory(each.untyped_storage(), stream, stream.queued)
        written = [*new, *([target] if isinstance(target, OnGpu) else [])]
        if name.startswith("empty") or not (written or name in HOST_READS or name == "copy_"):
            return
        self._queue(name, inputs, written)
        if name in HOST_READS or (inputs and not outputs and name == "to"):
            self.current_stream(OnGpu.device).synchronize()

    def _queue(self, name: str, read: list[Any], written: list[Any]) -> None:
        stream = self.current_stream(OnGpu.device)
        _join(stream.clock, self.host)
        stream.queued += 1
        stream.clock[stream] = stream.queued
        writes = {_address(each) for each in written}
        for address in {_address(each) for each in read} | writes:
            memory = self._memory[address]
            self._check(f"{name}, {'writing' if address in writes else 'reading'}", stream, memory)
            before = memory.uses if address in writes else memory.writes
            late = [s for s, queued in before.items() if stream.clock.get(s, 0) < queued]
            if late:
                self.races.append(f"{name} does not wait for what another stream does there")
            memory.uses[stream] = stream.queued
            if address in writes:
                memory.writes[stream] = stream.queued

    def _check(self, what: str, stream: Stream, memory: _Memory) -> None:
        if stream is memory.owner:
            return
        if stream.clock.get(memory.owner, 0) < memory.allocated:
            self.races.append(f"{what} memory that its own stream may still use")
        if stream not in memory.known:
            self.races.append(f"{what} memory of another stream, without record_stream")


def _on_gpu(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, OnGpu) else tensor.as_subclass(OnGpu)


def _address(tensor: Tensor) -> int:
    with torch.DisableTorchFunctionSubclass(), torch.DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()


def _join(clock: Clock, other: Clock) -> None:
    for stream, queued in other.items():
        clock[stream] = max(clock.get(stream, 0), queued)
