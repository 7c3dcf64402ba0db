"""Narrows: one model trained on several islands of compute joined by an ordinary network."""

__version__ = "0.1.0"
