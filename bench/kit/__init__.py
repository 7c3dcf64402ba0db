"""The common tools of the benches: processes, lines, rows, results, plots."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = (
    "cells",
    "connections",
    "evidence",
    "failures",
    "lab",
    "loopback",
    "machine",
    "names",
    "nursery",
    "outer_grads",
    "plots",
    "processes",
    "proxy",
    "rows",
    "runner",
    "site_keys",
    "stats",
    "torch_needed",
)
