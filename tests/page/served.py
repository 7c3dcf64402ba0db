"""A page that is served while a test looks at it."""

from acceptance.kit import Site

from narrows.bench.kit.processes import wait_until


def serve(site: Site, *more: str) -> str:
    """Starts `narrows page` on any free port, and returns its address."""
    page = site.command("page", "page", site.address, "--listen", "tcp://127.0.0.1:0", *more)
    wait_until(lambda: "http://" in page.log, "the page's address", page)
    return page.log.partition("is at ")[2].partition(";")[0]
