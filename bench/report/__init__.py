"""`narrows bench report`: all results on one page."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("bench", "command")
