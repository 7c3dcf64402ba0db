"""`narrows bench codec`: bits, error and speed of the codecs, beside what others do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from narrows.bench.codec.baselines import CodecBaseline, baselines
from narrows.bench.kit import machine
from narrows.bench.kit.outer_grads import Data, drawn, drawn_names, recorded
from narrows.broker.cli.tables import Table, show, terminal
from narrows.broker.merging import DecodedVector, merge_vectors, warm_up, weighted_sums
from narrows.proto.codec import F32, EncodedChunk, codec, decode_chunk, encode_fragment, encode_push
from narrows.proto.fragments import Fragment

ELEMENTS: Final = 1 << 22
"""Elements of a drawn fragment: 16 MiB as float32, more than the caches of a core hold."""

CHUNK_ELEMENTS: Final = 1 << 18
REPEATS: Final = 5

RHOS: Final = (0.4, 0.5, 0.6, 0.7, 1.0)
CASES: Final = (
    *(("int4-zstd", rho) for rho in RHOS),
    ("int8-zstd", 0.25),
    ("bf16", 1.0),
    ("raw32", 1.0),
)
CONTRIBUTORS: Final = 4
"""Number of pushes that are decoded and summed together."""

LONE_ROUNDS: Final = 8


@dataclass(frozen=True)
class CodecRow:
    """One codec on one kind of data. Speeds are parameters per second of all threads together."""

    data: str
    codec: str
    rho: float | None
    threads: int
    encode_params_per_s: float
    decode_accumulate_params_per_s: float | None
    """Payloads of CONTRIBUTORS learners: checked, decoded and summed with weights."""
    decode_merge_params_per_s: float | None
    """The same with the rest of the default merge rule: norms, clipping, the mean direction."""
    wire_bits_per_param: float
    snr_db: float | None
    """Signal over error of one exchange; None if the codec loses nothing."""
    shannon_bits_at_snr: float | None
    """Bits that every code of Gaussian data needs at this error."""
    memcpy_params_per_s: float
    """Copying the same float32 array with as many threads, in the same run."""


def run_codec_bench(recording: Path | None, json_file: Path | None, plot: Path | None) -> None:
    """Measures, prints, and writes the requested files."""
    warm_up()
    data = [drawn(name, ELEMENTS) for name in drawn_names()]
    data.append(recorded(recording) if recording else recorded())
    rows: list[CodecRow] = []
    console = terminal()
    for each in data:
        for threads in (1, 2):
            memcpy = _memcpy(each, threads)
            for name, rho in CASES:
                rows.append(_ours(each, name, rho, threads, memcpy))
        memcpy = _memcpy(each, 1)
        rows += [_theirs(each, baseline, memcpy) for baseline in baselines()]
        show(console, table(row for row in rows if row.data == each.name))
    lone = [row for each in data for row in lone_elements(each)]
    show(console, lone_table(lone))
    result = {"rows": [asdict(row) for row in rows], "lone_elements": lone}
    machine.write_result(json_file, "codec", result)
    if plot is not None:
        from narrows.bench.kit.plots import rate_distortion

        rate_distortion([asdict(row) for row in rows], plot)


def snr_db(values: F32, sent: F32) -> float | None:
    """10 log10 of signal over error power; None without error."""
    error = np.sum((values.astype(np.float64) - sent) ** 2)
    signal = np.sum(values.astype(np.float64) ** 2)
    return None if error == 0 else float(10 * np.log10(signal / error))


def shannon_bits(snr: float | None) -> float | None:
    """Bits per parameter of the best code of independent Gaussian values at this error."""
    return None if snr is None else max(0.0, snr / (20 * np.log10(2.0)))


def lone_elements(data: Data) -> Iterator[dict[str, Any]]:
    """Share of one element of 100 rms that is not yet sent after 1 to LONE_ROUNDS exchanges.

    The element is part of the first outer gradient alone; the later ones are noise like all others.
    Codes are clamped, and the rest travels in later exchanges with the residual.
    """
    rms = float(np.sqrt(np.mean(data.values.astype(np.float64) ** 2)))
    place = int(np.argmax(np.abs(data.values)))
    for name, rho in (("int4-zstd", 0.5), ("int4-zstd", 1.0), ("int8-zstd", 0.25)):
        base, local = data.values.copy(), np.zeros_like(data.values)
        base[place] = 100 * rms
        residual, errors = None, list[float]()
        for _ in range(LONE_ROUNDS):
            next_residual = np.empty_like(base)
            list(_push(data.fragment, base, local, residual, name, rho, next_residual))
            errors.append(abs(float(next_residual[place])) / (100 * rms))
            base = data.values.copy()
            base[place] = 0.0
            residual = next_residual
        yield {"data": data.name, "codec": name, "rho": rho, "residual_share_by_round": errors}


def _push(
    fragment: Fragment, base: F32, local: F32, residual: F32 | None, name: str, rho: float,
    next_residual: F32,
) -> Iterator[EncodedChunk]:  # fmt: skip
    return encode_push(
        fragment, base, local, residual,
        codec_name=name, rho=rho, chunk_elements=CHUNK_ELEMENTS, next_residual=next_residual,
    )  # fmt: skip


def _ours(data: Data, name: str, rho: float, threads: int, memcpy: float) -> CodecRow:
    fragment, values = data.fragment, data.values
    sent = np.empty_like(values)
    chunks = list(
        encode_fragment(
            fragment, values,
            codec_name=name, rho=rho, chunk_elements=CHUNK_ELEMENTS, reconstructed=sent,
        )
    )  # fmt: skip
    snr = snr_db(values, sent)
    base, residual = values.copy(), (values * np.float32(0.1))[::-1].copy()
    locals_ = [np.zeros_like(values) for _ in range(threads)]
    next_residual = [np.empty_like(values) for _ in range(threads)]

    def encode(thread: int) -> None:
        for _ in _push(fragment, base, locals_[thread], residual, name, rho, next_residual[thread]):
            pass

    quantised = codec(name).quantised
    payloads = [chunks, *(_encoded(fragment, values, name, rho, i) for i in range(1, CONTRIBUTORS))]

    def decode(_: int) -> None:
        contributions = decoded(fragment, name, payloads)
        shares = np.full((len(fragment.pieces), CONTRIBUTORS), 1 / CONTRIBUTORS)
        weighted_sums(fragment, contributions, shares, np.zeros_like(shares))

    def decode_merge(_: int) -> None:
        merge_vectors(
            fragment, decoded(fragment, name, payloads), [1 / CONTRIBUTORS] * CONTRIBUTORS
        )

    return CodecRow(
        data.name,
        name,
        rho if quantised else None,
        threads,
        _params_per_s(encode, values.size, threads),
        _params_per_s(decode, CONTRIBUTORS * values.size, threads) if quantised else None,
        _params_per_s(decode_merge, CONTRIBUTORS * values.size, threads) if quantised else None,
        8 * sum(len(chunk.payload) for chunk in chunks) / values.size,
        snr,
        shannon_bits(snr),
        memcpy,
    )


def _encoded(
    fragment: Fragment, values: F32, name: str, rho: float, learner: int
) -> list[EncodedChunk]:
    """The push of another learner: the same values in another order."""
    turned = np.roll(values, learner * CHUNK_ELEMENTS // 3)
    chunks = encode_fragment(
        fragment, turned,
        codec_name=name, rho=rho, chunk_elements=CHUNK_ELEMENTS,
        reconstructed=np.empty_like(turned),
    )  # fmt: skip
    return list(chunks)


def decoded(
    fragment: Fragment, name: str, payloads: Sequence[Sequence[EncodedChunk]]
) -> list[DecodedVector]:
    """The broker's work when pushes arrive: payloads checked and decoded."""
    return [
        DecodedVector(
            str(number),
            [
                (c.offset, decode_chunk(fragment, name, c.offset, c.count, c.payload))
                for c in chunks
            ],
        )
        for number, chunks in enumerate(payloads)
    ]


