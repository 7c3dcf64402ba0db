"""The rules of the house that a machine can check: imports, purity, sizes, banned calls, packaging.

Each rule is a function from a module to the violations in it, so that the same function is run
over the real tree and over a planted violation; a rule that finds nothing anywhere fails too.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("bench", "broker", "learner", "proto")
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 350
LINE_CHARACTERS_MAX = 100

#: Folders that each folder may import from; src/narrows (the command) and tests may import all.
LAYERS = {
    "proto": {"proto"},
    "broker": {"broker", "proto"},
    "learner": {"learner", "proto"},
    "bench": {"bench", "broker", "learner", "proto"},
}

#: State machines and arithmetic outside proto/, all of which is pure. They get time and chance as
#: arguments and return what is to be done, so the simulator runs the very code that runs for real.
PURE = (
    "broker/admission.py",
    "broker/allowance.py",
    "broker/config.py",
    "broker/costs.py",
    "broker/data_path.py",
    "broker/events.py",
    "broker/forgetting.py",
    "broker/founding.py",
    "broker/intake.py",
    "broker/lifecycle.py",
    "broker/members.py",
    "broker/merge.py",
    "broker/need.py",
    "broker/outer.py",
    "broker/plan.py",
    "broker/planning.py",
    "broker/quorum.py",
    "broker/rounds.py",
    "broker/run_clock.py",
    "broker/scheduler.py",
    "broker/shares.py",
    "broker/state.py",
    "broker/subscriptions.py",
    "broker/status.py",
    "broker/syncer.py",
    "broker/tally.py",
    "broker/waiting.py",
    "learner/arriving.py",
    "learner/dialing.py",
    "learner/events.py",
    "learner/joining.py",
    "learner/leaving.py",
    "learner/ledger.py",
    "learner/link.py",
    "learner/links.py",
    "learner/pace.py",
    "learner/session.py",
)

#: The exceptions in proto/: what the shells of both sides need, and nothing that decides.
SHARED_SHELLS = ("proto/event_file.py", "proto/wake.py")

#: Modules of broker/ and learner/ that own sockets.
SOCKETS = ("broker/service.py", "broker/show.py", "broker/wires.py", "learner/wires.py")

#: Sources of time, chance, concurrency and I/O that a pure module may not import.
IMPURE = frozenset(
    "asyncio concurrent datetime logging multiprocessing os queue random secrets select selectors"
    " signal socket subprocess tempfile threading time torch uuid zmq".split()
)

#: Calls that run code hidden in the data they read, or can be talked into it.
UNSAFE_IMPORTS = frozenset({"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"})
UNSAFE_NAMES = ("torch.load", "np.load", "numpy.load")
UNSAFE_SUFFIXES = ("recv_pyobj", "send_pyobj", "unpack_array", "pack_array")


@dataclass(frozen=True)
class Module:
    """One source file; `path` is relative to the root, with slashes."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree; the first is the module itself."""
        return list(ast.walk(ast.parse(self.text, self.path)))

    @property
    def folder(self) -> str:
        return self.path.split("/")[0]

    @property
    def docstring(self) -> str:
        tree = self.nodes[0]
        assert isinstance(tree, ast.Module)
        return ast.get_docstring(tree, clean=False) or ""

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and full dotted name of everything imported, at any depth of the file."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)

    def names(self) -> Iterator[tuple[int, str]]:
        """Line and text of every name and dotted name that is used, such as `np.random.rand`."""
        for node in self.nodes:
            if isinstance(node, ast.Name | ast.Attribute):
                yield node.lineno, dotted(node)


