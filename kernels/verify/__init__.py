"""How many of a sequence's proposed tokens are the tokens it would have drawn itself."""
