"""A real Prometheus (Debian's) scrapes the page, and checks and tests the alerts that we ship."""

import json
import shutil
import subprocess
from pathlib import Path
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from acceptance.kit import Site

from narrows.bench.kit.processes import LOOPBACK, Child, three_ports, wait_until

ALERTS = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Debian's package prometheus is missing"
)

CONFIGURATION = """
global: {{scrape_interval: 1s}}
rule_files: [{alerts}]
scrape_configs:
  - job_name: narrows
    static_configs: [{{targets: ["{target}"]}}]
"""


@pytest.mark.parametrize("command", ["check rules alerts.yml", "test rules alerts_test.yml"])
def test_the_alerts_are_right(command: str) -> None:
    told = subprocess.run(
        ["promtool", *command.split()], cwd=ALERTS, capture_output=True, text=True, timeout=50
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_alerts_name_metrics_that_the_page_serves(site: Site) -> None:
    site.broker()
    site.learner("site-a")
    site.contribute("site-a")
    address = f"{site.page()}/metrics"
    wait_until(lambda: b"narrows_up 1.0" in urlopen(address).read(), "an answer of the broker")
    served = urlopen(address).read().decode()
    rules = (ALERTS / "alerts.yml").read_text()
    names = {word.strip("(){}") for word in rules.replace("[", " ").replace("{", " ").split()}
    used = {name for name in names if name.startswith("narrows_")}
    assert len(used) >= 8
    assert [name for name in used if f"\n{name}" not in f"\n{served}"] == []


def test_prometheus_scrapes_the_page(site: Site, tmp_path: Path) -> None:
    site.broker()
    site.learner("site-a")
    site.contribute("site-a")
    target = site.page().removeprefix("http://")
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(CONFIGURATION.format(alerts=ALERTS / "alerts.yml", target=target))
    place = f"{LOOPBACK}:{site.stack.enter_context(three_ports(LOOPBACK))}"
    prometheus = site.shell(
        "prometheus", "prometheus", f"--config.file={configuration}",
        f"--storage.tsdb.path={tmp_path / 'series'}", f"--web.listen-address={place}",
    )  # fmt: skip

    def value(query: str) -> float | None:
        return newest(place, query, prometheus)

    wait_until(lambda: value("narrows_up") == 1, "a scrape", prometheus)
    assert (value("narrows_merges_total") or 0) > 0
    assert value('narrows_learner_state{learner="site-a",state="training"}') == 1


def newest(place: str, query: str, prometheus: Child) -> float | None:
    """The newest value of a query with one answer; None: there is none yet."""
    try:
        said = json.load(urlopen(f"http://{place}/api/v1/query?query={quote(query)}"))
    except URLError:
        assert prometheus.exitcode is None, prometheus.log
        return None
    found = said["data"]["result"]
    return float(found[0]["value"][1]) if found else None
