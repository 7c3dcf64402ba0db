"""The broker's commands; each loads what it needs only when it runs."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("broker", "journal", "journal_report", "plan", "status", "tables", "wire")
