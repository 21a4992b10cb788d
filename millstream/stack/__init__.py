"""All processes as one tree."""
