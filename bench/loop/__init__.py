"""`narrows bench loop`: versions per second through the whole broker."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("bench", "command")
