"""The corpus: a split by name that everybody gets, and windows in an order of one's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from narrows.learner.reference.corpus import (
    SECTION_BYTES,
    Reader,
    build_corpus,
    fixed_windows,
    folder_files,
    load_corpus,
    side_of,
    stdlib_files,
)
from narrows.proto.errors import ConfigError


def noise(name: str, length: int = 400) -> bytes:
    seed = int.from_bytes(name.encode(), "little")
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8).tobytes()


def noise_files(count: int = 200) -> dict[str, bytes]:
    return {name: noise(name) for name in (f"file-{index}.txt" for index in range(count))}


def names_of(side: str, files: dict[str, bytes]) -> list[str]:
    return [name for name in sorted(files) if side_of(name) == side]


def test_the_split_follows_the_names_alone() -> None:
    files = noise_files()
    corpus = build_corpus(files)
    assert corpus.validation.tobytes() == b"".join(files[n] for n in names_of("validation", files))
    assert corpus.train.tobytes() == b"".join(files[n] for n in names_of("train", files))
    assert len(corpus.train) + len(corpus.validation) + len(corpus.test) == 200 * 400
    assert corpus.files == 200 and corpus.dropped == ()
    assert 0.85 < len(corpus.train) / (200 * 400) < 0.95


def test_the_digest_sees_names_and_bytes_but_not_the_order() -> None:
    files = noise_files(60)
    digest = build_corpus(files).corpus_digest
    assert build_corpus(dict(reversed(files.items()))).corpus_digest == digest
    assert build_corpus(files | {"file-0.txt": b"other"}).corpus_digest != digest
    renamed = {("moved-" + n if n == "file-0.txt" else n): text for n, text in files.items()}
    assert build_corpus(renamed).corpus_digest != digest


def test_a_held_out_copy_of_train_text_is_dropped() -> None:
    files = noise_files()
    copied, kept = names_of("validation", files)[:2]
    # A quarter copied is far above the limit, whatever the sampling of shingles picks.
    files[copied] = files[names_of("train", files)[0]][:200] + noise("fresh", 400)
    corpus = build_corpus(files)
    assert corpus.dropped == (copied,)
    assert files[copied] not in corpus.validation.tobytes()
    assert files[kept] in corpus.validation.tobytes()


def test_the_library_has_enough_text_and_neither_tests_nor_generated_modules() -> None:
    files = stdlib_files()
    assert "argparse.py" in files and "json/decoder.py" in files
    assert not any("test" in name.split("/")[:-1] for name in files)
    assert not any(name.startswith(("_sysconfigdata", "encodings", "token.py")) for name in files)
    corpus = load_corpus()
    assert len(corpus.train) > 20 * len(corpus.validation) > 0
    assert corpus.corpus_digest in corpus.describe()


def test_a_folder_is_read_by_suffix_and_long_files_in_sections(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_bytes(b"short")
    (tmp_path / "image.png").write_bytes(b"no text")
    (tmp_path / "book.txt").write_bytes(b"x" * SECTION_BYTES + b"end")
    assert folder_files(tmp_path) == {
        "book.txt#0": b"x" * SECTION_BYTES,
        "book.txt#1": b"end",
        "sub/a.md": b"short",
    }


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no text"):
        load_corpus(tmp_path)
    with pytest.raises(ConfigError, match="validation text is empty"):
        build_corpus({names_of("train", noise_files())[0]: b"one file"})
    with pytest.raises(ConfigError, match="too short"):
        fixed_windows(np.zeros(8, np.uint8), context=8)


TEXT = np.arange(6401, dtype=np.int64).astype(np.uint8)


def reader(name: str = "a", **options: int | tuple[int, int]) -> Reader:
    return Reader(TEXT, batch=4, context=8, name=name, **options)  # type: ignore[arg-type]


def test_y_is_x_one_byte_later() -> None:
    x, y = next(reader())
    assert x.shape == y.shape == (4, 8) and x.dtype == np.uint8
    np.testing.assert_array_equal(y[:, :-1], x[:, 1:])
    np.testing.assert_array_equal(y, x + np.uint8(1))


def test_every_name_and_seed_has_an_order_of_its_own_that_repeats() -> None:
    first = [next(reader("a"))[0], next(reader("b"))[0], next(reader("a", seed=1))[0]]
    np.testing.assert_array_equal(first[0], next(reader("a"))[0])
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], first[2])


def test_who_returns_goes_on_where_the_run_stands() -> None:
    through = reader()
    batches = [next(through)[0] for _ in range(450)]
    np.testing.assert_array_equal(next(reader(start_batch=449))[0], batches[449])


def test_parts_are_disjoint_and_together_everything() -> None:
    text = np.arange(30 * 8 + 1).astype(np.uint8)
    seen: list[int] = []
    for i in (1, 2, 3):
        part = Reader(text, batch=2, context=8, name="a", part=(i, 3))
        seen += [int(x[0]) for _ in range(5) for x in next(part)[0]]
    assert sorted(seen) == list(range(0, 240, 8))


def test_a_text_shorter_than_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        Reader(TEXT[:40], batch=8, context=8, name="a")
    with pytest.raises(ConfigError, match="part"):
        Reader(TEXT, batch=8, context=8, name="a", part=(3, 2))


def test_fixed_windows_span_the_text() -> None:
    windows = fixed_windows(TEXT, context=8, count=10)
    assert windows.shape == (10, 9)
    assert windows[0, 0] == TEXT[0] and windows[-1, -1] == TEXT[-1]
    assert len(fixed_windows(TEXT[:20], context=8, count=10)) == 2
