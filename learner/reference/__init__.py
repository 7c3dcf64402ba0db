"""Trains a compact GPT over bytes: a complete worker to try Narrows with.

`worker` is the process behind `narrows learner`; `gpt` and `corpus` are its model and its text,
which demo and benches use as well. Commands import these modules one by one, because torch takes
seconds to load.
"""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("corpus", "gpt", "worker")
