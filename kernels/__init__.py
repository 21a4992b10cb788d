"""One folder per op: `reference.py` is the definition, `dispatch.py` chooses what runs and says why."""
