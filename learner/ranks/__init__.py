"""A learner of several ranks: torch spreads one model over processes, and they are one learner.

Rank 0 leads. It has the session, the sockets, the published copies and the coding; the others hold
nothing but their own parameters, and do what it tells. What travels between them is one fragment at
a boundary: to the leader for a snapshot, from it for an adoption.

    boxes      which elements of each parameter a rank holds, as plain data
    agreement  what all ranks tell each other in one vector, one boundary ahead
    meeting    the group of processes over which they meet, and what moves over it
    exchange   the leader's side and that of those who obey, as the training thread calls it
"""
