"""The learner's cost for the training thread; by hand: `python -m narrows.bench.overhead.bench`."""
