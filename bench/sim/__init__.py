"""Seeded simulation of a whole run: the real hosts, store and arithmetic over virtual lines.

One seed draws settings, speeds, lines and faults; thirteen checkers watch. `world` is the clock and
the network, `run` the processes and their faults, `checkers` what must hold, `planted` the bugs
that prove each checker.
"""