def dotted(node: ast.expr) -> str:
    """`a.b.c` for such an expression; what is not a name is left out, as in `.c` for `f().c`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def root_of(name: str) -> str:
    return name.split(".")[0]


def is_pure(path: str) -> bool:
    return path in PURE or (path.startswith("proto/") and path not in SHARED_SHELLS)


def layers(module: Module) -> Iterator[str]:
    allowed = LAYERS.get(module.folder)
    for line, name in module.imports():
        parts = name.split(".")
        if allowed is None or parts[0] != "narrows" or parts[1:] == ["__version__"]:
            continue
        if len(parts) < 2 or parts[1] not in allowed:
            yield f"{module.path}:{line}: {module.folder} may not import {name}"


def no_tests_outside_tests(module: Module) -> Iterator[str]:
    helpers = {path.stem for path in (ROOT / "tests").iterdir()} - sys.stdlib_module_names
    banned = helpers | {"tests", "pytest", "hypothesis"}
    for line, name in module.imports():
        if module.folder != "tests" and root_of(name) in banned:
            yield f"{module.path}:{line}: only tests may import {name}"


def absolute_imports(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            yield f"{module.path}:{node.lineno}: relative import; write narrows.{module.folder}..."


def torch_in_its_place(module: Module) -> Iterator[str]:
    free = module.folder in ("bench", "examples", "learner", "tests")
    for line, name in module.imports():
        # The parts are compared, not the root alone: safetensors.torch imports torch as well.
        if "torch" in name.split(".") and not free:
            yield f"{module.path}:{line}: {name}: torch belongs to learner/ and bench/"


def sockets_in_their_place(module: Module) -> Iterator[str]:
    free = module.folder in ("bench", "src", "tests") or module.path in SOCKETS
    for line, name in module.imports():
        if root_of(name) == "zmq" and not free:
            yield f"{module.path}:{line}: {name}: sockets belong to {', '.join(SOCKETS)}"


def purity(module: Module) -> Iterator[str]:
    if not is_pure(module.path):
        return
    for line, name in module.imports():
        parts = name.split(".")
        impure_neighbour = (
            parts[0] == "narrows" and len(parts) > 2 and not is_pure("/".join(parts[1:3]) + ".py")
        )
        if parts[0] in IMPURE or impure_neighbour:
            yield f"{module.path}:{line}: a pure module may not import {name}"
    for line, name in [*module.imports(), *module.names()]:
        # A generator that comes in as an argument has to be named in the signature.
        if name.startswith(("np.random.", "numpy.random.")) and not name.endswith(".Generator"):
            yield f"{module.path}:{line}: a pure module may not use {name}"


def purity_is_checked(module: Module) -> Iterator[str]:
    caption = module.docstring.split("\n\n")[0]
    if "[pure]" in caption and not is_pure(module.path):
        yield f"{module.path}: says [pure]; add it to PURE in {Path(__file__).name}"


def nothing_unsafe(module: Module) -> Iterator[str]:
    for line, name in [*module.imports(), *module.names()]:
        last = name.rsplit(".", 1)[-1]
        if root_of(name) in UNSAFE_IMPORTS or name in UNSAFE_NAMES or last in UNSAFE_SUFFIXES:
            yield f"{module.path}:{line}: {name} can run code from the data it reads"


def no_sleep_in_tests(module: Module) -> Iterator[str]:
    for line, name in [*module.imports(), *module.names()]:
        if module.folder == "tests" and name in ("time.sleep", "asyncio.sleep"):
            yield f"{module.path}:{line}: wait for a condition, not for time to pass"


def docstring(module: Module) -> Iterator[str]:
    if not module.docstring.split("\n")[0].strip():
        yield f"{module.path}:1: the first line is a docstring that says what the module is"


def sizes(module: Module) -> Iterator[str]:
    lines = module.text.splitlines()
    if len(lines) > MODULE_LINES_MAX and module.folder != "tests":
        yield f"{module.path}: {len(lines)} lines, at most {MODULE_LINES_MAX}"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_CHARACTERS_MAX:
            yield f"{module.path}:{number}: {len(line)} columns, at most {LINE_CHARACTERS_MAX}"
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > FUNCTION_LINES_MAX:
                where = f"{module.path}:{node.lineno}: {node.name}"
                yield f"{where}: {count} lines, at most {FUNCTION_LINES_MAX}"


Rule = Callable[[Module], Iterator[str]]

LONG_FUNCTION = "def long():\n" + "    pass\n" * FUNCTION_LINES_MAX

#: For each rule, modules that must be refused.
PLANTED: tuple[tuple[Rule, str, str], ...] = (
    (layers, "proto/x.py", "from narrows.broker import service"),
    (layers, "broker/x.py", "def f():\n    import narrows.learner.client"),
    (layers, "learner/x.py", "from narrows import broker"),
    (layers, "broker/x.py", "from narrows.bench.simulation import run"),
    (no_tests_outside_tests, "bench/x.py", "import hypothesis"),
    (absolute_imports, "proto/x.py", "from .frames import digest"),
    (absolute_imports, "tests/x.py", "from . import helpers"),
    (torch_in_its_place, "broker/x.py", "import torch.nn as nn"),
    (torch_in_its_place, "proto/x.py", "from safetensors.torch import load_file"),
    (sockets_in_their_place, "broker/x.py", "from zmq import Context"),
    (purity, "proto/x.py", "from time import monotonic"),
    (purity, "broker/syncer.py", "import os.path"),
    (purity, "broker/syncer.py", "from narrows.broker.service import Service"),
    (purity, "broker/syncer.py", "from narrows.proto.wake import WakePipe"),
    (purity, "proto/x.py", "from narrows.proto import wake"),
    (purity, "broker/merge.py", "import numpy as np\nrng = np.random.default_rng()"),
    (purity, "broker/merge.py", "from numpy.random import default_rng"),
    (purity_is_checked, "broker/x.py", '"""Decides. [pure]"""'),
    (nothing_unsafe, "proto/x.py", "import pickle"),
    (nothing_unsafe, "bench/x.py", "from torch import load"),
    (nothing_unsafe, "tests/x.py", "import numpy as np\nnp.load('x')"),
    (nothing_unsafe, "learner/x.py", "self.context.socket(1).recv_pyobj()"),
    (nothing_unsafe, "proto/x.py", "from blosc2 import unpack_array"),
    (no_sleep_in_tests, "tests/x.py", "import time\ntime.sleep(1)"),
    (no_sleep_in_tests, "tests/x.py", "from time import sleep"),
    (docstring, "proto/x.py", "x = 1"),
    (docstring, "proto/x.py", '"""\nLate caption."""'),
    (sizes, "proto/x.py", LONG_FUNCTION),
    (sizes, "proto/x.py", "x = 1\n" * (MODULE_LINES_MAX + 1)),
    (sizes, "proto/x.py", "#" * (LINE_CHARACTERS_MAX + 1)),
)
RULES = tuple(dict.fromkeys(rule for rule, _, _ in PLANTED))


def source_paths() -> list[Path]:
    """Every Python file of the project, by its real path; one example has a test of its own."""
    tops = [ROOT / name for name in (*FOLDERS, "tests", "examples")]
    nested = [path for top in tops for path in top.rglob("*.py")]
    ours = [path for path in nested if path != ROOT / "examples/minimal_learner.py"]
    return sorted([*ours, *(ROOT / "src/narrows").glob("*.py")])


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return [
        Module(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in source_paths()
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_everywhere(rule: Rule, modules: list[Module]) -> None:
    violations = [violation for module in modules for violation in rule(module)]
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize(("rule", "path", "text"), PLANTED)
def test_rule_finds_a_planted_violation(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Module(path, text)))


@pytest.mark.parametrize("path", [*PURE, *SHARED_SHELLS, *SOCKETS])
def test_listed_modules_exist(path: str) -> None:
    assert (ROOT / path).is_file(), f"{path} is listed in {Path(__file__).name} and not in the tree"


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_lead_to_the_folders(folder: str) -> None:
    link = ROOT / "src/narrows" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{folder}"
    assert link.resolve() == ROOT / folder


def test_packages_match_the_folders() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == ["narrows", *(f"narrows.{name}" for name in FOLDERS)]
    expected = {"": "src"} | {f"narrows.{name}": name for name in FOLDERS}
    assert setuptools["package-dir"] == expected


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_flat(folder: str) -> None:
    # A sub-package that `packages` does not list is missing from the wheel without a warning.
    # The scripts of other systems are no package: they run from a checkout, each by its path.
    top, scripts = ROOT / folder, ("__pycache__", "peer_scripts")
    assert (top / "__init__.py").is_file()
    nested = [path for path in top.glob("*/**/*.py") if path.parent.name not in scripts]
    assert nested == []


@pytest.mark.slow
def test_wheel_holds_exactly_the_package(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = {PurePosixPath(name) for name in archive.namelist()}
    metadata = {name for name in names if name.parts[0].endswith(".dist-info")}
    data = ("py.typed", "proto/PROTOCOL.md", "bench/recorded.safetensors")
    expected = {PurePosixPath("narrows", name) for name in data}
    expected |= {
        PurePosixPath("narrows", path.name) for path in (ROOT / "src/narrows").glob("*.py")
    }
    for folder in FOLDERS:
        expected |= {PurePosixPath("narrows", folder, p.name) for p in (ROOT / folder).glob("*.py")}
    assert names - metadata == expected
    assert any(name.match("*.dist-info/licenses/LICENSE") for name in metadata)


def build_wheel(scratch: Path) -> Path:
    """A wheel built from a copy of the tree, so that nothing is left over or picked up in it."""
    copy = scratch / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*FOLDERS, "src"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(scratch)]
    if importlib.util.find_spec("setuptools") is not None:
        command += ["--no-build-isolation", "--no-index"]
    subprocess.run([*command, str(copy)], check=True, timeout=300)
    (wheel,) = scratch.glob("*.whl")
    return wheel
