"""`narrows bench merge`: time and memory of a merge."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("command",)
