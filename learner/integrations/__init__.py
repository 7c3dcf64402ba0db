"""Integrations with frameworks that own the training loop: `transformers` and `lightning`.

Import them as `narrows.integrations.transformers` and `narrows.integrations.lightning`. Each module
needs its framework, so nothing is imported here. docs/frameworks.md says what to type.
"""
