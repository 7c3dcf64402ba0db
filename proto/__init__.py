"""The wire protocol as code, and everything else that both of its ends share.

PROTOCOL.md is the specification. The flat files hold messages and the terms they are made of,
frames, limits, errors, the layout of a model and its cut into fragments, the schedule of the
lockstep modes, units, and configuration; everybody may import them. The districts are `codec`
(values to bytes), `flow` (pacing and reassembly) and `shell` (the little I/O that both sides
share); others import what a district's __init__ names. Everything but `shell` is pure: time and
chance come in as arguments.
"""
