"""The standalone process: merges outer gradients, publishes versions, never needs torch."""
