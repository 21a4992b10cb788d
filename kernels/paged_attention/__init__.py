"""Attention over keys and values that lie in blocks, for prefill chunks and decodes in one batch."""
