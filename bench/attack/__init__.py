"""`narrows bench attack`: hostile peers against a real broker with honest learners."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("command",)
