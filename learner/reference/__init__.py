"""A worker to try Narrows with: a compact GPT over bytes, and what its runs record."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("corpus", "gpt", "worker")
