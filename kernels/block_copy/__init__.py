"""Copies whole blocks inside the pool: what copy-on-write does before the first write into a shared block."""
