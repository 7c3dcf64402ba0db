"""`narrows demo`: one model, four learners, one of them killed on the way."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("command", "results", "story")
