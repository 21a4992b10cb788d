"""Puts a step's new keys and values into the paged pool."""
