"""The benches and the demo: every number in the documentation comes from here."""
