"""One decoder, driven by a model's configuration."""
