"""`narrows bench bandwidth`: Gbit/s for a compute utilisation, model and wire."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("command",)
