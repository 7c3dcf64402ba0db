"""Memory that is used again: never while somebody still looks at it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from narrows.proto.codec import buffers
from narrows.proto.codec.buffers import empty_f32, empty_u8, idle_bytes


def address(array: np.ndarray[tuple[int], np.dtype[np.float32]]) -> int:
    return int(array.ctypes.data)


@pytest.fixture(autouse=True)
def no_idle_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(buffers, "_idle", {})


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    array = empty_f32(100_000)
    place, view = address(array), array[10:20]
    del array
    assert idle_bytes() == 0
    assert address(empty_f32(100_000)) != place
    del view
    assert idle_bytes() >= 400_000
    assert address(empty_f32(100_000)) in (place, address(empty_f32(100_000)))


def test_a_view_of_another_type_holds_the_memory_too() -> None:
    codes = empty_u8(1000).view(np.int8)[5:]
    codes.setflags(write=False)
    read_only = codes.view()
    del codes
    assert idle_bytes() == 0
    del read_only
    assert idle_bytes() > 0


def test_sizes_and_contents() -> None:
    for count in (0, 1, 63, 64, 65, 1000, 131_072, 131_073):
        array = empty_u8(count)
        assert array.shape == (count,)
        assert array.flags.writeable and array.flags.c_contiguous
        floats = empty_f32(count)
        assert floats.dtype == np.float32 and floats.shape == (count,)
        assert floats.flags.aligned


def test_at_most_an_eighth_is_wasted_and_idle_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for count in (1000, 10_001, 131_073, 1_000_003):
        empty_u8(count)
        assert count <= idle_bytes() <= count * 1.125 + 64
        monkeypatch.setattr(buffers, "_idle", {})
    monkeypatch.setattr(buffers, "IDLE_BYTES_MAX", 5000)
    held = [empty_u8(2000) for _ in range(10)]
    held.clear()
    assert 0 < idle_bytes() <= 5000


def test_threads_never_share_an_array() -> None:
    def work(seed: int) -> bool:
        for value in range(200):
            mark = seed * 1000 + value
            array = empty_f32(5000)
            array.fill(mark)
            if not (array == np.float32(mark)).all():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_sizes_that_nobody_needs_any_more_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state transfer leaves thousands of small arrays; a merge needs few large ones."""
    monkeypatch.setattr(buffers, "IDLE_BYTES_MAX", 1 << 20)
    many = [empty_u8(1 << 14) for _ in range(100)]
    del many
    assert idle_bytes() == 1 << 20
    large = empty_u8(1 << 19)
    place = large.ctypes.data
    del large
    assert empty_u8(1 << 19).ctypes.data == place
