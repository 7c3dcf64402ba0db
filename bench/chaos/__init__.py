"""`narrows bench chaos`: a run whose processes are killed, stopped and cut off."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("command", "run")
