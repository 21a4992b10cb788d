"""The gate of a feed-forward layer: act(gate) * up."""
