"""Rules that no linter holds: size, first lines, no sleep. PROTOCOL.md and the code name the same
messages, fields, types, bounds and codes; links of documents lead somewhere."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from narrows.proto import messages as msg
from narrows.proto.codec import advance_copy, decode_chunk, digest_of, encode_push, values_of
from narrows.proto.errors import ErrorCode
from narrows.proto.layout import build_table

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("proto", "broker", "learner", "bench")

STATEMENTS_MAX = {"proto": 2220, "broker": 5948, "learner": 3545, "bench": 3390, "tests": 12125}
"""Statements of a folder without docstrings. Lines are free: a cap of lines packs the code.
To record inputs and play them again has an allowance of its own in these numbers."""


def modules(*folders: str) -> Iterator[Path]:
    """Every module of the house below these folders; without any, of all."""
    for folder in folders or FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@pytest.mark.parametrize("folder", STATEMENTS_MAX)
def test_a_folder_stays_within_its_statements(folder: str) -> None:
    count = 0
    for path in modules(folder):
        nodes = ast.walk(ast.parse(path.read_text()))
        count += sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes)
    most = STATEMENTS_MAX[folder]
    assert count <= most, f"{folder}: {count} statements of {most}, see CONTRIBUTING, Layers"


def test_every_module_says_first_what_it_is_for() -> None:
    for path in modules():
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)) or not text.strip(), f"{path} has no docstring"


@pytest.mark.parametrize(
    ("never", "folders"),
    [
        (r'"""(Of|What|Who) .*', (*FOLDERS, "tests")),
        (r"\b(time|asyncio)\.sleep\(", ("tests",)),
    ],
    ids=["openings that say nothing until the end of the sentence", "sleeps"],
)
def test_no_module_has(never: str, folders: tuple[str, ...]) -> None:
    for path in modules(*folders):
        found = re.search(never, path.read_text())
        assert path == Path(__file__) or found is None, f"{path}: {found}"


PAGE = (ROOT / "proto" / "PROTOCOL.md").read_text()
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "proto" / "PROTOCOL.md"]

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def tables(header: str, page: str = PAGE) -> Iterator[list[str]]:
    """The cells of every row under each table whose first column is called `header`."""
    inside = False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if not cells:
            inside = False
        elif cells[0] == header:
            inside = True
        elif inside and not cells[0].startswith("-"):
            yield cells


def structures(header: str) -> dict[str, dict[str, str]]:
    """Name -> {field: type as the page writes it} of a table of messages or structures."""
    found: dict[str, dict[str, str]] = {}
    fields: dict[str, str] = {}
    for name, names, types, *_ in tables(header):
        if match := re.match(r"\*\*(\w+)\*\*", name):
            fields = found.setdefault(match[1], {})
        each = [part.strip() for part in names.split(",") if part.strip()]
        kinds = [part.strip() for part in types.partition(" = ")[0].split(",")]
        for index, field in enumerate(each):
            fields[field] = kinds[index] if len(kinds) == len(each) else kinds[0]
    return found


LOCAL = list(ErrorCode)[list(ErrorCode).index(ErrorCode.BAD_DIGEST) :]
"""Codes that never travel."""

STRUCTURES = (
    msg.RunSettings,
    msg.CopyDigest,
    msg.LayoutEntry,
    msg.Layout,
    msg.Header,
    msg.Contributor,
    msg.LearnerStatus,
    msg.FragmentStatus,
    msg.RefusalStatus,
    msg.MergeStatus,
    msg.QuorumStatus,
    msg.LineStatus,
    msg.DiskStatus,
    msg.ProcessStatus,
    msg.SettingsStatus,
)
CODE = {each.__name__: each for each in (*get_args(msg.ControlMessage), *STRUCTURES)}


def test_messages_and_structures_have_the_fields_and_types_of_the_page_in_its_order() -> None:
    page = structures("message") | structures("structure") | structures("header")
    page |= structures("status")
    explained = {name.strip() for cells in tables("type") for name in cells[0].split(",")}
    assert page.keys() == CODE.keys() and explained <= vars(msg).keys()
    for name, fields in page.items():
        declared = CODE[name].__annotations__
        assert list(fields) == list(declared), name
        for field, kind in fields.items():
            assert kind not in explained or declared[field] == kind, f"{name}.{field}"


def test_bounds_are_those_of_the_code() -> None:
    found: dict[str, int] = {}
    for cells in tables("constant"):
        for name, value in (cells[:2], cells[3:5]):
            if name:
                base, _, power = value.partition("^")
                found[name.strip("`")] = int(base) ** int(power or 1)
    code = {
        name: value
        for name, value in vars(msg).items()
        if name.isupper() and isinstance(value, int)
    }
    assert found == code
    assert f"`{msg.NAME_PATTERN}`" in PAGE


def test_refusals_are_the_codes_that_travel() -> None:
    codes = [cells[0].strip("`") for cells in tables("code")]
    assert codes == [each.value for each in ErrorCode if each not in LOCAL]


