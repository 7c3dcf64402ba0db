"""`narrows bench wan`: exchanges, budgets and training over shaped lines."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("budget", "command", "training")
