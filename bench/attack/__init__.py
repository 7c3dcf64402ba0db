"""`narrows bench attack`: what attackers can do, measured."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("command",)
