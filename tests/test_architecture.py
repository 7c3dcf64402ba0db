"""The rules of the house that a machine can check: imports, purity, sizes, banned calls, packaging.

Each rule is a function from a module to the violations in it, so that the same function is run
over the real tree and over a planted violation; a rule that finds nothing anywhere fails too.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
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

#: What each district may import beside itself and proto's flat files, which all may. `*` stands
#: for the files of a folder that are in no district. The graph has no circle; a test looks.
MAY_IMPORT = {
    "proto/codec": set[str](),
    "proto/dissector": set[str](),
    "proto/flow": {"proto/codec"},
    "proto/keys": set[str](),
    "proto/shell": set[str](),
    "broker/*": {"proto/codec", "proto/flow"},
    "broker/merging": {"broker/*", "proto/codec", "proto/flow"},
    "broker/syncer": {"broker/*", "broker/merging", "proto/codec", "proto/flow"},
    "broker/planning": {"broker/*", "proto/codec", "proto/flow"},
    "broker/storage": {
        "broker/*", "broker/merging", "broker/syncer", "proto/codec", "proto/flow", "proto/shell",
    },
    "broker/process": {
        "broker/*", "broker/merging", "broker/storage", "broker/syncer", "proto/codec",
        "proto/flow", "proto/keys", "proto/shell",
    },
    "broker/cli": {
        "broker/*", "broker/merging", "broker/planning", "broker/process", "broker/storage",
        "proto/codec", "proto/dissector", "proto/keys",
    },
    "learner/session": {"proto/codec", "proto/flow"},
    "learner/module": {"proto/codec"},
    "learner/transport": {
        "learner/module", "learner/session", "proto/codec", "proto/flow", "proto/keys",
        "proto/shell",
    },
    "learner/*": {"learner/module", "learner/transport", "proto/keys"},
    "learner/reference": {"learner/*", "learner/transport", "proto/codec"},
}  # fmt: skip

DISTRICTS = tuple(path for path in MAY_IMPORT if not path.endswith("*"))

#: Districts of state machines and arithmetic. They get time and chance as arguments and return what
#: is to be done, so the simulator runs the very code that runs for real. All of proto/ is pure too,
#: but for what the shells of both sides share.
PURE = (
    "broker/merging", "broker/planning", "broker/syncer", "learner/session", "broker/config.py",
    "broker/merge_config.py", "broker/shared_settings.py",
)  # fmt: skip
SHARED_SHELLS = ("proto/keys", "proto/shell")

#: Places that may import ZeroMQ: they own sockets, or make key pairs.
SOCKETS = ("broker/cli/asking.py", "broker/process", "learner/transport", "proto/keys/pair.py")

#: Sources of time, chance, concurrency and I/O that a pure module may not import.
IMPURE = frozenset(
    "asyncio concurrent datetime logging multiprocessing os queue random secrets select selectors"
    " signal socket subprocess tempfile threading time torch uuid zmq".split()
)

#: Calls that run code hidden in the data they read, or can be talked into it.
UNSAFE_IMPORTS = frozenset({"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"})
UNSAFE_NAMES = ("torch.load", "np.load", "numpy.load")
UNSAFE_SUFFIXES = ("recv_pyobj", "send_pyobj", "unpack_array", "pack_array")


#: Words that make a fragment of a sentence out of a docstring: the reader misses its subject.
BAD_OPENINGS = re.compile(r"\s*(Of|What|Who)\b")

#: Class names that product and benches define more than once, each with its reason.
SAME_NAMES = {
    "Acknowledge": "each state machine has its own; the broker's names the learner",
    "Received": "each state machine has its own; the broker's names the peer",
    "Send": "each state machine has its own; the broker's names the peer",
}


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


def lies_in(path: str, *places: str) -> bool:
    """True for a place itself and for what is below it."""
    return any(path == place or path.startswith(f"{place}/") for place in places)


def is_pure(path: str) -> bool:
    return lies_in(path, *PURE) or (lies_in(path, "proto") and not lies_in(path, *SHARED_SHELLS))


def district_of(path: str) -> str:
    """`broker/syncer` for a file below it, `broker/*` for a file of no district."""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else f"{parts[0]}/*"


def target_of(name: str) -> str:
    """The path, without a suffix, that an imported name of ours stands for; else empty."""
    parts = name.split(".")
    if parts[0] != "narrows" or len(parts) < 2:
        return ""
    path = PurePosixPath(*parts[1:])
    while not ((ROOT / path).is_dir() or (ROOT / f"{path}.py").is_file()):
        path = path.parent
    return path.as_posix()


def door_of(district: str) -> set[str]:
    """Names that a package lets others import: `__all__`, or the modules of `DOOR`."""
    tree = ast.parse((ROOT / district / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "DOOR"):
            return set(ast.literal_eval(node.value))
    return set()


def layers(module: Module) -> Iterator[str]:
    allowed = LAYERS.get(module.folder)
    for line, name in module.imports():
        parts = name.split(".")
        if allowed is None or parts[0] != "narrows" or parts[1:] == ["__version__"]:
            continue
        if len(parts) < 2 or parts[1] not in allowed:
            yield f"{module.path}:{line}: {module.folder} may not import {name}"


def doors(module: Module) -> Iterator[str]:
    """Other districts import what a door names, and nothing behind it; tests look behind it."""
    if module.folder in ("tests", "examples"):
        return
    own = district_of(module.path)
    for line, name in module.imports():
        parts = name.split(".")[1:]
        inside = name.startswith("narrows.") and (ROOT / "/".join(parts[:2])).is_dir()
        district = "/".join(parts[:2])
        if not inside or district == own:
            continue
        if len(parts) < 3 or parts[2] not in door_of(district):
            yield f"{module.path}:{line}: {name} is behind the door {district}/__init__.py"


def districts(module: Module) -> Iterator[str]:
    own = district_of(module.path)
    for line, name in module.imports():
        target = target_of(name)
        if own not in MAY_IMPORT or not target:
            continue
        other = district_of(f"{target}/x" if (ROOT / target).is_dir() else f"{target}.py")
        if other not in {own, "proto/*", "./*"} | MAY_IMPORT[own]:
            yield f"{module.path}:{line}: {own} may not import {other} ({name})"


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
    free = module.folder in ("bench", "src", "tests") or lies_in(module.path, *SOCKETS)
    for line, name in module.imports():
        if root_of(name) == "zmq" and not free:
            yield f"{module.path}:{line}: {name}: sockets belong to {', '.join(SOCKETS)}"


def purity(module: Module) -> Iterator[str]:
    if not is_pure(module.path):
        return
    for line, name in module.imports():
        target = target_of(name)
        path = f"{target}.py" if (ROOT / f"{target}.py").is_file() else target
        if root_of(name) in IMPURE or ("/" in path and not is_pure(path)):
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


def docstring_openings(module: Module) -> Iterator[str]:
    for node in module.nodes:
        # Every text that is a statement is a docstring, of an attribute too.
        match node:
            case ast.Expr(ast.Constant(str(text))) if BAD_OPENINGS.match(text):
                first = text.strip().split("\n")[0]
                yield f"{module.path}:{node.lineno}: begin with the subject: {first}"
            case _:
                pass


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
    (layers, "broker/x.py", "def f():\n    import narrows.learner.transport.client"),
    (layers, "learner/x.py", "from narrows import broker"),
    (layers, "broker/x.py", "from narrows.bench.sim.simulation import Simulation"),
    (no_tests_outside_tests, "bench/x.py", "import hypothesis"),
    (absolute_imports, "proto/x.py", "from .frames import digest"),
    (absolute_imports, "tests/x.py", "from . import helpers"),
    (torch_in_its_place, "broker/x.py", "import torch.nn as nn"),
    (torch_in_its_place, "proto/x.py", "from safetensors.torch import load_file"),
    (sockets_in_their_place, "broker/x.py", "from zmq import Context"),
    (purity, "proto/x.py", "from time import monotonic"),
    (purity, "broker/syncer/x.py", "import os.path"),
    (purity, "broker/syncer/x.py", "from narrows.broker.process import Service"),
    (purity, "broker/syncer/x.py", "from narrows.broker.storage.journal import Journal"),
    (purity, "broker/syncer/x.py", "from narrows.proto.shell import WakePipe"),
    (purity, "proto/x.py", "from narrows.proto.shell import wake"),
    (purity, "broker/merging/x.py", "import numpy as np\nrng = np.random.default_rng()"),
    (purity, "broker/merging/x.py", "from numpy.random import default_rng"),
    (doors, "broker/process/x.py", "from narrows.broker.syncer.machine import Syncer"),
    (doors, "broker/process/x.py", "from narrows.broker.syncer import machine"),
    (doors, "bench/loop/x.py", "def f():\n    from narrows.learner.session.machine import Session"),
    (doors, "learner/x.py", "import narrows.proto.codec.kernels"),
    (doors, "src/narrows/__main__.py", "from narrows.bench.codec.baselines import Baseline"),
    (districts, "broker/syncer/x.py", "from narrows.broker.storage import Journal"),
    (districts, "broker/merging/x.py", "from narrows.broker.syncer import events"),
    (districts, "proto/codec/x.py", "from narrows.proto.flow import Budget"),
    (districts, "learner/session/x.py", "from narrows.learner import Learner"),
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
    (docstring_openings, "proto/x.py", '"""What this is."""'),
    (docstring_openings, "learner/x.py", 'class A:\n    rate: float\n    """Of one learner."""'),
    (docstring_openings, "tests/x.py", 'def f():\n    """\n    Who calls."""'),
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


def same_names(modules: list[Module]) -> dict[str, list[str]]:
    """Paths by class name, for names that stand at the top level of several modules."""
    places: dict[str, list[str]] = {}
    for module in modules:
        tree = module.nodes[0]
        assert isinstance(tree, ast.Module)
        if module.folder in FOLDERS:
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(module.path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def test_a_class_name_stands_for_one_thing(modules: list[Module]) -> None:
    twice = same_names(modules)
    assert {name: paths for name, paths in twice.items() if name not in SAME_NAMES} == {}
    assert SAME_NAMES.keys() <= twice.keys(), "a name that is defined once needs no reason"


def test_a_planted_class_name_is_found() -> None:
    planted = [Module("proto/x.py", "class A: pass"), Module("bench/kit/y.py", "class A: pass")]
    nested = Module("broker/z.py", "class B:\n    class A: pass")
    assert same_names([*planted, nested]) == {"A": ["proto/x.py", "bench/kit/y.py"]}


@pytest.mark.parametrize("path", [*PURE, *SHARED_SHELLS, *SOCKETS])
def test_listed_places_exist(path: str) -> None:
    assert (ROOT / path).exists(), f"{path} is listed in {Path(__file__).name} and not in the tree"


def test_every_district_says_what_it_may_import() -> None:
    own = {path for path in packages() if "/" in path and not lies_in(path, "bench")}
    assert own == set(DISTRICTS)


def test_the_graph_of_districts_has_no_circle() -> None:
    # static_order raises CycleError, naming the circle.
    order = list(TopologicalSorter(MAY_IMPORT).static_order())
    assert order.index("broker/merging") < order.index("broker/storage")


def test_the_graph_of_the_benches_has_no_circle(modules: list[Module]) -> None:
    graph: dict[str, set[str]] = {}
    for module in modules:
        if module.folder == "bench":
            own = district_of(module.path)
            targets = [target_of(name) for _, name in module.imports()]
            others = {"/".join(target.split("/")[:2]) for target in targets if "/" in target}
            graph.setdefault(own, set()).update(others - {own})
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("district", DISTRICTS)
def test_a_door_names_what_it_has_and_nothing_twice(district: str) -> None:
    door = importlib.import_module(f"narrows.{district.replace('/', '.')}")
    names = [*getattr(door, "__all__", ()), *getattr(door, "DOOR", ())]
    files = {path.stem for path in (ROOT / district).glob("*.py")}
    assert names
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(door, name) and name not in files] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_lead_to_the_folders(folder: str) -> None:
    link = ROOT / "src/narrows" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{folder}"
    assert link.resolve() == ROOT / folder


def packages() -> set[str]:
    """Every package below the four folders, as a path."""
    found = [path.parent for top in FOLDERS for path in (ROOT / top).rglob("__init__.py")]
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_packages_are_the_tree() -> None:
    # A package that the list lacks is missing from the wheel without a warning.
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    expected = {"narrows", *(f"narrows.{path.replace('/', '.')}" for path in packages())}
    assert sorted(setuptools["packages"]) == sorted(expected)
    links = {"": "src"} | {f"narrows.{name}": name for name in FOLDERS}
    assert setuptools["package-dir"] == links


def test_every_folder_of_modules_is_a_package() -> None:
    # The scripts of other systems are no package: they run from a checkout, each by its path.
    folders = {path.parent for top in FOLDERS for path in (ROOT / top).rglob("*.py")}
    paths = {path.relative_to(ROOT).as_posix() for path in folders}
    assert paths == packages() | {"bench/peers/scripts"}


def test_wheel_holds_exactly_the_package(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = {PurePosixPath(name) for name in archive.namelist()}
    metadata = {name for name in names if name.parts[0].endswith(".dist-info")}
    data = ("py.typed", "proto/PROTOCOL.md", "bench/kit/recorded.safetensors")
    expected = {PurePosixPath("narrows", name) for name in data}
    expected |= {
        PurePosixPath("narrows", path.name) for path in (ROOT / "src/narrows").glob("*.py")
    }
    for folder in packages():
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
