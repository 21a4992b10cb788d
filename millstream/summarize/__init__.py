"""Summarizing from the command line: documents in, progress shown, summaries out."""
