"""`narrows bench journal`: what durability costs."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("command",)
