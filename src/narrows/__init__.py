"""Narrows: one model trained at several sites over ordinary lines."""

__version__ = "0.1.0"
