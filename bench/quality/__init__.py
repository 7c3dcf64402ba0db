"""`narrows bench quality`: loss against bits, settings and learners."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("baselines", "command", "run")
