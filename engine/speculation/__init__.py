"""Guesses at what a sequence says next, so that one forward can confirm several tokens at once. Pure."""
