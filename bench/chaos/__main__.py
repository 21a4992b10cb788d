"""Runs the scenarios, prints the table, and ends with one JSON line. Exit code 1 where a promise was broken."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from bench.chaos.play import run
from bench.chaos.record import Record, summary, table
from bench.chaos.results import write, written
from bench.chaos.scenarios import SCENARIOS
from bench.chaos.yard import NotHere


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few jobs a scenario instead of thousands")
    parser.add_argument("--server", choices=["valkey", "redis"], default="valkey")
    parser.add_argument("--only", choices=list(SCENARIOS), action="append", help="may be given again")
    parser.add_argument("--keep", type=Path, help="a folder for the logs of scenarios that fail")
    parser.add_argument("--write", action="store_true", help="into bench/results")
    parser.add_argument("--at-once", type=int, default=1, help="scenarios that run beside each other")
    parser.add_argument("--written", action="store_true", help="runs nothing: the table and line of bench/results")
    options = parser.parse_args()

    def note(records: dict[str, Record]) -> None:
        if options.write:
            write(records, server=options.server, short=options.short)

    names = options.only or list(SCENARIOS)
    try:
        if options.written:
            records = written(server=options.server, short=options.short)
        else:
            records = run(
                names, server=options.server, short=options.short, keep=options.keep, at_once=options.at_once, note=note
            )
    except NotHere as reason:
        print(f"chaos on {options.server}: {reason}", file=sys.stderr)
        return 1 if os.environ.get("CI") == "true" else 0
    print(table(records))
    print(json.dumps(summary(records)))
    return 0 if all(record.is_kept for record in records.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
