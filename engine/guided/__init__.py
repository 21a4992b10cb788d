"""Guided output: a grammar decides which tokens may come next. Grammars are llguidance's."""
