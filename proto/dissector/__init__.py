"""A second reader of the wire format: PROTOCOL.md again, without the structs of `messages`.

It prints frames field by field and names the first byte that is wrong. It knows the format, and
nothing of a run: sessions, rounds and the layout are not checked.
"""

#: Modules that `narrows wire` reads with.
DOOR = ("capture", "envelope", "findings", "journal", "parts", "tables", "text", "zmtp")
