"""`narrows bench`: the commands, one folder each."""

from __future__ import annotations

import cyclopts

from narrows.bench.attack.command import bench_attack
from narrows.bench.bandwidth.command import bench_bandwidth
from narrows.bench.chaos.command import bench_chaos
from narrows.bench.codec.command import bench_codec
from narrows.bench.everything.command import bench_all
from narrows.bench.goodput.command import bench_goodput
from narrows.bench.journal.command import bench_journal
from narrows.bench.loop.command import bench_loop
from narrows.bench.merge.command import bench_merge
from narrows.bench.peers.command import bench_peers
from narrows.bench.quality.command import bench_quality
from narrows.bench.report.command import bench_report
from narrows.bench.wan.command import bench_wan

bench = cyclopts.App(name="bench", help="Measure what the system costs and what others do.")
bench.command(bench_codec, name="codec")
bench.command(bench_merge, name="merge")
bench.command(bench_quality, name="quality")
bench.command(bench_loop, name="loop")
bench.command(bench_journal, name="journal")
bench.command(bench_bandwidth, name="bandwidth")
bench.command(bench_goodput, name="goodput")
bench.command(bench_chaos, name="chaos")
bench.command(bench_wan, name="wan")
bench.command(bench_peers, name="peers")
bench.command(bench_attack)
bench.command(bench_report, name="report")
bench.command(bench_all, name="all")
