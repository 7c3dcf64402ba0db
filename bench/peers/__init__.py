"""`narrows bench peers`: other systems beside ours, each in its own environment."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("command", "envs", "exchange", "member", "systems")
