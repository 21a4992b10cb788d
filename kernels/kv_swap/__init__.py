"""Moves whole blocks between the pool and host memory."""
