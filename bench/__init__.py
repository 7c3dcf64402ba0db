"""Benches, the demo and the simulator: whatever measures the product or shows it."""
