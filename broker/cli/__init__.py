"""The broker's commands: `narrows broker`, `status`, `plan`, `keys`, `journal` and `export`.

The command line itself is parsed in src/narrows/__main__.py, `journal` and `keys` in their own
files. Each command loads its modules when it runs, so that `narrows --help` needs neither numba nor
ZeroMQ.
`tables` prints tables for all commands, those of the benches too.
"""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("broker", "journal", "journal_report", "keys", "plan", "status", "tables", "wire")
