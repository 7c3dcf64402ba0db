"""A compact GPT over bytes: a complete learner to try Narrows with, for demo and benches.

`worker` is the program behind `narrows learner`; `gpt` and `text` are its model and its data.
Importing `gpt` loads PyTorch, which takes seconds.
"""
