"""The queue's proofs: faults injected from outside into real processes, and a ledger of what clients were told.

python -m bench.chaos [--short] [--server valkey|redis] [--only NAME]
"""
