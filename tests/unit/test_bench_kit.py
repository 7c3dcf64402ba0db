"""The ground of every bench: rows and their JSON, the line's counters, what processes leave; and
the commands of `narrows bench`."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest

from narrows.bench import cli, loop
from narrows.bench.kit import rows
from narrows.bench.kit.line import Sample, ip, peak_bits_per_s
from narrows.bench.kit.run import Deployment
from narrows.proto.errors import ErrorCode, NarrowsError


@dataclass(frozen=True)
class Cell:
    number: int


def halved(cell: Cell) -> rows.Row:
    if cell.number == 13:
        raise NarrowsError(ErrorCode.UNFINISHED, "a process has died")
    return {"half": cell.number / 2, "rest": None}


def measure(path: Path, *numbers: int) -> None:
    columns = [rows.Column("half of it", "half", "{:.1f}"), rows.Column("rest", "rest")]
    cells = [Cell(number) for number in numbers]
    rows.bench("halves", cells, halved, columns, lambda _: ["so it is"], json=path, seed=7)


def test_cells_become_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Holds `rows.bench`."""
    measure(tmp_path / "new" / "rows.json", 1, 2)
    said = json.loads((tmp_path / "new" / "rows.json").read_text())
    made = [{"number": n, "half": n / 2, "rest": None} for n in (1, 2)]
    assert (said["bench"], said["seed"], said["rows"]) == ("halves", 7, made)
    assert said["machine"]["cores"] >= 1 and "commit" in said
    told = capsys.readouterr().out
    assert "half of it" in told and "0.5" in told and "so it is" in told


def test_what_was_measured_before_an_error_is_kept(tmp_path: Path) -> None:
    """Holds `rows.bench`."""
    path = tmp_path / "rows.json"
    with pytest.raises(NarrowsError, match="a process has died"):
        measure(path, 1, 13, 2)
    assert [row["half"] for row in json.loads(path.read_text())["rows"]] == [0.5]


def test_the_fullest_second_is_found_wherever_it_is() -> None:
    """Holds `peak_bits_per_s`."""
    rates = [100] * 10 + [0] * 4 + [300] * 10 + [50] * 10
    samples = [Sample(0.0, 0, 0)]
    up = 0
    for index, rate in enumerate(rates):
        up += rate
        samples.append(Sample((index + 1) / 10, up, 7 * (index + 1)))
    assert peak_bits_per_s(samples) == pytest.approx((8 * 3000, 8 * 70))
    assert peak_bits_per_s(samples[:10]) == (0, 0), "less than a second"


@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` to refuse anything")
def test_a_line_that_cannot_be_built_says_what_it_takes() -> None:
    """Holds `ip`."""
    with pytest.raises(NarrowsError, match=r"expected ip no-such-thing, got .*run it as root"):
        ip("no-such-thing")


def test_half_a_line_of_events_waits_for_its_rest(tmp_path: Path) -> None:
    """Holds `EventReader.events`."""
    with Deployment(folder=tmp_path) as run:
        assert run.merges() == []
        with (tmp_path / "broker.jsonl").open("ab", buffering=0) as file:
            file.write(b'{"event": "merged"}\n{"event": "x"}\n{"eve')
            assert run.merges() == [{"event": "merged"}]
            file.write(b'nt": "merged", "n": 2}\nnot json\n')
        assert run.merges() == [{"event": "merged"}, {"event": "merged", "n": 2}]


@pytest.mark.real
def test_a_run_says_which_process_has_died_and_why() -> None:
    """Holds `Child.failure`."""
    with (
        Deployment() as run,
        pytest.raises(NarrowsError, match=r"broker .*to serve.*fragments\.count"),
    ):
        run.broker({"fragments.count": 0})


@pytest.mark.parametrize("name", cli.BENCHES)
def test_every_bench_has_a_command_and_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.bench([name, "--help"], result_action="return_value")
    told = capsys.readouterr().out
    assert "--short" in told and "--json" in told and "File for the rows." in told, told


def test_all_goes_on_after_a_bench_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Holds `run_all`."""
    monkeypatch.setattr(cli, "BENCHES", {"loop": "", "codec": ""})
    error = NarrowsError(ErrorCode.UNFINISHED, "the broker has died")
    monkeypatch.setattr(loop, "measure", Mock(side_effect=error))
    with pytest.raises(NarrowsError, match=r"failed: loop .*the broker has died"):
        cli.run_all(folder=tmp_path / "new")
    said = json.loads((tmp_path / "new" / "codec.json").read_text())
    assert {row["codec"] for row in said["rows"]} >= {"int4-zstd"}
    assert "bits per parameter" in capsys.readouterr().out
