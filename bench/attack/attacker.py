"""The process of one attacker: runs an attack until SIGTERM and says how often it tried."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType

from narrows.bench.attack.catalogue import ATTACKS
from narrows.bench.attack.target import AttackTarget


class _Ended(BaseException):
    """SIGTERM came."""


def main(name: str, target: AttackTarget) -> None:
    def end(_number: int, _frame: FrameType | None) -> None:
        raise _Ended

    signal.signal(signal.SIGTERM, end)
    attempts = 0
    _tell(attempts)
    try:
        for count in ATTACKS[name].run(target):
            attempts += count
    except _Ended:
        _tell(attempts)


def _tell(attempts: int) -> None:
    print(json.dumps({"attempts": attempts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], AttackTarget.read(Path(sys.argv[2])))
