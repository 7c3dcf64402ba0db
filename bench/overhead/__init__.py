"""What the learner costs the training thread; by hand: `python -m narrows.bench.overhead.bench`."""
