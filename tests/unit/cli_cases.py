"""Commands of `narrows` that run in the process of a test."""

import sys

import pytest

from narrows import __main__ as command


class Narrows:
    """Runs a command; keeps what it printed. The fixture `narrows` makes one."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.out = ""
        self.err = ""

    def run(self, *arguments: str) -> int:
        """The exit code of `narrows ARGUMENTS`."""
        self._monkeypatch.setattr(sys, "argv", ["narrows", *arguments])
        with pytest.raises(SystemExit) as ended:
            command.main()
        self.out, self.err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code
