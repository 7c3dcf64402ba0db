"""`narrows doctor`: what can go wrong between a site and its broker, one check for each failure.

`findings` says what a check is; `way` looks at the way from a site to the broker, `told` at what
the broker tells of the run, `machine` at the broker's own machine.
"""
