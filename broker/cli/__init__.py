"""The broker's commands: `narrows broker`, `status`, `plan`, `journal` and `export`.

The command line itself is parsed in src/narrows/__main__.py, and `journal` in its own file. Each
command loads its modules when it runs, so that `narrows --help` needs neither numba nor ZeroMQ.
`tables` prints tables for all commands, those of the benches too.
"""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("broker", "journal", "journal_report", "plan", "status", "tables", "wire")