def test_enumerations_are_those_of_the_code() -> None:
    kinds = {cells[0]: int(cells[1]) for cells in tables("DataKind")}
    assert kinds == {each.name: each.value for each in msg.DataKind}
    text = " ".join(PAGE.split())
    names = {
        enum.__name__: [each.value for each in enum] for enum in (msg.Mode, msg.Phase, msg.Role)
    }
    names["CodecName"] = list(get_args(msg.CodecName))
    for name, values in names.items():
        said = re.search(rf"\b{name}: (.*?)(?: · |$)", text)
        assert said is not None, name
        assert re.findall(r"`([\w-]+)`", said[1]) == values
    assert [cells[0].strip("`") for cells in tables("codec")] == names["CodecName"]


def row(name: str) -> list[float]:
    """The numbers of a line in the worked example of section 8."""
    line = re.search(rf"^{re.escape(name)} +(-?[0-9].*)$", PAGE, re.MULTILINE)
    assert line is not None, name
    return [float(each) for each in line[1].replace("|", " ").split()]


def test_the_worked_example_is_what_the_code_computes() -> None:
    entries = (
        msg.LayoutEntry("w", (2, 3), "float32", "rda"),
        msg.LayoutEntry("b", (1,), "float32", "mean"),
    )
    (fragment,) = build_table(entries, 1)
    copy, local = (np.array(row(n), np.float32) for n in ("published[0]", "params, snapshot"))
    push = list(encode_push(fragment, copy, local, codec="int4-zstd", rho=0.5, chunk_elements=256))
    assert f"payload    {push[0].payload[:2].hex()} {push[0].payload[2:4].hex()}" in PAGE
    assert push[0].payload[-4:].hex() in PAGE
    sent = values_of(fragment, [push[0].decoded])
    np.testing.assert_array_equal(sent, np.array(row("push (g hat)"), np.float32))
    payload = bytes.fromhex(re.findall(r"^([0-9a-f]{34})\.$", PAGE, re.MULTILINE)[0])
    step = decode_chunk(fragment, "int4-zstd", 256, 0, payload)
    after = advance_copy(fragment, copy, [step])
    np.testing.assert_array_equal(after, np.array(row("published[1]"), np.float32))
    assert f"{digest_of(copy)} and {digest_of(after)}" in PAGE
    later = np.array(row("params, a step on"), np.float32)
    rest = later - copy + sent
    np.testing.assert_array_equal(rest, np.array(row("rest"), np.float32))
    adopted = after + np.float32(0.5) * rest
    np.testing.assert_array_equal(adopted, np.array(row("params, adopted"), np.float32))


def test_the_example_of_fragments_is_what_the_code_computes() -> None:
    shapes = {"emb": (5, 4), "w": (3, 2), "s": ()}
    entries = [msg.LayoutEntry(name, shape, "float32", "rda") for name, shape in shapes.items()]
    for fragment in build_table(entries, 2):
        pieces = ", ".join(
            f"{entries[p.tensor].name}[{p.start}, {p.count}] at {p.offset}" for p in fragment.pieces
        )
        assert f"| {fragment.index} | {pieces} | {fragment.elements} |" in PAGE


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have as targets of links, as GitHub makes them."""
    headings = HEADING.findall(page.read_text())
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def test_every_link_of_a_document_leads_somewhere() -> None:
    links = 0
    for page in DOCUMENTS:
        for link in LINK.findall(page.read_text()):
            if link.startswith(("https://", "mailto:")):
                continue
            path, _, anchor = link.partition("#")
            target = page if not path else (page.parent / path).resolve()
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
            links += 1
    assert links > 20


def test_no_line_of_a_document_is_too_long() -> None:
    long = [
        f"{page.name}:{number}"
        for page in DOCUMENTS
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert not long, long


def definitions(path: Path) -> set[str]:
    """Functions and classes of a module, and `Class.method` of their methods."""
    module = ast.parse(path.read_text())
    classes = [each for each in module.body if isinstance(each, ast.ClassDef)]
    return {
        prefix + each.name
        for prefix, body in [("", module.body), *((f"{own.name}.", own.body) for own in classes)]
        for each in body
        if isinstance(each, ast.ClassDef | ast.FunctionDef)
    }


def test_the_tour_names_files_that_define_what_it_says() -> None:
    section = re.compile(r"^## One push, station by station\n(.*?)^## ", re.M | re.S)
    (tour,) = section.findall((ROOT / "docs" / "design.md").read_text())
    places = re.findall(r"`([\w/]+\.py)`:((?:\s+`[\w.]+`,?)+)", tour)
    assert len(places) == tour.count(".py`")
    for file, names in places:
        assert set(re.findall(r"`(.*?)`", names)) <= definitions(ROOT / file), f"{file}: {names}"


def test_the_table_of_error_codes_is_that_of_the_code() -> None:
    rows = [[f"`{each}`", each.meaning, each.remedy or "as the message says"] for each in ErrorCode]
    assert [*tables("code", (ROOT / "docs" / "operations.md").read_text())] == rows


def test_actions_are_named_by_their_commit() -> None:
    for path in ROOT.glob(".github/workflows/*.yml"):
        used = re.findall(r"uses: (.*)", path.read_text())
        assert used and all(re.fullmatch(r"\S+@[0-9a-f]{40}  # v\S+", each) for each in used), path
