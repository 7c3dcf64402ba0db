"""Configuration: files, overrides, what is refused and how it is said, the broker's own rules."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest

from narrows.broker import config as broker_config
from narrows.broker.cli.broker import assigned
from narrows.broker.config import BrokerConfig, MergeSection, load_config, preset
from narrows.broker.shared_settings import settings
from narrows.proto.config import Range, Section, described, flatten, override, read_table
from narrows.proto.errors import ConfigError
from narrows.proto.messages import Mode
from narrows.proto.units import Amount, BitRate, Duration, Size


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True)
class Inner(Section):
    wait: Duration = 1.0
    size: Size = 1024
    rate: BitRate = 1e6
    tokens: Annotated[Amount, Range(0, 10**12)] = 0


@dataclass(frozen=True)
class Outer(Section):
    count: Annotated[int, Range(1, 10)] = 4
    ratio: Annotated[float, Range(0, 1)] = 0.5
    on: bool = False
    text: str = "a"
    colour: Colour = Colour.RED
    kind: Literal["this", "that"] = "this"
    inner: Inner = field(default_factory=Inner)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.toml"
    path.write_text(text)
    return path


def read_outer(path: Path) -> Outer:
    return override(Outer(), read_table(path), source=str(path))


def refusal(text: str, tmp_path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_outer(write(tmp_path, text))
    return caught.value


def test_a_file_sets_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'count = 7\nratio = 1\non = true\ncolour = "green"\nkind = "that"\n'
        '[inner]\nwait = "200ms"\nsize = "2KiB"\nrate = "2Gbit/s"\ntokens = "12e9"\n',
    )
    inner = Inner(wait=0.2, size=2048, rate=2e9, tokens=12 * 10**9)
    assert read_outer(path) == Outer(7, 1.0, True, "a", Colour.GREEN, "that", inner)
    assert isinstance(read_outer(path).ratio, float)
    assert isinstance(read_outer(path).colour, Colour)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert read_outer(write(tmp_path, "")) == Outer()


@pytest.mark.parametrize(
    ("text", "message", "expected", "got", "remedy"),
    [
        ("cuont = 1", "cuont: unknown key", "", "", "did you mean count?"),
        ("[inner]\nwiat = '1s'", "inner.wiat: unknown key", "", "", "did you mean inner.wait?"),
        ("wait = '1s'", "wait: unknown key", "", "", "did you mean inner.wait?"),
        ("[iner]", "iner: unknown key", "", "", "did you mean inner?"),
        ("xyzzy = 1", "xyzzy: unknown key", "", "", ""),
        ("count.x = 1", "count: wrong type", "a whole number", "{'x': 1}", ""),
        ("count = '4'", "count: wrong type", "a whole number", "'4'", ""),
        ("count = 4.0", "count: wrong type", "a whole number", "4.0", ""),
        ("count = true", "count: wrong type", "a whole number", "True", ""),
        ("on = 1", "on: wrong type", "true or false", "1", ""),
        ("text = 1", "text: wrong type", "a text", "1", ""),
        ("ratio = nan", "ratio: wrong type", "a finite number", "nan", ""),
        ("inner = 3", "inner: wrong type", "a table", "3", ""),
        ("count = 11", "count: out of range", "1 to 10", "11", ""),
        ("ratio = -0.1", "ratio: out of range", "0 to 1", "-0.1", ""),
        ("kind = 'it'", "kind: wrong type", "one of this, that", "'it'", ""),
        (
            "colour = 'gren'", "colour: unknown value", "one of red, green", "'gren'",
            "did you mean green?",
        ),
        (
            "[inner]\nwait = 3", "inner.wait: without a unit",
            'a text with a unit, such as "1.5s"', "3", 'write "3s"',
        ),
        (
            "[inner]\nsize = 4096", "inner.size: without a unit",
            'a text with a unit, such as "64MiB"', "4096", 'write "4096B"',
        ),
        ("[inner]\nsize = '2KiB'\nwait = '1y'", "inner.wait: a duration with an unknown unit",
         'a duration such as "1.5s"; units: us, ms, s, min, h, d', "'1y'", ""),
        ("[inner]\ntokens = 1.5", "inner.tokens: wrong type", "a whole number", "1.5", ""),
        ("[inner]\ntokens = -1", "inner.tokens: out of range", "0 to 1T", "-1", ""),
        ("ratio = 1" + "0" * 400, "ratio: too large", "a number of 64 bits", "1329 bits", ""),
        ("text = [0x" + "f" * 4000 + "]", "text: wrong type", "a text", "thousands of digits", ""),
    ],
)  # fmt: skip
def test_refusals_name_file_key_expected_and_got(
    text: str, message: str, expected: str, got: str, remedy: str, tmp_path: Path
) -> None:
    error = refusal(text, tmp_path)
    assert error.message == f"{tmp_path / 'some.toml'}: {message}"
    assert (error.expected, error.got, error.remedy) == (expected, got, remedy)


def test_a_unit_that_does_not_fit_is_refused_with_the_key(tmp_path: Path) -> None:
    error = refusal("[inner]\nrate = '2GB'", tmp_path)
    assert "inner.rate: a bit rate with an unknown unit" in error.message
    assert error.got == "'2GB'"


def test_zero_needs_no_unit(tmp_path: Path) -> None:
    assert read_outer(write(tmp_path, "[inner]\nwait = 0")).inner.wait == 0


@pytest.mark.parametrize(
    "text",
    ["count = ", "count = 1\ncount = 2", "\x00", "count = " + "9" * 5000, "count = " + "[" * 5000],
)
def test_what_is_not_toml_is_refused(text: str, tmp_path: Path) -> None:
    assert "not a TOML file" in refusal(text, tmp_path).message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_outer(tmp_path / "missing.toml")


def test_overrides_may_be_dotted_or_nested_and_leave_the_instance() -> None:
    before = Outer()
    after = override(before, {"count": 5, "inner.wait": "2s", "inner": {"size": "1MB"}})
    assert (after.count, after.inner.wait, after.inner.size) == (5, 2.0, 10**6)
    assert before == Outer()


def test_an_override_is_refused_with_its_source() -> None:
    with pytest.raises(ConfigError, match=r"flags: inner\.size\.x: unknown key"):
        override(Outer(), {"inner.size.x": 1}, source="flags")


def test_sections_made_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="count: out of range"):
        Outer(count=0)


def test_flatten_gives_every_value_by_dotted_key() -> None:
    flat = flatten(Outer(count=9))
    assert flat["count"] == 9 and flat["inner.wait"] == 1.0
    assert override(Outer(), {"count": flat["count"]}) == Outer(count=9)


# The broker's configuration.


def test_every_field_of_the_broker_has_a_docstring() -> None:
    tree = ast.parse(inspect.getsource(broker_config))
    for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        if section.name == "BrokerConfig":
            continue
        for place, node in enumerate(section.body):
            if isinstance(node, ast.AnnAssign):
                after = section.body[place + 1]
                text = ast.unparse(node.target)
                assert isinstance(after, ast.Expr), f"{section.name}.{text} has no docstring"
                assert isinstance(after.value, ast.Constant)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("broker.listen", "127.0.0.1:7070", "broker.listen: no address"),
        ("broker.listen", "tcp://host:70000", "broker.listen: no address"),
        ("broker.listen", "tcp://host:7070/x", "broker.listen: no address"),
        ("broker.uplink_port", 7070, "broker.uplink_port: one port twice"),
        ("broker.downlink_port", 65536, "broker.downlink_port: out of range"),
        ("broker.state_dir", "", "broker.state_dir: empty"),
        ("broker.journal_segment", "64M", "broker.journal_segment: a size with an unknown unit"),
        ("broker.journal_segment", 65536, "broker.journal_segment: without a unit"),
        ("broker.journal_segment", "1KiB", "broker.journal_segment: out of range"),
        ("broker.beat", "1us", "broker.beat: out of range"),
        (
            "broker.beat",
            "4s",
            "broker.beat: learners that hear nothing for so long take the broker for lost",
        ),
        ("broker.checkpoint_versions", 0, "broker.checkpoint_versions: out of range"),
        ("run.mode", "dilocco", "run.mode: unknown value"),
        ("run.goal_tokens", "-1", "run.goal_tokens: not a count"),
        ("fragments.count", 4097, "fragments.count: out of range"),
        ("fragments.overlap_steps", 20, "fragments.overlap_steps: as long as the sync period"),
        ("merge.quorum", 0, "merge.quorum: out of range"),
        ("merge.weights", "token", "merge.weights: wrong type"),
        ("merge.rule", "rda", "merge.rule: wrong type"),
        ("merge.clip_ratio", 0.5, "merge.clip_ratio: below the median"),
        ("merge.share_max", 0.2, "merge.share_max: three shares cannot keep to it"),
        ("outer.optimizer", "nestorov", "outer.optimizer: unknown value"),
        ("outer.momentum", 1.0, "outer.momentum: out of range"),
        ("codec.push", "int4", "codec.push: unknown value"),
        ("codec.publish_rho", 0.0, "codec.publish_rho: out of range"),
        ("codec.chunk_elements", 1 << 21, "codec.chunk_elements: out of range"),
        ("wan.streams", 65, "wan.streams: out of range"),
        ("liveness.late", "10s", "liveness.late: not before lost"),
        ("liveness.forget", "9s", "liveness.forget: before the learner is lost"),
        ("liveness.probe", 0, "liveness.probe: no time to answer"),
    ],
)
def test_the_broker_refuses(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(BrokerConfig(), {key: value})
    assert caught.value.message == message
    assert caught.value.expected or caught.value.remedy


@pytest.mark.parametrize(
    "listen", ["tcp://127.0.0.1:0", "tcp://*:7070", "tcp://[::1]:7070", "tcp://broker.example:1"]
)
def test_addresses_that_are_fine(listen: str) -> None:
    assert override(BrokerConfig(), {"broker.listen": listen}).broker.listen == listen


def test_a_range_is_told_in_the_units_of_the_setting() -> None:
    with pytest.raises(ConfigError) as caught:
        override(BrokerConfig(), {"broker.journal_segment": "1KiB"})
    assert (caught.value.expected, caught.value.got) == ("4KiB to 1TiB", "1KiB")
    with pytest.raises(ConfigError) as caught:
        override(BrokerConfig(), {"broker.beat": "2min"})
    assert (caught.value.expected, caught.value.got) == ("10ms to 60s", "120s")


def test_every_size_time_and_rate_of_the_broker_takes_a_unit() -> None:
    """No setting says its unit in its name or in its docstring alone."""
    kinds = {key: takes for key, _, takes in described(BrokerConfig)}
    assert kinds["broker.journal_segment"] == "a size, 4KiB to 1TiB"
    assert kinds["broker.beat"] == "a duration, 10ms to 60s"
    assert kinds["merge.grace_max"] == "a duration"
    assert kinds["wan.up"] == "a bit rate, 0 to 1000Tbit/s"
    assert kinds["run.mode"] == "decoupled, streaming or diloco"
    assert kinds["outer.optimizer"] == "nesterov or sgd"
    assert kinds["codec.push"] == "raw32, f32-blosc2, bf16, int8-zstd, int4-zstd or auto"
    endings = ("_s", "_ms", "_bytes", "_bits_per_s")
    assert not [key for key in flatten(BrokerConfig()) if key.endswith(endings)]


def test_the_defaults_can_be_set_as_they_are_shown() -> None:
    shown = described(BrokerConfig)
    assert [key for key, _, _ in shown] == list(flatten(BrokerConfig()))
    told = assigned([f"{key}={default}" for key, default, _ in shown])
    assert override(BrokerConfig(), told) == BrokerConfig()


def test_two_values_that_belong_together_can_change_together() -> None:
    config = override(BrokerConfig(), {"liveness.late": "20s", "liveness.lost": "60s"})
    assert (config.liveness.late, config.liveness.lost) == (20.0, 60.0)


def test_presets() -> None:
    diloco = override(BrokerConfig(), preset("diloco"))
    assert diloco.run.mode is Mode.DILOCO
    assert (diloco.fragments.count, diloco.fragments.overlap_steps) == (1, 0)
    assert diloco.merge == MergeSection(
        weights="equal", rule="mean", norm_limit=0.0, clip_ratio=0.0, rounds_in_flight=1
    )
    assert override(BrokerConfig(), preset(Mode.DECOUPLED)) == BrokerConfig()
    streaming = override(BrokerConfig(), preset("streaming"))
    assert streaming == override(BrokerConfig(), {"run.mode": "streaming"})
    with pytest.raises(ConfigError, match="did you mean diloco"):
        preset("dilocco")


def test_flags_beat_the_file_which_beats_the_preset(tmp_path: Path) -> None:
    path = write(tmp_path, "[run]\nmode = 'diloco'\n[fragments]\ncount = 2\n[merge]\nquorum = 3\n")
    config = load_config(path, {"merge.quorum": 5})
    assert (config.fragments.count, config.merge.quorum, config.merge.rule) == (2, 5, "mean")
    assert load_config(path, {"run.mode": "streaming"}).merge.rule == "layout"
    assert load_config(None, {}) == BrokerConfig()
    with pytest.raises(ConfigError, match=r"flags: merge\.quorum: out of range"):
        load_config(path, {"merge.quorum": 0})


@pytest.mark.parametrize("text", ["run = 3", "[run]\nmode = 3", "[run]\nmode = 0x" + "f" * 4000])
def test_a_damaged_run_section_is_a_configuration_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run"):
        load_config(write(tmp_path, text), {})


def test_settings_carry_every_shared_value() -> None:
    config = override(
        BrokerConfig(),
        {"run.mode": "streaming", "run.goal_tokens": "1.5M", "run.max_offline": "2h"}
        | {"fragments.count": 7, "codec.push": "raw32", "wan.streams": 2},
    )
    told = settings(config)
    assert told.mode is Mode.STREAMING
    assert (told.goal_tokens, told.max_offline_s, told.fragment_count) == (1_500_000, 7200.0, 7)
    assert (told.push_codec, told.publish_codec, told.streams) == ("raw32", "int4-zstd", 2)
    names = {each.name for each in dataclasses.fields(config.codec)}
    assert {"push_rho", "publish_rho", "chunk_elements", "error_feedback"} <= names
    assert told.push_rho == config.codec.push_rho
    assert told.overlap_steps == config.fragments.overlap_steps


def test_errors_can_be_handed_from_process_to_process() -> None:
    error = ConfigError("no such key", expected="rate", got="rat", remedy="did you mean rate")
    again = copy.copy(error)
    assert type(again) is ConfigError and str(again) == str(error)
    assert (again.code, again.got, again.remedy) == (error.code, "rat", error.remedy)
