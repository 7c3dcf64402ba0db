"""The benches of codec and merge: their rows are complete and their yardsticks right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from narrows.bench.codec import bench as codec
from narrows.bench.codec.baselines import baselines
from narrows.bench.kit.outer_grads import drawn, drawn_names, recorded
from narrows.bench.merge import bench as merge
from narrows.learner.reference.recording import RECORDED_ROUND, RecordingHost
from narrows.proto.codec.kernels import F32
from narrows.proto.errors import ConfigError
from narrows.proto.fragments import Fragment


def test_every_row_has_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(codec, "ELEMENTS", 1 << 18)
    monkeypatch.setattr(codec, "REPEATS", 1)
    codec.run_codec_bench(None, tmp_path / "rows.json", tmp_path / "rate.svg")
    result = json.loads((tmp_path / "rows.json").read_text())
    rows = result["rows"]
    assert {row["data"] for row in rows} == {*drawn_names(), "recorded"}
    for row in rows:
        assert row["encode_params_per_s"] > 0 and row["memcpy_params_per_s"] > 0
        assert 0 < row["wire_bits_per_param"] < 40
        ours = row["rho"] is not None
        assert (row["decode_accumulate_params_per_s"] is not None) == ours
        assert (row["decode_merge_params_per_s"] is not None) == ours
    keys = [(r["data"], r["codec"], r["rho"], r["threads"]) for r in rows]
    assert len(set(keys)) == len(keys)
    assert len(result["lone_elements"]) == 15
    assert (tmp_path / "rate.svg").read_text().startswith("<?xml")
    assert "gaussian" in capsys.readouterr().out


def test_int4_is_near_the_shannon_bound_of_gaussian_data() -> None:
    """The promised bound: within 0.34 bit from rho 0.4 to 0.7, 0.37 at 1."""
    data = drawn("gaussian", 1 << 20)
    for rho, gap in ((0.4, 0.34), (0.5, 0.34), (0.7, 0.34), (1.0, 0.37)):
        row = codec._ours(data, "int4-zstd", rho, 1, 1.0)
        assert row.shannon_bits_at_snr is not None
        assert 0 < row.wire_bits_per_param - row.shannon_bits_at_snr <= gap


def test_recorded_outer_grads_take_less_than_3_bits() -> None:
    row = codec._ours(recorded(), "int4-zstd", 0.5, 1, 1.0)
    assert row.wire_bits_per_param <= 2.9
    assert row.snr_db is not None and row.snr_db >= 16.8


def test_shannon_bound_and_snr() -> None:
    values = np.ones(100, np.float32)
    assert codec.snr_db(values, values) is None
    assert codec.shannon_bits(None) is None
    snr = codec.snr_db(values, values * np.float32(0.5))
    assert snr == pytest.approx(6.0206, abs=1e-3)
    assert codec.shannon_bits(snr) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("baseline", baselines(), ids=lambda each: each.name)
def test_a_baseline_sends_what_it_says(baseline: object) -> None:
    from narrows.bench.codec.baselines import CodecBaseline

    assert isinstance(baseline, CodecBaseline)
    values = drawn("laplace", 1 << 16).values
    message = baseline.encode(values)
    sent = baseline.decode(message)
    assert 0 < baseline.size_bytes(message) < 5 * values.size
    snr = codec.snr_db(values, sent)
    assert sent.shape == values.shape
    assert snr is None or snr > 10


def test_no_recording(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no recording"):
        recorded(tmp_path / "missing.safetensors")


class Ramp:
    """Parameters that fall by 1 between adoption and snapshot."""

    def snapshot(self, fragment: Fragment, out: F32) -> None:
        out.fill(-1.0)

    def adopt(self, fragment: Fragment, values: F32) -> None:
        pass


def test_one_outer_grad_of_each_fragment_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "recorded.safetensors"
    host = RecordingHost(Ramp(), path)
    part = drawn("gaussian", 1024).fragment
    out = np.empty(part.elements, np.float32)
    for round_ in range(1, RECORDED_ROUND + 3):
        host.adopt(part, np.full(part.elements, float(round_), np.float32))
        host.snapshot(part, out)
        assert path.exists() == (round_ >= RECORDED_ROUND)
    data = recorded(path)
    assert data.values.tolist() == [RECORDED_ROUND + 1.0] * part.elements
    assert data.fragment.elements == part.elements
    save_file({"other": out}, path)
    with pytest.raises(ConfigError, match="is no recording"):
        recorded(path)
    path.write_bytes(b"junk")
    with pytest.raises(ConfigError, match="is no recording"):
        recorded(path)


def test_the_memory_of_a_merge_is_what_the_formula_says() -> None:
    row = merge._measured(16, 1 << 22, 1)
    assert row.peak_bytes == pytest.approx(row.formula_bytes, rel=0.1)
    assert row.params_per_s > 0
    shares = [getattr(row, f"share_{stage}") for stage in merge.STAGES]
    assert min(shares) > 0 and sum(shares) == pytest.approx(1.0)
