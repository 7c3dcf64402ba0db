"""The installed script: each end has its exit code, and a failure says in a line what is wrong."""

from __future__ import annotations

import signal
import socket
from contextlib import closing
from importlib.metadata import version

from acceptance.kit import Ports, Site


def test_a_script_says_what_is_wrong_and_with_which_code(site: Site) -> None:
    with closing(Ports()) as unused, socket.create_server(("127.0.0.1", 0)) as mute:
        nowhere = f"tcp://127.0.0.1:{unused.first}"
        script = site.shell("status", "narrows", "status", nowhere, "--timeout-s", "0.1")
        silent = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        waiting = site.shell("waiting", "narrows", "status", silent)
        mute.accept()[0].close()
        waiting.ps.send_signal(signal.SIGINT)
        learner = site.learner("a", broker=nowhere, join_timeout_s=0.1)
        learner.ends(4)
        assert f"no broker answered at {nowhere}" in learner.log
        for child, code, word in ((waiting, 130, "interrupted"), (script, 4, "did not answer")):
            child.ends(code)
            (said,) = child.log.splitlines()
            assert said.startswith("narrows: ") and word in said
    assert site.tell("--version").strip() == version("narrows")
