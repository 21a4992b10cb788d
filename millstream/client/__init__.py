"""The Python client of a gateway."""
