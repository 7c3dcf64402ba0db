"""`narrows bench codec`: bits, error and speed of the codecs."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("codings", "command")
