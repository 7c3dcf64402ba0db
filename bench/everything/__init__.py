"""`narrows bench all`: a selection of every bench, then the report."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("command",)
