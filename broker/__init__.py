"""The standalone broker: it merges pushes, makes versions durable and publishes them. No torch."""
