"""The real pool: its wake pipe and its end."""

from __future__ import annotations

import os
import threading

import pytest

from narrows.proto.workers import Workers


def test_a_wake_while_the_pool_closes_writes_to_no_closed_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, write, threads = Workers(1, "test"), os.write, list[threading.Thread]()

    def write_while_another_thread_closes(fd: int, data: bytes) -> int:
        threads.append(threading.Thread(target=pool.close))
        threads[0].start()
        threads[0].join(0.2)  # It would be over by now if nothing held it back.
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_while_another_thread_closes)
    pool.wake()
    threads[0].join()
    pool.wake()
    assert len(threads) == 1, "a closed pool writes nothing"
