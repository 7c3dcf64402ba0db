"""A compact GPT over bytes: a complete learner to try Narrows with, for demo and benches.

`worker` is the program behind `narrows learner`, `training` its loop, `gpt` and `text` its model
and its data. Only `gpt` and `training` load PyTorch, which takes seconds.
"""
