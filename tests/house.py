"""Writes the generated part of docs/house.md: `python tests/house.py`, or `make house`.

The picture and the tables come from the tree, the docstrings and MAY_IMPORT, so that they cannot
differ from the code; tests/test_house.py compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Final

from test_architecture import (
    FOLDERS,
    MAY_IMPORT,
    ROOT,
    Module,
    district_of,
    is_pure,
    source_paths,
    target_of,
)

HOUSE: Final = ROOT / "docs/house.md"
BEGIN: Final = "<!-- tree -->"
END: Final = "<!-- /tree -->"
ORDER: Final = ("proto", "broker", "learner", "bench")


def written(text: str) -> str:
    """The document with the generated part of today."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{generated()}\n\n{END}{after}"


def generated() -> str:
    """The picture, then a section for each folder."""
    districts = by_district()
    assert {name.split("/")[0] for name in districts} == set(FOLDERS) == set(ORDER)
    parts = [picture(MAY_IMPORT)]
    for folder in ORDER:
        parts.append(f"## {folder}/\n\n{caption(districts[f'{folder}/*'][0])}")
        parts += [section(name, files) for name, files in districts.items() if owns(folder, name)]
    return "\n\n".join(parts)


def owns(folder: str, district: str) -> bool:
    return district.split("/")[0] == folder


def by_district() -> dict[str, list[Module]]:
    """The modules of the four folders by district, `__init__.py` first."""
    districts: dict[str, list[Module]] = {}
    for path in source_paths():
        module = Module(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        if module.folder in FOLDERS:
            districts.setdefault(district_of(module.path), []).append(module)
    return districts


def reduced(graph: Mapping[str, Set[str]]) -> Iterator[tuple[str, str]]:
    """The arrows that do not follow from two or more others."""
    for start, ends in graph.items():
        for end in sorted(ends):
            if not any(end in reached(graph, other) for other in ends - {end}):
                yield start, end


def reached(graph: Mapping[str, Set[str]], start: str) -> set[str]:
    """Every district that an arrow or a chain of arrows leads to from `start`."""
    found, open_ends = set[str](), [start]
    while open_ends:
        new = graph.get(open_ends.pop(), set()) - found
        found |= new
        open_ends += new
    return found


def picture(graph: Mapping[str, Set[str]]) -> str:
    """Mermaid: a box per folder, a node per district, the arrows of `reduced`."""
    lines = ["```mermaid", "flowchart TB"]
    for folder in ("learner", "broker", "proto"):
        nodes = [f"        {node(name)}[{label(name)}]" for name in graph if owns(folder, name)]
        lines += [f"    subgraph {folder}", *nodes, "    end"]
    lines += [f"    {node(start)} --> {node(end)}" for start, end in reduced(graph)]
    return "\n".join([*lines, "```"])


def node(district: str) -> str:
    return district.replace("/", "_").replace("*", "files")


def label(district: str) -> str:
    folder, _, name = district.partition("/")
    if name != "*":
        return name
    return "config.py" if folder == "broker" else "learner.py"


def section(district: str, files: list[Module]) -> str:
    """One district: its job, its rules, its files."""
    folder, _, name = district.partition("/")
    modules = [module for module in files if not module.path.endswith("__init__.py")]
    rows = "\n".join(f"| [{short(m)}](../{m.path}) | {caption(m)} |" for m in modules)
    table = f"| file | |\n|---|---|\n{rows}"
    if name == "*":
        return table if folder in ("proto", "bench") else f"{rules(district, modules)}\n\n{table}"
    return f"### {district}\n\n{caption(files[0])}\n\n{rules(district, modules)}\n\n{table}"


def rules(district: str, modules: list[Module]) -> str:
    """Purity, imports and door, a line each."""
    pure = all(is_pure(module.path) for module in modules)
    lines = ["- Pure: no clock, no chance, no I/O."] if pure else []
    if owns("bench", district):
        lines.append(f"- Imports of bench: {listed(bench_imports(district, modules))}.")
    else:
        lines.append(f"- May import: {listed(MAY_IMPORT[district])}.")
    if "*" not in district:
        lines.append(f"- Door: [{district}/\\_\\_init\\_\\_.py](../{district}/__init__.py).")
    return "\n".join(lines)


def bench_imports(district: str, modules: list[Module]) -> set[str]:
    targets = [target_of(name) for module in modules for _, name in module.imports()]
    benches = {"/".join(t.split("/")[:2]) for t in targets if t.startswith("bench/")}
    return benches - {district}


def listed(names: Set[str]) -> str:
    shown = (name.replace("/*", "/*.py") for name in sorted(names))
    return ", ".join(f"`{name}`" for name in shown) or "nothing"


def short(module: Module) -> str:
    return module.path.rsplit("/", 1)[-1]


def caption(module: Module) -> str:
    """The first paragraph of the docstring in one line, as a cell of a table."""
    paragraph = " ".join(module.docstring.split("\n\n")[0].split())
    return paragraph.removesuffix("[pure]").strip().replace("|", "\\|")


if __name__ == "__main__":
    HOUSE.write_text(written(HOUSE.read_text(encoding="utf-8")), encoding="utf-8")
