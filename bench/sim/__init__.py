"""Both state machines in virtual time, with faults, and with real training."""

#: Modules that others may import; none is imported here, so that commands start at once.
DOOR = ("broker", "learner", "simulation", "trained", "virtual")