def _theirs(data: Data, baseline: CodecBaseline, memcpy: float) -> CodecRow:
    message = baseline.encode(data.values)
    snr = snr_db(data.values, baseline.decode(message))

    def encode(_: int) -> None:
        baseline.encode(data.values)

    return CodecRow(
        data.name,
        baseline.name,
        None,
        1,
        _params_per_s(encode, data.values.size, 1),
        None,
        None,
        8 * baseline.size_bytes(message) / data.values.size,
        snr,
        shannon_bits(snr),
        memcpy,
    )


def _memcpy(data: Data, threads: int) -> float:
    copies = [np.empty_like(data.values) for _ in range(threads)]
    return _params_per_s(lambda i: np.copyto(copies[i], data.values), data.values.size, threads)


def _params_per_s(work: Callable[[int], None], count: int, threads: int) -> float:
    """Median rate over REPEATS of `count` parameters per thread, after one run to warm up.

    Short work is repeated within a measurement, because the clock is too coarse for it.
    """
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
        times: list[float] = []
        inner = max(1, (1 << 20) // count)
        for _ in range(REPEATS):
            started = time.perf_counter()
            for _ in range(inner):
                list(pool.map(work, range(threads)))
            times.append((time.perf_counter() - started) / inner)
    return count * threads / median(times)


def table(rows: Iterator[CodecRow]) -> Table:
    """A table for people: speeds in G params/s."""
    shown = Table(
        ("data", "codec", "rho", "threads", "bits", "SNR dB", "Shannon", "encode G/s",
         "decode+add G/s", "decode+merge G/s", "memcpy G/s"),
        keys=4,
    )  # fmt: skip

    def number(value: float | None, digits: int, unit: float = 1.0) -> str:
        return "-" if value is None else f"{value / unit:.{digits}f}"

    for row in rows:
        shown.add(
            row.data, row.codec, number(row.rho, 2), str(row.threads),
            number(row.wire_bits_per_param, 2), number(row.snr_db, 1),
            number(row.shannon_bits_at_snr, 2), number(row.encode_params_per_s, 3, 1e9),
            number(row.decode_accumulate_params_per_s, 2, 1e9),
            number(row.decode_merge_params_per_s, 2, 1e9),
            number(row.memcpy_params_per_s, 2, 1e9),
        )  # fmt: skip
    return shown


def lone_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The residual share of a single large element, by exchange."""
    headings = ("data", "codec", "rho", *map(str, range(1, LONE_ROUNDS + 1)))
    shown = Table(headings, keys=3, title="residual share of one element of 100 rms")
    for row in rows:
        shares = [f"{share:.0%}" for share in row["residual_share_by_round"]]
        shown.add(row["data"], row["codec"], str(row["rho"]), *shares)
    return shown
