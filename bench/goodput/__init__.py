"""`narrows bench goodput`: useful time under failures, for up to millions of chips."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("command",)
